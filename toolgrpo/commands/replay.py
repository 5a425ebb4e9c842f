"""Repeat a recorded episode and show what differs (`toolgrpo replay`).

    toolgrpo replay DIR 17                    its tool calls and its rewards
    toolgrpo replay DIR 17 --with_model PATH  the whole episode, drawn by this model
    toolgrpo replay DIR --all --reward_fn new.py     every episode under another reward, as a table

Tools, rewards and limits are those of the run (`DIR/run.yaml`, or `--config`), with flags over them;
rewards that are given as flags stand in place of all rewards of the run. Where a tool is stateless and
fair, nothing differs; what does is a tool that depends on the time or on a network, a tool or reward that
was changed since, or an environment that draws at random. Only a model needs PyTorch.

It says first which files it runs; those in the recording's folder, somebody else's perhaps, need `--run_its_files`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from toolgrpo.commands.arguments import TOOL_SOURCES, ReplayOptions, ScriptArguments
from toolgrpo.commands.given import Given
from toolgrpo.commands.plugins import load_rewards, load_toolbox
from toolgrpo.commands.run_file import config_of_run, lies_in
from toolgrpo.commands.show import find_episode, recording_in
from toolgrpo.commands.table import ReplayArguments
from toolgrpo.commands.terminal import LOADING, Terminal
from toolgrpo.episode.tool_calls import ToolResult
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.evaluation.grading import grade
from toolgrpo.evaluation.replaying import Again, Answer, calls_again, episode_again, first_parting, rewards_again
from toolgrpo.observe.console import show_warnings
from toolgrpo.observe.episode_view import conversation, number_text
from toolgrpo.observe.records import Record, iter_episodes, row_of, shown_step
from toolgrpo.rewards import Reward
from toolgrpo.rollout import RolloutBatch, Scored
from toolgrpo.rollout.limits import TokenCutter
from toolgrpo.support.plain_text import plain
from toolgrpo.tools.base import ToolProvider

if TYPE_CHECKING:
    from toolgrpo.commands.job import Job

_OF_THEN = ("turn_rewards", "turn_advantages", "segment_starts", "drop", "trained")  # a new play has its own, or none
_SHOWN = 200  # characters of a result
_ROWS = 40  # of the table of all episodes
_REWARDS = ("reward", "reward_fn", "reward_function_name", "reward_weights")


def replay_arguments(given: Given) -> tuple[ReplayArguments, ScriptArguments, ReplayOptions, Given]:
    """Return the arguments of a replay, and what was given: to the command, over the run's own file."""
    folder = Path(given.values.get("folder", ""))
    if not given.complaints and given.file is None:
        given = given.over(config_of_run(recording_in(folder)))
    typed = given.values.keys() - given.places.keys()
    if not typed.isdisjoint(("reward", "reward_fn")):
        left = {name: value for name, value in given.values.items() if name not in _REWARDS or name in typed}
        given = replace(given, values=left)
    replay, script, config = given.made((ReplayArguments, ScriptArguments, ReplayOptions))
    runs = ((name, spec) for name, spec in _run_by(replay, given.values) if name not in typed)
    its_own = [f"{spec} ({name})" for name, spec in runs if lies_in(folder, name, spec)]
    if its_own and not replay.run_its_files:
        raise ConfigError(
            f"{folder} itself holds files that the replay would run: {', '.join(its_own)}. Read them, and if you "
            f"trust them, give --run_its_files"
        )
    return replay, script, config, given


def _run_by(replay: ReplayArguments, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every file, module and command that a replay with these values runs, each after its flag."""
    names = ("reward_fn",) if replay.all else (*TOOL_SOURCES, "reward_fn", *(["agent"] if replay.with_model else []))
    for name in names:
        found = values.get(name) or []
        yield from ((name, str(spec)) for spec in (found if isinstance(found, list) else [found]))
    if replay.with_model and values.get("trust_remote_code"):
        yield "trust_remote_code", replay.with_model


@dataclass
class ReplayRun:
    """Replay one episode, or ask rewards about all; `run` prints the differences and returns whether there are any."""

    replay: ReplayArguments
    script: ScriptArguments
    config: ReplayOptions
    given: Given
    terminal: Terminal

    def __post_init__(self) -> None:
        self.folder = recording_in(Path(self.replay.folder))
        if not self.replay.all:
            self.record = find_episode(self.folder, self.replay.episode)
            self.row = row_of(self.record)
            self.then = Trajectory.from_record(self.record)

    def run(self) -> bool:
        runs = [f"{spec} ({name})" for name, spec in _run_by(self.replay, vars(self.script))]
        if runs:
            self.terminal.say(f"runs      {', '.join(runs)}")
        if self.replay.all:
            return self._all(load_rewards(self.script, self.config, self.terminal.in_log_only()))
        quiet = self.terminal.in_log_only()
        tools = load_toolbox(self.script, self.config, quiet)
        try:
            rewards = load_rewards(self.script, self.config, quiet)
            if self.replay.with_model is not None:
                return self._whole(self.replay.with_model, tools, rewards)
            return self._calls_and_rewards(tools, rewards)
        finally:
            if tools is not None:
                tools.close()

    def _all(self, rewards: Sequence[Reward]) -> bool:
        """Ask the rewards about every episode, batch by batch as in the run, and show what differs most."""
        pairs: list[tuple[Record, Scored]] = []
        for _, records in groupby(iter_episodes(self.folder), key=lambda record: (record["step"], record.get("mode"))):
            batch = list(records)
            episodes = tuple(Scored(row_of(record), Trajectory.from_record(record)) for record in batch)
            graded = grade(
                RolloutBatch(episodes=episodes, step=batch[0]["step"]),
                rewards,
                self.config.reward_weights,
                threshold=self.config.success_threshold,
            )
            pairs += zip(batch, graded.episodes, strict=True)
        if not pairs:
            raise ConfigError(f"no line of the recording in {self.folder} is a whole episode")
        differ = [pair for pair in pairs if not _alike(pair[0].get("reward_given"), pair[1].total)]
        differ.sort(key=lambda pair: -abs((pair[1].total or 0.0) - (pair[0].get("reward_given") or 0.0)))
        table = Table(title="episodes with another reward, the largest difference first", title_justify="left")
        for column in ("episode", "step", "reward then", "now", "success then", "now"):
            table.add_column(column, justify="right")
        for record, now in differ[:_ROWS]:
            table.add_row(
                str(record.get("episode")),
                str(shown_step(record)),
                number_text(record.get("reward_given")),
                number_text(now.total),
                _yes(record.get("success")),
                _yes(now.success),
            )
        if differ:
            self.terminal.console.print(table)
        more = f" ({_ROWS} are shown)" if len(differ) > _ROWS else ""
        self.terminal.say(f"{len(differ)} of {len(pairs)} episodes get another reward{more}")
        then = [record["reward_given"] for record, _ in pairs if record.get("reward_given") is not None]
        totals = [one.total for _, one in pairs if one.total is not None]
        if then and totals:
            succeeded = sum(bool(record.get("success")) for record, _ in pairs)
            succeed = sum(bool(one.success) for _, one in pairs)
            self.terminal.say(
                f"mean reward {fmean(then):.3f}, now {fmean(totals):.3f}; successes {succeeded}, now {succeed}"
            )
        return bool(differ)

    def _calls_and_rewards(self, tools: ToolProvider | None, rewards: Sequence[Reward]) -> bool:
        differ, then = False, self.then
        if tools is None:
            self.terminal.say("no tools: nothing to call again")
        else:
            again = calls_again(tools, self.row, then, cut=self._cut())
            for answer in again.answers:
                differ |= not answer.same
                self._say_answer(answer)
            if then.reward != again.reward:
                differ = True
                self.terminal.say(
                    f"differs  the environment gave {number_text(then.reward)}, now {number_text(again.reward)}"
                )
            then = replace(then, reward=again.reward)
        scored = self._scored(then, rewards)
        recorded = self.record.get("rewards") or {}
        for name, now in scored.rewards.items():
            if name in recorded:
                differ |= self._say_number(f"reward {name}", recorded[name], now)
            else:
                why = "the run did not have it, or did not record it"
                self.terminal.say(f"new      reward {name} {number_text(now)} ({why})")
        return self._say_number("reward together", self.record.get("reward_given"), scored.total) or differ

    def _scored(self, trajectory: Trajectory, rewards: Sequence[Reward]) -> Scored:
        config = self.config
        return rewards_again(self.row, trajectory, rewards, config.reward_weights, config.success_threshold)

    def sampled_again(self, model: str, tools: ToolProvider | None) -> Trajectory:
        """Return the episode as this model samples it, from the prompt that the training rendered."""
        self.terminal.say(LOADING)
        from toolgrpo.commands.loaded_model import load_model

        job = self._job()
        parts, config = load_model(job, model, toolbox=tools, player=job.player()), job.config
        rollouts = parts.rollouts(parts.open_engine().engine)
        try:
            rollouts.engine.load_weights(parts.policy.weights())
            return episode_again(rollouts, self.row, config.sampling_options(), config.seed)
        finally:
            rollouts.close()

    def _job(self) -> Job:
        """Return the run's own job, for what needs a model or its tokenizer; an evaluation may have been greedy."""
        from toolgrpo.commands.evaluate import EvaluationConfig
        from toolgrpo.commands.job import Job
        from toolgrpo.trainer.config import ModelConfig

        script, config, model = self.given.made((ScriptArguments, EvaluationConfig, ModelConfig))
        return Job(script, config, model, self.terminal.in_log_only())

    def _whole(self, model: str, tools: ToolProvider | None, rewards: Sequence[Reward]) -> bool:
        """Sample the episode again, and show where the two diverge and how they end."""
        now = self.sampled_again(model, tools)
        scored = self._scored(now, rewards)
        record = {
            **{name: value for name, value in self.record.items() if name not in _OF_THEN},
            **now.to_record(),
            "success": scored.success,
            "reward_given": scored.total,
            "rewards": dict(scored.rewards),
            "advantage": None,
        }
        console = self.terminal.console
        console.print(conversation(self.record))
        console.print(f"\nnow, with {model} and the run's seed:\n", markup=False)
        console.print(conversation(record))
        place = first_parting(self.then, now)
        if place is None:
            self.terminal.say("the same tokens")
            return False
        turn = sum(one.start <= place for one in self.then.turns)
        self.terminal.say(f"they diverge at token {place} after the prompt, in turn {max(1, turn)}")
        self._say_number("reward together", self.record.get("reward_given"), scored.total)
        return True

    def _cut(self) -> Any:
        """Return a function that truncates results as in the episode; it loads a tokenizer only if a result was truncated."""
        if not any(result.truncated for result in self.then.results):
            return lambda result: result
        from toolgrpo.build import load_tokenizer

        job = self._job()
        tokenizer = load_tokenizer(job.model_path(job.model_name), call_markers=job.config.call_markers)
        cutter = TokenCutter(tokenizer, self.config.max_tool_response_tokens)

        def cut(result: ToolResult) -> ToolResult:
            shown = cutter(result.content, result.left_out)
            return replace(result, content=shown.text, left_out=shown.left_out)

        return cut

    def _say_answer(self, answer: Again) -> None:
        if answer.call is None:
            asked = "the user"
        elif answer.call.arguments is None:
            asked = answer.call.raw
        else:
            arguments = ", ".join(f"{name}={value!r}" for name, value in answer.call.arguments.items())
            asked = f"{answer.call.name}({arguments})"
        shown, then, now = f"turn {answer.turn + 1}: {asked}", _short(answer.then), _short(answer.now)
        differs = f"differs  {shown}\n         then  {then}\n         now   {now}"
        self.terminal.say(f"same     {shown} -> {then}" if answer.same else differs)

    def _say_number(self, what: str, then: float | None, now: float | None) -> bool:
        same = _alike(then, now)
        differs = f"differs  {what} {number_text(then)}, now {number_text(now)}"
        self.terminal.say(f"same     {what} {number_text(now)}" if same else differs)
        return not same


def run_replay(given: Given, terminal: Terminal) -> int:
    """Run the command; its exit code says whether anything differs."""
    show_warnings(terminal.say)
    return int(ReplayRun(*replay_arguments(given), terminal).run())


def _short(answer: Answer) -> str:
    if answer is None:
        return "(no more)"
    content, error = (answer, None) if isinstance(answer, str) else (answer.content, answer.error)
    text = " ".join(plain(content).split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
    return shown if error is None else f"[{error}] {shown}"


def _alike(then: float | None, now: float | None) -> bool:
    return then == now or (then is not None and now is not None and abs(then - now) < 1e-6)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "?"}[value]

"""Repeat a recorded episode and show what differs (`toolgrpo replay`).

    toolgrpo replay DIR 17                    its tool calls and its rewards
    toolgrpo replay DIR 17 --with_model PATH  the whole episode, drawn by this model

Tools, rewards and limits are those of the run (`DIR/run.yaml`, or `--config`), with flags over them.
Where a tool is stateless and fair, nothing differs; what does is a tool that depends on the time or
on a network, a tool or reward that was changed since, or an environment that draws at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl import ModelConfig

from toolgrpo.build import load_tokenizer
from toolgrpo.calls import ToolResult
from toolgrpo.commands.arguments import ReplayArguments, ScriptArguments, check_arguments
from toolgrpo.commands.given import given_values, parse_args
from toolgrpo.commands.loaded_model import load_model
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.run_config import config_of_run
from toolgrpo.commands.show import find_episode, recording_in
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError
from toolgrpo.evaluation.replaying import Again, Answer, calls_again, episode_again, first_parting, rewards_again
from toolgrpo.observe.episode_view import conversation
from toolgrpo.observe.records import row_of
from toolgrpo.plain_text import plain
from toolgrpo.rewards import Reward
from toolgrpo.rollout import Scored
from toolgrpo.rollout.truncation import TokenCutter
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trajectory import Trajectory

_SHOWN = 200  # characters of a result


def parse_replay_arguments(
    argv: Sequence[str],
) -> tuple[ReplayArguments, ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read DIR and EPISODE, and everything else as the training does, over the run's own file."""
    if len(argv) < 2 or argv[0].startswith("-") or not argv[1].isdecimal():
        raise ConfigError("give the run's output folder and the number of an episode: toolgrpo replay DIR EPISODE")
    folder, number, *flags = argv
    if not any(flag == "--config" or flag.startswith("--config=") for flag in flags):
        flags = ["--config", str(config_of_run(recording_in(Path(folder)))), *flags]
    kinds = (ReplayArguments, ScriptArguments, ToolGRPOConfig, ModelConfig)
    replay, script, config, model = parse_args(kinds, [*flags, "--folder", folder, "--episode", number])
    check_arguments(script, config, model, given_values(kinds, flags))
    return replay, script, config, model


class ReplayRun:
    """Replay one episode; `run` prints the differences and returns whether there are any."""

    def __init__(
        self,
        replay: ReplayArguments,
        script: ScriptArguments,
        config: ToolGRPOConfig,
        model: ModelConfig,
        terminal: Terminal,
    ) -> None:
        self.replay = replay
        self.config = config
        self.terminal = terminal
        self.parts = RunParts(script, config, model, terminal.in_log_only())
        self.record = find_episode(recording_in(Path(replay.folder)), replay.episode)
        self.row = row_of(self.record)
        self.then = Trajectory.from_record(self.record)

    def run(self) -> bool:
        tools = self.parts.toolbox()
        try:
            rewards = self.parts.rewards()
            if self.replay.with_model is not None:
                return self._whole(self.replay.with_model, tools, rewards)
            return self._calls_and_rewards(tools, rewards)
        finally:
            if tools is not None:
                tools.close()

    def _calls_and_rewards(self, tools: Toolbox | None, rewards: Sequence[Reward]) -> bool:
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
                self.terminal.say(f"differs  the environment gave {_number(then.reward)}, now {_number(again.reward)}")
            then = replace(then, reward=again.reward)
        scored = self._scored(then, rewards)
        recorded = self.record.get("rewards") or {}
        for name, now in scored.rewards.items():
            if name in recorded:
                differ |= self._say_number(f"reward {name}", recorded[name], now)
            else:
                why = "the run did not have it, or did not record it"
                self.terminal.say(f"new      reward {name} {_number(now)} ({why})")
        return self._say_number("reward together", self.record.get("reward_given"), scored.total) or differ

    def _scored(self, trajectory: Trajectory, rewards: Sequence[Reward]) -> Scored:
        config = self.config
        return rewards_again(self.row, trajectory, rewards, config.reward_weights, config.success_threshold)

    def sampled_again(self, model: str, tools: Toolbox | None) -> Trajectory:
        """Return the episode as this model samples it, from the prompt that the training rendered."""
        config = self.config
        loaded = load_model(Path(self.parts.model_path(model)), self.parts.model_init_kwargs(), config)
        parts = loaded.parts(config, toolbox=tools, player=self.parts.player())
        rollouts = parts.rollouts(parts.engine(loaded.policy).engine, vocabulary=loaded.vocabulary)
        try:
            rollouts.load_weights(loaded.policy.weights())
            return episode_again(rollouts, self.row, config.sampling_options(), config.seed)
        finally:
            rollouts.close()

    def _whole(self, model: str, tools: Toolbox | None, rewards: Sequence[Reward]) -> bool:
        """Sample the episode again, and show where the two diverge and how they end."""
        now = self.sampled_again(model, tools)
        scored = self._scored(now, rewards)
        record = {
            **self.record,
            **now.to_record(),
            "success": scored.success,
            "reward_given": scored.total,
            "rewards": dict(scored.rewards),
            "advantage": None,
        }
        console = self.terminal.console
        console.print(conversation(self.record))
        console.print(f"\nnow, with {model} and the seed {self.config.seed}:\n", markup=False)
        console.print(conversation(record))
        place = first_parting(self.then, now)
        if place is None:
            self.terminal.say("the same tokens")
            return False
        turn = sum(one.start <= place for one in self.then.turns)
        self.terminal.say(f"they part at token {place} after the prompt, in turn {max(1, turn)}")
        self._say_number("reward together", self.record.get("reward_given"), scored.total)
        return True

    def _cut(self) -> Any:
        """Return a function that truncates results as in the episode; it loads a tokenizer only if a result was truncated."""
        if not any(result.truncated for result in self.then.results):
            return lambda result: result
        tokenizer = load_tokenizer(
            self.parts.model_path(str(self.parts.model.model_name_or_path)), call_markers=self.config.call_markers
        )
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
        self.terminal.say(
            f"same     {shown} -> {then}"
            if answer.same
            else f"differs  {shown}\n         then  {then}\n         now   {now}"
        )

    def _say_number(self, what: str, then: float | None, now: float | None) -> bool:
        same = then == now or (then is not None and now is not None and abs(then - now) < 1e-6)
        self.terminal.say(
            f"same     {what} {_number(now)}" if same else f"differs  {what} {_number(then)}, now {_number(now)}"
        )
        return not same


def _short(answer: Answer) -> str:
    if answer is None:
        return "(no more)"
    content, error = (answer, None) if isinstance(answer, str) else (answer.content, answer.error)
    text = " ".join(plain(content).split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
    return shown if error is None else f"[{error}] {shown}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"

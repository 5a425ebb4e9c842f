"""Look at everything that a training needs, before it costs an hour: what `toolgrpo check` does.

`--dry_run` loads; this also draws. In this order, one line each, and after a failure that leaves
nothing to go on with the rest is left out:

data, tools, rewards   loaded, and fitting together; gold answers get full marks, nonsense little
sandbox                what would hold model-written code on this machine
model, chat            loaded, and the chat format proven on the rows
prompts                their lengths against the engine's window and the episode's budget
samples                k episodes of some questions: calls, mistakes, results, success, live groups
training step          one, with its weights handed to the engine, and the two compared
memory, time           estimated, and measured in what ran

Not covered: several processes (what they need of memory differs, `--max_steps 2` shows it); whether
the model will learn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import ModelConfig

from toolgrpo.commands.arguments import ScriptArguments, check_arguments
from toolgrpo.commands.check_draws import DrawnChecks
from toolgrpo.commands.check_lines import CheckReport
from toolgrpo.commands.config_files import given_names, parse_args
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.rehearsal import rehearse
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError, SandboxError, ToolGRPOError
from toolgrpo.evaluation.before_training import WRITINGS, nonsense, score_made_up
from toolgrpo.rewards import Reward, check_gold
from toolgrpo.sandbox.rungs.ladder import choose_rung
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.trainer import ToolGRPOTrainer

_NAMES_SHOWN = 24
_ROWS_LOOKED_AT = 200  # of gold answers


@dataclass
class CheckArguments:
    """How much is drawn."""

    questions: int = field(default=8, metadata={"help": "Questions that the untrained model is asked."})
    samples: int = field(default=4, metadata={"help": "Episodes for each of them."})
    step: bool = field(default=True, metadata={"help": "Also do one training step (nothing of it is kept)."})
    json: bool = field(default=False, metadata={"help": "Print the result as JSON instead of lines."})

    def __post_init__(self) -> None:
        for name, least in (("questions", 1), ("samples", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


def parse_check_arguments(argv: Sequence[str]) -> tuple[CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read the command line over the YAML file of the training over the defaults."""
    flags = ["--json=true" if flag == "--json" else flag for flag in argv]
    kinds = (CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig)
    check, script, config, model = parse_args(kinds, flags)
    check_arguments(script, config, model, given_names(kinds, flags))
    return check, script, config, model


class CheckRun:
    """Holds the parts while they are looked at; `run` gives the report."""

    def __init__(
        self,
        check: CheckArguments,
        script: ScriptArguments,
        config: ToolGRPOConfig,
        model: ModelConfig,
        terminal: Terminal,
    ) -> None:
        self.config = config
        self.terminal = terminal
        self._folder = tempfile.TemporaryDirectory(prefix="toolgrpo-check-")
        # One step of what would be trained, at a learning rate that moves the weights, and nothing kept.
        one_step = config.changed(
            output_dir=self._folder.name,
            max_steps=1,
            logging_steps=1,
            warmup_steps=0,
            lr_scheduler_type="constant",
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            push_to_hub=False,
            record_episodes=False,
            resume_from_checkpoint=None,
            doctor_every=0,
            max_world_failures=None,
        )
        self.parts = RunParts(script, one_step, model, terminal.in_log_only())
        self.report = CheckReport(lambda line: terminal.console.print(line.shown()))
        self._draws = DrawnChecks(
            self.report,
            self._busy,
            questions=check.questions,
            samples=check.samples,
            max_steps=config.max_steps,
            with_step=check.step,
        )

    def run(self) -> CheckReport:
        """Look at everything; an error of a part is a failure of its line, and ends the check."""
        if self.parts.config.world_size > 1:
            raise ConfigError(
                "toolgrpo check runs in one process; start it without accelerate, or with --num_processes 1"
            )
        with self._folder:
            tools: Toolbox | None = None
            stage = "data"
            try:
                rows = self._data()
                stage = "tools"
                tools = self.parts.toolbox()
                self._tools(tools)
                stage = "reward"
                rewards = self.parts.rewards()
                rows = self.parts.rows_to_score(rows, rewards, "the training rows")
                self.parts.check(rows, tools, rewards)
                by_agent = self.parts.script.agent is not None
                rehearse(rows, tools, rewards, self.config.reward_weights, by_agent=by_agent)
                self._rewards(rows, rewards)
                self._sandbox(rewards)
                stage = "model"
                with self._busy("loading the model and the engine"):
                    trainer = self._trainer(rows, tools, rewards)
                try:
                    stage = "prompts"
                    self._draws.prompts(trainer, rows)
                    stage = "samples"
                    self._draws.samples(trainer, rows)
                    stage = "step"
                    self._draws.step(trainer, rows)
                finally:
                    trainer.close()
            except ToolGRPOError as error:
                self.report.failed(stage, str(error))
            finally:
                if tools is not None:
                    tools.close()
        return self.report

    def _busy(self, doing: str) -> AbstractContextManager[Any]:
        """Say on a terminal what takes so long."""
        console = self.terminal.console
        return console.status(f"{doing} ...") if console.is_terminal else nullcontext()

    # what is loaded

    def _data(self) -> Dataset:
        rows = self.parts.training_rows()
        self.report.passed("data", f"{self.parts.dataset_spec}: {len(rows)} rows", rows=len(rows))
        return rows

    def _tools(self, tools: Toolbox | None) -> None:
        if tools is None:
            self.report.passed("tools", "none")
            return
        mute = [schema["function"]["name"] for schema in tools.schemas if not schema["function"].get("description")]
        said = _some(tools.names)
        if mute:
            self.report.warned("tools", f"{said}; without a description: {_some(mute)}", "Write docstrings")
        else:
            self.report.passed("tools", said, tools=tools.names)

    def _rewards(self, rows: Dataset, rewards: Sequence[Reward]) -> None:
        some = rows.select(range(min(len(rows), _ROWS_LOOKED_AT)))
        for reward in rewards:
            checked = check_gold(some, reward)
            if checked is not None:
                self.report.passed(
                    "reward", f"{reward.name}: the gold answers of {checked} rows score full marks", rows=checked
                )
        try:
            self._made_up(list(some)[:20], rewards)
        except ToolGRPOError as error:
            self.report.warned(
                "reward",
                f"cannot be asked about an episode that was made up: {error}",
                "If real episodes have what it needs, nothing is wrong",
            )

    def _made_up(self, rows: list[dict[str, Any]], rewards: Sequence[Reward]) -> None:
        """Set gold answers, however they may be written, against nonsense."""
        weights, threshold = self.config.reward_weights, self.config.success_threshold

        def mean(write: Any) -> float:
            totals = score_made_up(rows, write, rewards, weights, threshold).totals
            return sum(total or 0.0 for total in totals) / len(totals)  # one that is not scored earns nothing

        bad = mean(nonsense)
        if any(row.get("answer") is None for row in rows):
            self.report.passed("reward", f"nonsense scores {bad:.2f}; there are no gold answers to compare", bad=bad)
            return
        good, how = max((mean(write), how) for how, write in WRITINGS.items())
        said = f"the best gold answers ({how}) score {good:.2f}, nonsense {bad:.2f}"
        if bad >= good:
            self.report.failed(
                "reward", said, "A reward that cannot tell them apart teaches nothing", good=good, bad=bad
            )
        elif good < threshold:
            self.report.warned(
                "reward",
                f"{said}: below success_threshold {threshold:g}",
                "Fine if full marks need more than the answer, such as certain calls",
                good=good,
                bad=bad,
            )
        else:
            self.report.passed("reward", said, good=good, bad=bad)

    def _sandbox(self, rewards: Sequence[Reward]) -> None:
        try:
            rung, said = choose_rung("auto", allow_unsafe=False)
            self.report.passed("sandbox", said.removeprefix("sandbox "), rung=rung.value)
        except SandboxError as error:
            if any(reward.name == "code_exec" for reward in rewards):
                raise
            self.report.warned("sandbox", str(error), "It matters only to tools and rewards that run code")

    def _trainer(self, rows: Dataset, tools: Toolbox | None, rewards: Sequence[Reward]) -> ToolGRPOTrainer:
        parts = self.parts
        trainer = parts.trainer(
            parts.model_path(str(parts.model.model_name_or_path)),
            reward_funcs=list(rewards),
            train_dataset=rows,
            tools=tools,
            agent=parts.script.agent,
            peft_config=parts.peft_config(),
        )
        model, choice = trainer.policy.get_model(), trainer.engine_choice
        n = sum(parameter.numel() for parameter in model.parameters())
        self.report.passed("model", f"{parts.model.model_name_or_path}: {n / 1e6:.3g} M parameters", parameters=n)
        self.report.passed("engine", f"{choice.name} ({choice.why}), a window of {trainer.engine.max_model_len} tokens")
        self.report.passed("chat", f"the {trainer.chat.name} format is proven on conversations of these rows")
        if trainer.untrained_markers is not None:
            said, _, do = trainer.untrained_markers.removeprefix("markers").strip().partition("; ")
            self.report.warned("markers", said, do)
        self._draws.estimate_memory(trainer)
        return trainer


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return ", ".join([*names[:_NAMES_SHOWN], *more])

"""Check everything that a training needs before it costs an hour (`toolgrpo check`).

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

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch
from datasets import Dataset
from trl import ModelConfig

from toolgrpo.commands.arguments import CheckArguments, ScriptArguments, check_arguments
from toolgrpo.commands.check_lines import (
    CheckReport,
    add_agreement,
    add_budget,
    add_calls,
    add_prompts,
    add_step,
    add_success,
)
from toolgrpo.commands.given import given_values, parse_args
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError, SandboxError, ToolGRPOError
from toolgrpo.evaluation.agreement import differences, drawn_tokens, largest_rounding
from toolgrpo.evaluation.before_training import WRITINGS, nonsense, rehearse, score_made_up, untrained_facts
from toolgrpo.rewards import Reward, check_gold
from toolgrpo.rollout import RolloutBatch
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.sandbox.rungs.ladder import choose_rung
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.trainer import ToolGRPOTrainer

_NAMES_SHOWN = 24
_ROWS_LOOKED_AT = 200  # of gold answers and prompts
_GIB = 2**30


def parse_check_arguments(argv: Sequence[str]) -> tuple[CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read the command line over the YAML file of the training over the defaults."""
    kinds = (CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig)
    check, script, config, model = parse_args(kinds, argv)
    check_arguments(script, config, model, given_values(kinds, argv))
    return check, script, config, model


class CheckRun:
    """Run the checks in order; `run` returns the report."""

    def __init__(
        self,
        check: CheckArguments,
        script: ScriptArguments,
        config: ToolGRPOConfig,
        model: ModelConfig,
        terminal: Terminal,
    ) -> None:
        self.check = check
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

    def run(self) -> CheckReport:
        """Check everything; an error of a part is a failure of its line, and ends the check."""
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
                    self._prompts(trainer, rows)
                    stage = "samples"
                    sampled_s = self._samples(trainer, rows)
                    stage = "step"
                    if self.check.step:
                        self._step(trainer, rows)
                    else:
                        self._estimate_time(trainer.args.generation_batch_size, sampled_s)
                finally:
                    trainer.close()
            except ToolGRPOError as error:
                self.report.failed(stage, str(error))
            finally:
                if tools is not None:
                    tools.close()
        return self.report

    def _busy(self, doing: str) -> AbstractContextManager[Any]:
        """Show on a terminal what is running."""
        console = self.terminal.console
        return console.status(f"{doing} ...") if console.is_terminal else nullcontext()

    # what is loaded

    def _data(self) -> Dataset:
        rows = self.parts.training_rows()
        self.report.add("data", f"{self.parts.dataset_spec}: {len(rows)} rows", rows=len(rows))
        return rows

    def _tools(self, tools: Toolbox | None) -> None:
        if tools is None:
            self.report.add("tools", "none")
            return
        mute = [schema["function"]["name"] for schema in tools.schemas if not schema["function"].get("description")]
        if mute:
            said = f"{_some(tools.names)}; without a description: {_some(mute)}"
            self.report.add("tools", said, warning="Write docstrings")
        else:
            self.report.add("tools", _some(tools.names), tools=tools.names)

    def _rewards(self, rows: Dataset, rewards: Sequence[Reward]) -> None:
        some = rows.select(range(min(len(rows), _ROWS_LOOKED_AT)))
        for reward in rewards:
            checked = check_gold(some, reward)
            if checked is not None:
                said = f"{reward.name}: the gold answers of {checked} rows score full marks"
                self.report.add("reward", said, rows=checked)
        try:
            self._made_up(list(some)[:20], rewards)
        except ToolGRPOError as error:
            said = f"cannot be asked about an episode that was made up: {error}"
            self.report.add("reward", said, warning="If real episodes have what it needs, nothing is wrong")

    def _made_up(self, rows: list[dict[str, Any]], rewards: Sequence[Reward]) -> None:
        """Compare the scores of gold answers, however they may be written, with that of nonsense."""
        weights, threshold = self.config.reward_weights, self.config.success_threshold

        def mean(write: Any) -> float:
            totals = score_made_up(rows, write, rewards, weights, threshold).totals
            return sum(total or 0.0 for total in totals) / len(totals)  # one that is not scored earns nothing

        bad = mean(nonsense)
        if any(row.get("answer") is None for row in rows):
            self.report.add("reward", f"nonsense scores {bad:.2f}; there are no gold answers to compare", bad=bad)
            return
        good, how = max((mean(write), how) for how, write in WRITINGS.items())
        said = f"the best gold answers ({how}) score {good:.2f}, nonsense {bad:.2f}"
        failure = warning = ""
        if bad >= good:
            failure = "A reward that cannot tell them apart teaches nothing"
        elif good < threshold:
            said += f": below success_threshold {threshold:g}"
            warning = "Fine if full marks need more than the answer, such as certain calls"
        self.report.add("reward", said, warning=warning, failure=failure, good=good, bad=bad)

    def _sandbox(self, rewards: Sequence[Reward]) -> None:
        try:
            rung, said = choose_rung("auto", allow_unsafe=False)
            self.report.add("sandbox", said.removeprefix("sandbox "), rung=rung.value)
        except SandboxError as error:
            if any(reward.name == "code_exec" for reward in rewards):
                raise
            self.report.add("sandbox", str(error), warning="It matters only to tools and rewards that run code")

    def _trainer(self, rows: Dataset, tools: Toolbox | None, rewards: Sequence[Reward]) -> ToolGRPOTrainer:
        parts, report = self.parts, self.report
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
        report.add("model", f"{parts.model.model_name_or_path}: {n / 1e6:.3g} M parameters", parameters=n)
        report.add("engine", f"{choice.name} ({choice.why}), a window of {trainer.engine.max_model_len} tokens")
        report.add("chat", f"the {trainer.chat.name} format is proven on conversations of these rows")
        if trainer.markers_line is not None:
            said, _, do = trainer.markers_line.removeprefix("markers").strip().partition("; ")
            report.add("markers", said, warning=do)
        self._estimate_memory(model)
        return trainer

    def _estimate_memory(self, model: Any) -> None:
        """Estimate the memory of weights, gradients and an Adam optimizer; activations come on top."""
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * (p.element_size() + 8) for p in model.parameters() if p.requires_grad)
        needed, there = (weights + trained) / _GIB, _memory_there(model) / _GIB
        said = (
            f"weights, gradients and Adam take about {needed:.2f} GiB of {there:.1f}; activations and the engine more"
        )
        failure = "Use --use_peft, ZeRO or FSDP, or a smaller model" if needed > there else ""
        self.report.add("memory", said, failure=failure, needed_gib=needed, there_gib=there)

    # what is drawn

    def _prompts(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        lengths = []
        for row in rows.select(range(min(len(rows), _ROWS_LOOKED_AT))):
            episode = trainer.rollouts.episode(row, 0)
            tools = offered_tools(trainer.toolbox, row)
            schemas = [] if tools is None else tools.schemas
            lengths.append(len(trainer.chat.prompt(episode.messages, schemas, enable_thinking=episode.enable_thinking)))
        add_prompts(self.report, lengths, trainer.engine.max_model_len, trainer.args.max_completion_length)

    def _samples(self, trainer: ToolGRPOTrainer, rows: Dataset) -> float:
        """Draw some episodes from the untrained model; return the seconds per episode."""
        k = self.check.samples
        step = max(1, len(rows) // self.check.questions)
        chosen = [rows[number] for number in range(0, len(rows), step)][: self.check.questions]
        started = time.monotonic()
        with self._busy(f"{len(chosen)} questions, {k} episodes each"):
            batch = trainer.measure([row for row in chosen for _ in range(k)], label="check")
        seconds = (time.monotonic() - started) / len(batch)
        facts, encode = untrained_facts(batch, k), trainer.processing_class
        if trainer.toolbox is not None:
            add_calls(self.report, facts, batch, trainer.toolbox.names)
        add_budget(self.report, facts, batch, lambda text: len(encode(text)["input_ids"]))
        add_success(self.report, facts)
        if not self.check.step:
            self._agreement(trainer, batch, "handed over")
        return seconds

    # what is trained

    def _step(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        started = time.monotonic()
        with self._busy("one training step"):
            trainer.train()
        step_s = time.monotonic() - started
        logged: dict[str, float] = next((log for log in trainer.state.log_history if "reward" in log), {})
        add_step(self.report, logged, step_s, trainer.rollout_seconds)
        with self._busy("handing the weights over"):
            batch = trainer.rollout([rows[number % len(rows)] for number in range(4)], label="after the step")
        self._agreement(trainer, batch, "handed over after the step")
        if torch.cuda.is_available():
            peak, where = torch.cuda.max_memory_allocated() / _GIB, "on the GPU"
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak, where = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB, "in this process"
        steps = self.config.max_steps
        whole = f"; {steps} steps about {steps * step_s / 3600:.2f} h" if steps > 0 else ""
        self.report.add("memory", f"measured: at most {peak:.2f} GiB {where}", peak_gib=peak)
        said = f"measured: {step_s:.1f} s for a step, the first being the slowest{whole}"
        self.report.add("time", said, step_s=step_s)

    def _agreement(self, trainer: ToolGRPOTrainer, batch: RolloutBatch, when: str) -> None:
        """Compare the trainer's log-probabilities with the engine's."""
        policy, autocast = trainer.policy, trainer.accelerator.autocast()
        drawn = drawn_tokens(batch.trajectories)
        found = differences(policy.get_model(), drawn, trainer.args.sampling_options(), autocast)
        add_agreement(self.report, found, largest_rounding(policy.dtype, policy.device), when)

    def _estimate_time(self, episodes: int, episode_s: float) -> None:
        rollout_s = episode_s * episodes
        said = f"a rollout of {episodes} episodes about {rollout_s:.1f} s; the training pass was not tried"
        self.report.add("time", said, rollout_s=rollout_s)


def _memory_there(model: Any) -> float:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return ", ".join([*names[:_NAMES_SHOWN], *more])

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

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from datasets import Dataset
from trl import ModelConfig

from toolgrpo.commands.arguments import ScriptArguments, check_arguments
from toolgrpo.commands.check_lines import CheckReport
from toolgrpo.commands.config_files import parse_args
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.terminal import Terminal
from toolgrpo.data import check_gold
from toolgrpo.errors import ConfigError, SandboxError, ToolGRPOError
from toolgrpo.evaluation.agreement import logprob_difference
from toolgrpo.evaluation.made_up import WRITINGS, nonsense, score_made_up
from toolgrpo.evaluation.untrained import Spread, Untrained, untrained_facts
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes
from toolgrpo.rewards import Reward
from toolgrpo.rollout import RolloutBatch
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.sandbox.rungs.ladder import choose_rung
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.trainer import ToolGRPOTrainer

__all__ = ["CheckArguments", "CheckRun", "parse_check_arguments"]

_ROWS_LOOKED_AT = 200  # of gold answers and of prompts
_GIB = 2**30


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
    check, script, config, model = parse_args((CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig), flags)
    check_arguments(script, config, model)
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
                self.parts.check(rows, tools, rewards)
                self._rewards(rows, rewards)
                self._sandbox(rewards)
                stage = "model"
                with self._busy("loading the model and the engine"):
                    trainer = self._trainer(rows, tools, rewards)
                try:
                    stage = "prompts"
                    self._prompts(trainer, rows)
                    stage = "samples"
                    self._samples(trainer, rows)
                    stage = "step"
                    self._step(trainer, rows)
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
        said = ", ".join(tools.names)
        if mute:
            self.report.warned("tools", f"{said}; without a description: {', '.join(mute)}", "Write docstrings")
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
            return sum(totals) / len(totals)

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
            peft_config=parts.peft_config(),
        )
        model, choice = trainer.policy.get_model(), trainer.engine_choice
        n = sum(parameter.numel() for parameter in model.parameters())
        self.report.passed("model", f"{parts.model.model_name_or_path}: {n / 1e6:.3g} M parameters", parameters=n)
        self.report.passed("engine", f"{choice.name} ({choice.why}), a window of {trainer.engine.max_model_len} tokens")
        self.report.passed("chat", f"the {trainer.chat.name} format is proven on conversations of these rows")
        self._estimate_memory(trainer)
        return trainer

    # what is drawn

    def _prompts(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        window, budget = trainer.engine.max_model_len, trainer.args.max_completion_length
        lengths = []
        for row in rows.select(range(min(len(rows), _ROWS_LOOKED_AT))):
            episode = trainer.rollouts.episode(row, 0)
            tools = offered_tools(trainer.toolbox, row)
            schemas = [] if tools is None else tools.schemas
            lengths.append(len(trainer.chat.prompt(episode.messages, schemas, enable_thinking=episode.enable_thinking)))
        spread = Spread.of(lengths)
        left = window - spread.largest
        said = f"tokens of {spread.n} prompts: {spread}; the window of {window} leaves {left:.0f} for an episode of {budget}"
        numbers = {"longest": spread.largest, "median": spread.median, "window": window, "budget": budget}
        if left < 1:
            self.report.failed("prompts", said, "Shorten them, or raise --vllm_max_model_length", **numbers)
        elif left < budget:
            self.report.warned(
                "prompts",
                said,
                "Long episodes end with stop/context_full; raise --vllm_max_model_length or lower "
                "--max_completion_length",
                **numbers,
            )
        else:
            self.report.passed("prompts", said, **numbers)

    def _samples(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        k = self.check.samples
        step = max(1, len(rows) // self.check.questions)
        chosen = [rows[number] for number in range(0, len(rows), step)][: self.check.questions]
        asked = [row for row in chosen for _ in range(k)]
        started = time.monotonic()
        with self._busy(f"{len(chosen)} questions, {k} episodes each"):
            batch = trainer.measure(asked, label="check")
        self._sampled_s = (time.monotonic() - started) / len(batch)
        facts = untrained_facts(batch, k)
        self._calls(facts, batch, trainer.toolbox)
        self._budget(facts, batch, trainer)
        self._success(facts)

    def _calls(self, facts: Untrained, batch: RolloutBatch, tools: Any) -> None:
        if tools is None:
            return
        said = f"{_percent(facts.calling)} of {facts.episodes} episodes call a tool well; {facts.calls} calls"
        if facts.malformed:
            said += f", {facts.malformed.total()} of them cannot be run ({_counts(facts.malformed)})"
        if facts.failed:
            said += f", {facts.failed.total()} fail ({_counts(facts.failed)})"
        forms = count_lookalikes(batch.trajectories, tools.names)
        if forms:
            said += f"; {forms.total()} turns look like calls in another form: " + ", ".join(
                f"{FORMS[form]} ({count})" for form, count in forms.most_common()
            )
        numbers = {"calling": facts.calling, "calls": facts.calls, "malformed": dict(facts.malformed)}
        if facts.calling == 0:
            teach = "Teach the form first (toolgrpo sft), put worked examples before the questions"
            accept = ", or run such calls with --unmarked_calls accept" if facts.malformed["unmarked"] else ""
            self.report.warned("calls", said, teach + accept, **numbers)
        elif facts.malformed.total() > facts.calls / 2 or facts.failed.total() > facts.calls / 2:
            self.report.warned(
                "calls", said, "Read some in `toolgrpo evaluate`, and mend what the tools say", **numbers
            )
        else:
            self.report.passed("calls", said, **numbers)

    def _budget(self, facts: Untrained, batch: RolloutBatch, trainer: ToolGRPOTrainer) -> None:
        """Set episodes and tool results against their limits."""
        encode = trainer.processing_class
        results = [result for trajectory in batch.trajectories for result in trajectory.results]
        lengths = Spread.of([len(encode(result.content)["input_ids"]) for result in results])
        if results:
            cut = sum(result.truncated for result in results)
            said = f"tokens of {len(results)} results: {lengths}; {cut} were cut"
            if cut > len(results) / 4:
                self.report.warned("results", said, "Raise --max_tool_response_tokens, or let tools say less", cut=cut)
            else:
                self.report.passed("results", said, cut=cut, longest=lengths.largest)
        episodes = Spread.of([len(trajectory.ids) for trajectory in batch.trajectories])
        said = f"tokens of {len(batch)} episodes: {episodes}; they end with {_counts(facts.stops)}"
        short = facts.stops["length"] + facts.stops["context_full"] + facts.stops["max_turns"]
        if short > len(batch) / 4:
            limits = "--max_completion_length, --max_turn_tokens, --max_turns"
            self.report.warned("length", said, f"{short} were cut: see {limits}", stops=dict(facts.stops))
        else:
            self.report.passed("length", said, stops=dict(facts.stops))
        if facts.stops["engine_failure"]:
            self.report.failed("engine", f"{facts.stops['engine_failure']} episodes were lost", "See the log")

    def _success(self, facts: Untrained) -> None:
        said = (
            f"pass@1 {facts.pass_1:.2f}, pass@{facts.k} {facts.pass_k:.2f} on {facts.n} questions; rewards from "
            f"{min(facts.rewards):g} to {max(facts.rewards):g}; they differ in {_percent(facts.live)} of the groups"
        )
        numbers = {"pass_1": facts.pass_1, "pass_k": facts.pass_k, "k": facts.k, "live": facts.live}
        if facts.all_failed:
            do = "There is nothing to reinforce: easier rows, a larger model, or the form first (toolgrpo sft)"
            self.report.warned("success", said, do, **numbers)
        elif facts.all_solved:
            self.report.warned("success", said, "There is nothing left to learn: take harder rows", **numbers)
        elif facts.live == 0:
            self.report.warned("success", said, "Larger groups (--num_generations) find what differs", **numbers)
        else:
            self.report.passed("success", said, **numbers)

    # what is trained

    def _step(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        if not self.check.step:
            self._estimate_time(trainer)
            return
        started = time.monotonic()
        with self._busy("one training step"):
            trainer.train()
        step_s = time.monotonic() - started
        logged = next((log for log in trainer.state.log_history if "reward" in log), {})
        loss, gradient = logged.get("loss", 0.0), logged.get("grad_norm")
        said = f"done in {step_s:.1f} s ({trainer.rollout_seconds:.1f} s of it the rollout), loss {loss:.3g}"
        if gradient is None or gradient != gradient or gradient in (float("inf"), -float("inf")):
            self.report.failed("step", f"{said}, gradient {gradient}", "A gradient must be a number: see the log")
        elif gradient == 0:
            do = "No group differed in reward, so this step taught nothing; see docs/training_issues.md"
            self.report.warned("step", f"{said}, gradient 0", do, seconds=step_s)
        else:
            self.report.passed("step", f"{said}, gradient {gradient:.3g}", seconds=step_s, grad_norm=gradient)
        self._agreement(trainer, rows)
        self._measured(trainer, step_s)

    def _agreement(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        """Let the engine draw from the new weights, and the trainer score what it drew."""
        with self._busy("handing the weights over"):
            batch = trainer.rollout([rows[number % len(rows)] for number in range(4)], label="after the step")
            difference = logprob_difference(
                trainer.policy.get_model(),
                batch.trajectories,
                trainer.args.temperature,
                trainer.accelerator.autocast(),
            )
        if difference is None:
            self.report.warned(
                "weights",
                "handed over, but the engine gives no log-probabilities to compare",
                "Nothing corrects for a difference; engine transformers has the trainer's own",
            )
            return
        said = (
            f"handed over after the step; log-probabilities of engine and trainer differ by {difference:.1e} on average"
        )
        if difference > 0.1:
            self.report.failed("weights", said, "They should be one model: see docs/engines.md", difference=difference)
        elif difference > 0.02:
            do = "Above 0.01 look at precision and sampling options (docs/training_issues.md)"
            self.report.warned("weights", said, do, difference=difference)
        else:
            self.report.passed("weights", said, difference=difference)

    def _estimate_memory(self, trainer: ToolGRPOTrainer) -> None:
        """Say what weights, gradients and an Adam optimizer take; activations come on top."""
        model = trainer.policy.get_model()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * (p.element_size() + 8) for p in model.parameters() if p.requires_grad)
        needed, there = (weights + trained) / _GIB, _memory_there(model) / _GIB
        said = (
            f"weights, gradients and Adam take about {needed:.2f} GiB of {there:.1f}; activations and the engine more"
        )
        if needed > there:
            do = "Use --use_peft, ZeRO or FSDP, or a smaller model"
            self.report.failed("memory", said, do, needed_gib=needed, there_gib=there)
        else:
            self.report.passed("memory", said, needed_gib=needed, there_gib=there)

    def _estimate_time(self, trainer: ToolGRPOTrainer) -> None:
        episodes = trainer.args.generation_batch_size
        rollout_s = self._sampled_s * episodes
        self.report.passed(
            "time",
            f"a rollout of {episodes} episodes about {rollout_s:.1f} s; the training pass was not tried",
            rollout_s=rollout_s,
        )

    def _measured(self, trainer: ToolGRPOTrainer, step_s: float) -> None:
        if torch.cuda.is_available():
            peak, where = torch.cuda.max_memory_allocated() / _GIB, "on the GPU"
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak, where = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB, "in this process"
        steps = self.config.max_steps
        whole = f"; {steps} steps about {steps * step_s / 3600:.2f} h" if steps > 0 else ""
        self.report.passed("memory", f"measured: at most {peak:.2f} GiB {where}", peak_gib=peak)
        self.report.passed(
            "time", f"measured: {step_s:.1f} s for a step, the first being the slowest{whole}", step_s=step_s
        )


def _memory_there(model: Any) -> float:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

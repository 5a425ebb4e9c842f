"""The checks that draw: prompts against the window, episodes of the untrained model, one step.

Each adds its lines to a report. `check.py` loads what they need and says in which order they run.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from datasets import Dataset

from toolgrpo.commands.check_lines import CheckReport
from toolgrpo.evaluation.agreement import differences, drawn_tokens, largest_rounding
from toolgrpo.evaluation.before_training import Spread, Untrained, untrained_facts
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes
from toolgrpo.observe.doctor import page_here, why_broken
from toolgrpo.rollout import RolloutBatch
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.trainer.trainer import ToolGRPOTrainer

_ROWS_LOOKED_AT = 200  # of prompts
_GIB = 2**30


class DrawnChecks:
    """What the drawn checks share: where their lines go, how much is drawn, and what says that it takes a while."""

    def __init__(
        self,
        report: CheckReport,
        busy: Callable[[str], AbstractContextManager[Any]],
        *,
        questions: int,
        samples: int,
        max_steps: int,
        with_step: bool,
    ) -> None:
        self._report = report
        self._busy = busy
        self._questions = questions
        self._samples = samples
        self._max_steps = max_steps
        self._with_step = with_step
        self._sampled_s = 0.0  # per episode

    def prompts(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
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
            self._report.failed("prompts", said, "Shorten them, or raise --vllm_max_model_length", **numbers)
        elif left < budget:
            self._report.warned(
                "prompts",
                said,
                "Long episodes end with stop/context_full; raise --vllm_max_model_length or lower "
                "--max_completion_length",
                **numbers,
            )
        else:
            self._report.passed("prompts", said, **numbers)

    def samples(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        k = self._samples
        step = max(1, len(rows) // self._questions)
        chosen = [rows[number] for number in range(0, len(rows), step)][: self._questions]
        asked = [row for row in chosen for _ in range(k)]
        started = time.monotonic()
        with self._busy(f"{len(chosen)} questions, {k} episodes each"):
            batch = trainer.measure(asked, label="check")
        self._sampled_s = (time.monotonic() - started) / len(batch)
        facts = untrained_facts(batch, k)
        self._calls(facts, batch, trainer.toolbox)
        self._budget(facts, batch, trainer)
        self._success(facts)
        if not self._with_step:
            self._agreement(trainer, batch, "handed over")

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
            self._report.warned("calls", said, teach + accept, **numbers)
        elif (why := why_broken(facts.malformed + facts.failed, facts.calls)) is not None:
            do = f"Go on with `toolgrpo sft` until most calls can be run ({page_here('calls-that-fail')})"
            self._report.warned("calls", said + why, do, **numbers)
        elif facts.malformed.total() > facts.calls / 2 or facts.failed.total() > facts.calls / 2:
            self._report.warned(
                "calls", said, "Read some in `toolgrpo evaluate`, and mend what the tools say", **numbers
            )
        else:
            self._report.passed("calls", said, **numbers)

    def _budget(self, facts: Untrained, batch: RolloutBatch, trainer: ToolGRPOTrainer) -> None:
        """Set episodes and tool results against their limits."""
        encode = trainer.processing_class
        results = [result for trajectory in batch.trajectories for result in trajectory.results]
        lengths = Spread.of([len(encode(result.content)["input_ids"]) for result in results])
        if results:
            cut = sum(result.truncated for result in results)
            said = f"tokens of {len(results)} results: {lengths}; {cut} were cut"
            if cut > len(results) / 4:
                self._report.warned("results", said, "Raise --max_tool_response_tokens, or let tools say less", cut=cut)
            else:
                self._report.passed("results", said, cut=cut, longest=lengths.largest)
        episodes = Spread.of([len(trajectory.ids) for trajectory in batch.trajectories])
        said = f"tokens of {len(batch)} episodes: {episodes}; they end with {_counts(facts.stops)}"
        short = facts.stops["length"] + facts.stops["context_full"] + facts.stops["max_turns"]
        if short > len(batch) / 4:
            limits = "--max_completion_length, --max_turn_tokens, --max_turns"
            self._report.warned("length", said, f"{short} were cut: see {limits}", stops=dict(facts.stops))
        else:
            self._report.passed("length", said, stops=dict(facts.stops))
        if facts.stops["engine_failure"]:
            self._report.failed("engine", f"{facts.stops['engine_failure']} episodes were lost", "See the log")

    def _success(self, facts: Untrained) -> None:
        said = (
            f"pass@1 {facts.pass_1:.2f}, pass@{facts.k} {facts.pass_k:.2f} on {facts.n} questions; rewards from "
            f"{min(facts.rewards):g} to {max(facts.rewards):g}; they differ in {_percent(facts.live)} of the groups"
        )
        numbers = {"pass_1": facts.pass_1, "pass_k": facts.pass_k, "k": facts.k, "live": facts.live}
        if facts.all_failed:
            do = "There is nothing to reinforce: easier rows, a larger model, or the form first (toolgrpo sft)"
            self._report.warned("success", said, do, **numbers)
        elif facts.all_solved:
            self._report.warned("success", said, "There is nothing left to learn: take harder rows", **numbers)
        elif facts.never:
            of = ", ".join(f"{task} ({n})" for task, n in facts.never.items())
            do = "Groups of these teach nothing yet: show them first (toolgrpo sft), or begin with easier ones"
            self._report.warned("success", f"{said}; not one episode succeeds of task {of}", do, **numbers)
        elif facts.live == 0:
            self._report.warned("success", said, "Larger groups (--num_generations) find what differs", **numbers)
        else:
            self._report.passed("success", said, **numbers)

    # what is trained

    def step(self, trainer: ToolGRPOTrainer, rows: Dataset) -> None:
        if not self._with_step:
            self._estimate_time(trainer)
            return
        started = time.monotonic()
        with self._busy("one training step"):
            trainer.train()
        step_s = time.monotonic() - started
        logged: dict[str, float] = next((log for log in trainer.state.log_history if "reward" in log), {})
        loss, gradient = logged.get("loss", 0.0), logged.get("grad_norm")
        said = f"done in {step_s:.1f} s ({trainer.rollout_seconds:.1f} s of it the rollout), loss {loss:.3g}"
        if gradient is None or gradient != gradient or gradient in (float("inf"), -float("inf")):
            self._report.failed("step", f"{said}, gradient {gradient}", "A gradient must be a number: see the log")
        elif gradient == 0:
            do = f"No group differed in reward, so this step taught nothing; see {page_here()}"
            self._report.warned("step", f"{said}, gradient 0", do, seconds=step_s)
        else:
            self._report.passed("step", f"{said}, gradient {gradient:.3g}", seconds=step_s, grad_norm=gradient)
        with self._busy("handing the weights over"):
            batch = trainer.rollout([rows[number % len(rows)] for number in range(4)], label="after the step")
        self._agreement(trainer, batch, "handed over after the step")
        self._measured(trainer, step_s)

    def _agreement(self, trainer: ToolGRPOTrainer, batch: RolloutBatch, when: str) -> None:
        """Let the trainer score what the engine drew."""
        options, autocast = trainer.args.sampling_options(), trainer.accelerator.autocast()
        found = differences(trainer.policy.get_model(), drawn_tokens(batch.trajectories), options, autocast)
        if not found:
            self._report.warned(
                "weights",
                f"{when}, but the engine gives no log-probabilities to compare",
                "Nothing corrects for a difference; engine transformers has the trainer's own",
            )
            return
        difference = sum(found) / len(found)
        said = f"{when}; log-probabilities of engine and trainer differ by {difference:.1e} on average"
        if difference > largest_rounding(trainer.policy.dtype, trainer.policy.device):
            self._report.failed(
                "weights",
                said,
                f"They should be one model: see {page_here(page='docs/how-to/engines.md')}",
                difference=difference,
            )
        else:
            self._report.passed("weights", said, difference=difference)

    def estimate_memory(self, trainer: ToolGRPOTrainer) -> None:
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
            self._report.failed("memory", said, do, needed_gib=needed, there_gib=there)
        else:
            self._report.passed("memory", said, needed_gib=needed, there_gib=there)

    def _estimate_time(self, trainer: ToolGRPOTrainer) -> None:
        episodes = trainer.args.generation_batch_size
        rollout_s = self._sampled_s * episodes
        self._report.passed(
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
        steps = self._max_steps
        whole = f"; {steps} steps about {steps * step_s / 3600:.2f} h" if steps > 0 else ""
        self._report.passed("memory", f"measured: at most {peak:.2f} GiB {where}", peak_gib=peak)
        self._report.passed(
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

"""Check everything that a training needs before it costs an hour (`toolgrpo check`).

`--dry_run` of `train` and `evaluate` is its beginning (`preflight.py`), which draws nothing. In this order, one line each,
and after a failure that leaves nothing to go on with the rest is left out:

data, tools, rewards   loaded, and fitting together; gold answers get full marks, nonsense little
tools                  each called with drawn arguments: what crashes, hangs, is slow or large, or changes
sandbox                what would hold model-written code on this machine
model, chat            loaded, and the chat format proven on the rows
prompts                their lengths against the engine's window and the episode's budget
samples                k episodes of some questions: calls, mistakes, results, success, live groups
training step          one, with its weights handed to the engine, and the two compared
memory, time           estimated, and measured in what ran
road                   what fits such a model: reinforce it, show it, let it learn from its successes, or none of these

A model behind a chat endpoint (`--engine chat_api`) is asked for the samples, and nothing of a training is looked at.

Not covered: several processes (what they need of memory differs, `--max_steps 2` shows it); whether
the model will learn.
"""

from __future__ import annotations

import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoConfig

from toolgrpo.build import Parts, endpoint_rollouts, load_tokenizer
from toolgrpo.chat import check_vocabulary
from toolgrpo.commands.arguments import TOOL_SOURCES, ScriptArguments, endpoint
from toolgrpo.commands.check_lines import (
    CheckReport,
    add_agreement,
    add_budget,
    add_calls,
    add_road,
    add_step,
    add_success,
    add_tried,
)
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import HELDOUT_ROWS, TRAINING_ROWS, Job, init_kwargs_of
from toolgrpo.commands.loaded_model import model_without_weights
from toolgrpo.commands.plugins import tool_sources
from toolgrpo.commands.preflight import ROWS_LOOKED_AT, Preflight
from toolgrpo.commands.run_file import same_command
from toolgrpo.commands.table import CheckArguments, flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.data.table import n_trained_on, trained_on_line
from toolgrpo.draw.play import DEADLINE_S, try_tools
from toolgrpo.engines.base import CHAT_API, MORE_ROOM
from toolgrpo.engines.build import planned_engine
from toolgrpo.engines.vllm_options import vllm_available
from toolgrpo.errors import ConfigError, ModelError, ToolGRPOError
from toolgrpo.evaluation.agreement import differences, drawn_tokens, largest_rounding
from toolgrpo.evaluation.before_training import Untrained, untrained_facts
from toolgrpo.evaluation.grading import grade
from toolgrpo.rewards import Reward
from toolgrpo.rollout import EpisodeLimits, RolloutBatch
from toolgrpo.rollout.chat_api import CountedText
from toolgrpo.rollout.observers import Observers
from toolgrpo.support.plain_text import counted, duration
from toolgrpo.tools import Toolbox, open_tools
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig
from toolgrpo.trainer.memory import Device
from toolgrpo.trainer.trainer import ToolGRPOTrainer
from toolgrpo.trainer.trl.calls import check_dropped_share

_NAMES_SHOWN = 24
_GIB = 2**30


def check_arguments(given: Given) -> tuple[CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Return the arguments of a check."""
    endpoint(given)
    check, script, config, model = given.made((CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig))
    if check.card is not None:  # what a GPU trains in, whatever this machine has
        config = config.changed(bf16=given.values.get("bf16", not config.fp16))
    return check, script, config, model


class CheckRun(Preflight):
    """Run the checks in order; `run` returns the report."""

    def __init__(
        self,
        check: CheckArguments,
        script: ScriptArguments,
        config: ToolGRPOConfig,
        model: ModelConfig,
        terminal: Terminal,
        begin: tuple[str, str, str] = ("toolgrpo train", "toolgrpo evaluate", "toolgrpo sft"),  # with what was given
    ) -> None:
        self.check, self.config, self.terminal, self.begin = check, config, terminal, begin
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
            max_infrastructure_failures=None,
        )
        super().__init__(Job(script, one_step, model, terminal.in_log_only()), terminal)

    def run(self) -> CheckReport:
        """Check everything; an error of a part is a failure of its line, and ends the check."""
        if self.job.config.world_size > 1:
            raise ConfigError("toolgrpo check runs in one process; start it without accelerate")
        with self._folder:
            tools: ToolProvider | None = None
            stage = "data"
            try:
                rows, heldout = self._data()
                stage = "tools"
                tools = self.job.toolbox()
                self._tools(tools)
                if self.check.estimate or self.check.card is not None:
                    stage = "model"
                    self._planned(rows, heldout, tools)
                    return self.report
                if tools is not None:
                    self._play(tools, rows[0])
                stage = "reward"
                rewards = self.job.rewards()
                rows = self.job.rows_to_score(rows, tools, rewards, TRAINING_ROWS)
                heldout = heldout and self.job.rows_to_score(heldout, tools, rewards, HELDOUT_ROWS)
                self.job.say_rewards(tools, rewards)
                self.before_model(rows, tools, rewards, heldout, most=ROWS_LOOKED_AT)
                stage = "model"
                if self.job.config.engine == CHAT_API:
                    self._at_endpoint(rows, tools, rewards)
                    return self.report
                with self.terminal.busy("loading the model and the engine"):
                    trainer = self._trainer(rows, tools, rewards)
                try:
                    stage = "prompts"
                    self.with_model(trainer, rows)
                    stage = "samples"
                    facts, sampled_s = self._samples(trainer, rows, rewards)
                    stage = "step"
                    whole_run_s = None
                    if self.check.step:
                        whole_run_s = self._step(trainer, rows)
                    else:
                        self._estimate_time(trainer.args.generation_batch_size, sampled_s)
                    worked = Path(self.job.dataset_spec) / "worked.jsonl"
                    add_road(self.report, facts, *self.begin, worked if worked.is_file() else None, whole_run_s)
                finally:
                    trainer.close()
            except ToolGRPOError as error:
                self.report.failed(stage, str(error))
            finally:
                if tools is not None:
                    tools.close()
        return self.report

    # what is loaded

    def _data(self) -> tuple[Dataset, Dataset | None]:
        rows, heldout = self.job.training_rows(), self.job.heldout_rows()
        known = 0 if heldout is None else n_trained_on(rows, heldout)
        said = f"{self.job.dataset_spec}: {len(rows)} rows, {len(heldout or ())} held out"
        warning = trained_on_line(known, len(heldout or ())) if known else ""
        self.report.add("data", said, warning=warning, rows=len(rows), trained_on=known)
        return rows, heldout

    def _tools(self, tools: ToolProvider | None) -> None:
        if tools is None:
            self.report.add("tools", "none")
            return
        mute = [schema["function"]["name"] for schema in tools.schemas if not schema["function"].get("description")]
        if mute:
            said = f"{_some(tools.names)}; without a description: {_some(mute)}"
            self.report.add("tools", said, warning="Write docstrings")
        else:
            self.report.add("tools", _some(tools.names), tools=tools.names)

    def _play(self, tools: ToolProvider, row: dict[str, Any]) -> None:
        """Call each tool with drawn arguments, in workers of its own, and say what is wrong with some."""
        first = open_tools(
            **tool_sources(vars(self.job.script)), tool_timeout_s=min(DEADLINE_S, self.config.tool_timeout)
        )
        assert isinstance(first, Toolbox) and isinstance(tools, Toolbox)  # what flags name is one
        with first, self.terminal.busy("playing the tools with drawn arguments"):
            tried = try_tools(first, tools, row, seed=self.config.seed, allow_writes=self.check.allow_writes)
        add_tried(self.report, tried)

    def _trainer(self, rows: Dataset, tools: ToolProvider | None, rewards: Sequence[Reward]) -> ToolGRPOTrainer:
        job, report = self.job, self.report
        trainer = job.trainer(
            reward_funcs=[replace(reward, refused=None) for reward in rewards],  # its rows were looked at
            train_dataset=rows,
            tools=tools,
            agent=job.script.agent,
        )
        model, choice = trainer.policy.get_model(), trainer.engine_choice
        n = sum(parameter.numel() for parameter in model.parameters())
        report.add("model", f"{job.model_name}: {n / 1e6:.3g} M parameters", warning=job.dropout, parameters=n)
        report.add("engine", f"{choice.name} ({choice.why}), a window of {trainer.engine.max_model_len} tokens")
        report.add("chat", f"the {trainer.chat.name} format is proven on conversations of these rows")
        if (line := trainer.parts.markers_line()) is not None:
            said, _, do = line.removeprefix("markers").strip().partition("; ")
            report.add("markers", said, warning=do)
        return trainer

    # what is estimated

    def _planned(self, rows: Dataset, heldout: Dataset | None, tools: ToolProvider | None) -> None:
        """Estimate the memory from the shape of the model."""
        job, config, asked = self.job, self.job.config, self.job.model
        device = Device.named(self.check.card) if self.check.card else Device.here(config.device)
        path = job.model_path(job.model_name)
        kwargs = {**init_kwargs_of(asked), "trust_remote_code": config.trust_remote_code}
        try:
            shape = AutoConfig.from_pretrained(
                path, revision=asked.model_revision, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"--model_name_or_path {asked.model_name_or_path} has no config that can be read: {error}"
            ) from error
        model = model_without_weights(shape, kwargs)
        peft = job.peft_config()
        if peft is not None:
            with torch.device("meta"):
                model = get_peft_model(model, peft)
        guessed = ""
        try:
            tokenizer = load_tokenizer(path, revision=asked.model_revision, trust_remote_code=config.trust_remote_code)
            chat = Parts.of(config, tokenizer).chat
            check_vocabulary(tokenizer, shape.get_text_config().vocab_size)
        except ToolGRPOError as error:
            chat, guessed = None, f"; the prompt is guessed, by its bytes: {error}"
        bits = 4 if asked.load_in_4bit else 8 if asked.load_in_8bit else 16
        stored = next(model.parameters()).dtype
        found, window = job.estimate(
            *(model, chat, tools, rows, heldout or ()),
            dtype=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else stored,
            engine=planned_engine(
                config.engine_options(), packed=bits < 16, with_vllm=bool(self.check.card) or vllm_available()
            ),
            device=device,
            bits=bits,
        )
        counts = [
            sum(one.numel() for one in model.parameters() if one.requires_grad or every) for every in (True, False)
        ]
        said = f"{asked.model_name_or_path}: {counts[0] / 1e6:.4g} M parameters in {stored}, {counts[1] / 1e6:.4g} M are trained"
        self.report.add("model", said.replace("torch.", ""), parameters=counts[0], trained=counts[1])
        self.report.add("context", f"{window}{guessed}", longest_prompt=window.longest_prompt, context=window.tokens)
        self.add_memory(found)
        if found.cache is not None:
            warning = f"Some episodes would be computed again ({MORE_ROOM})" if found.cache.demand > 2 else ""
            failure = f"vLLM does not start ({MORE_ROOM})" if found.cache.tokens < found.cache.window else ""
            self.report.add("cache", str(found.cache), warning=warning, failure=failure, tokens=found.cache.tokens)

    # what is drawn

    def _samples(self, trainer: ToolGRPOTrainer, rows: Dataset, rewards: Sequence[Reward]) -> tuple[Untrained, float]:
        """Draw some episodes from the untrained model; return what they are, and the seconds per episode."""
        chosen, started = self._chosen(rows), time.monotonic()
        with self.terminal.busy(f"{len(chosen)} episodes"):
            batch = trainer.measure(chosen, label="check")
        seconds = (time.monotonic() - started) / len(batch)
        check_dropped_share([one.drop for one in batch.episodes], trainer.args.max_dropped_share)
        encode = trainer.processing_class
        names = None if trainer.toolbox is None else trainer.toolbox.names
        limits = trainer.args.episode_limits()
        facts = self._add_samples(batch, names, rewards, lambda text: len(encode(text)["input_ids"]), limits)
        if not self.check.step:
            self._agreement(trainer, batch, "handed over")
        return facts, seconds

    def _chosen(self, rows: Dataset) -> list[dict[str, Any]]:
        """Return some rows, evenly spread, each as often as it is played."""
        step = max(1, len(rows) // self.check.questions)
        chosen = [rows[number] for number in range(0, len(rows), step)][: self.check.questions]
        return [row for row in chosen for _ in range(self.check.samples)]

    def _add_samples(
        self,
        batch: RolloutBatch,
        tool_names: Sequence[str] | None,
        rewards: Sequence[Reward],
        length: Callable[[str], int],
        limits: EpisodeLimits,
    ) -> Untrained:
        facts = untrained_facts(batch, self.check.samples)
        if tool_names is not None:
            add_calls(self.report, facts, batch, tool_names)
        add_budget(self.report, facts, batch, length, limits)
        add_success(self.report, facts)
        for reward in rewards:
            if said := reward.reads_marker_in_vain([episode.rewards.get(reward.name) for episode in batch.episodes]):
                self.report.add("reward", said, warning="Such a search finds nothing, in any episode")
        return facts

    def _at_endpoint(self, rows: Dataset, tools: ToolProvider | None, rewards: Sequence[Reward]) -> None:
        """Let a model behind a chat endpoint play the samples."""
        config = self.job.config

        def say(line: str) -> None:
            self.report.add("model", line.removeprefix("engine").strip())

        rollouts = endpoint_rollouts(config, self.job.model_name, toolbox=tools, say=say, observers=Observers())
        chosen, started = self._chosen(rows), time.monotonic()
        with closing(rollouts), self.terminal.busy(f"{len(chosen)} episodes"):
            options = config.sampling_options()
            batch = rollouts.run(chosen, options, mode="eval", label="check", group_size=self.check.samples)
        seconds = time.monotonic() - started
        batch = grade(batch, rewards, config.reward_weights, threshold=config.success_threshold)
        check_dropped_share([one.drop for one in batch.episodes], config.max_dropped_share)
        names = None if tools is None else tools.names
        self._add_samples(batch, names, rewards, lambda text: len(CountedText().encode(text)), rollouts.limits)
        read, written = (
            sum(one.metadata["usage"].get(name, 0) for one in batch.trajectories)
            for name in ("prompt_tokens", "completion_tokens")
        )
        said = f"{len(batch)} episodes in {seconds:.1f} s; the endpoint read {read:,} tokens and wrote {written:,}"
        self.report.add("time", said, seconds=seconds, prompt_tokens=read, completion_tokens=written)

    # what is trained

    def _step(self, trainer: ToolGRPOTrainer, rows: Dataset) -> float | None:
        """Do one step; return the seconds of the whole run, if it is known how many steps it has."""
        started = time.monotonic()
        with self.terminal.busy("one training step"):
            trainer.train()
        step_s = time.monotonic() - started
        logged: dict[str, float] = next((log for log in trainer.state.log_history if "reward" in log), {})
        add_step(self.report, logged, step_s, trainer.rollout_batches.rollout_seconds)
        with self.terminal.busy("handing the weights over"):
            batch = trainer.rollout([rows[number % len(rows)] for number in range(4)], label="after the step")
        self._agreement(trainer, batch, "handed over after the step")
        if torch.cuda.is_available():
            peak, where = torch.cuda.max_memory_allocated() / _GIB, "on the GPU"
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak, where = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB, "in this process"
        steps = self.config.max_steps
        whole = f"; {counted(steps, 'step')} about {duration(steps * step_s)}" if steps > 0 else ""
        self.report.add("memory", f"measured: at most {peak:.2f} GiB {where}", peak_gib=peak)
        said = f"measured: {step_s:.1f} s for a step, the first being the slowest{whole}"
        self.report.add("time", said, step_s=step_s)
        return steps * step_s if steps > 0 else None

    def _agreement(self, trainer: ToolGRPOTrainer, batch: RolloutBatch, when: str) -> None:
        """Compare the trainer's log-probabilities with the engine's."""
        policy, autocast = trainer.policy, trainer.accelerator.autocast()
        drawn = drawn_tokens(batch.trajectories)
        found = differences(policy.get_model(), drawn, trainer.args.sampling_options(), autocast)
        add_agreement(self.report, found, largest_rounding(policy.dtype, policy.device), when)

    def _estimate_time(self, episodes: int, episode_s: float) -> None:
        rollout_s = episode_s * episodes
        said = f"a rollout of {episodes} episodes takes about {rollout_s:.1f} s; the training pass was not tried"
        self.report.add("time", said, rollout_s=rollout_s)


def run_check(given: Given, terminal: Terminal) -> int:
    """Run the command."""
    parsed = check_arguments(given)
    report = CheckRun(*parsed, terminal, first_commands(given, parsed[1])).run()
    if parsed[0].json:
        terminal.stream.write(report.as_json() + "\n")
    terminal.say(f"{report.closing()} (log: {terminal.log_file})")
    return report.exit_code


def first_commands(given: Given, script: ScriptArguments) -> tuple[str, str, str]:
    """Return what trains, what draws episodes of the rows to train on, and what shows examples, each as far as it was given."""
    chosen = ("output_dir", "samples", "eval_dataset_id_or_path", "eval_split", "eval_share")  # by the line
    rows = ["--eval_dataset_id_or_path", str(script.dataset_id_or_path), "--eval_split", script.dataset_split]
    rows += ["--eval_share", "0"] if script.eval_share else []
    of_line = "\n" not in (script.system_prompt or "")  # else it is told as one that WORKED.jsonl brings
    named = ("model_name_or_path", *TOOL_SOURCES, *(["system_prompt"] if of_line else []))
    shown = {name: flag for name, flag in flags_of("sft").items() if name in named}
    return (
        same_command(given, "train", flags_of("train")),
        f"{same_command(given, 'evaluate', flags_of('evaluate'), without=chosen)} {shlex.join(rows)}",
        f"{same_command(replace(given, file=None, places={}), 'sft', shown)} --output_dir outputs/shown",  # no file of a training
    )


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return ", ".join([*names[:_NAMES_SHOWN], *more])

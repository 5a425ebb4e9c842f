"""One evaluation from arguments to tables and JSON: what `recipes/evaluate.py` does.

The episodes are those of training (same loop, engine, tools, limits and rewards); nothing is learned. With a baseline both
models answer the same questions, one after the other. Several processes share the questions.

A model may be a folder, a hub id, a named model, or the folder of a LoRA adapter, which is merged into its base first.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from trl import ModelConfig

from toolgrpo.commands.arguments import ScriptArguments, check_arguments
from toolgrpo.commands.config_files import parse_args
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError, ModelError
from toolgrpo.evaluation.measures import given_answer, grade, succeeded
from toolgrpo.evaluation.report import Comparison, EpisodeFacts, ModelReport, ToolCallFacts
from toolgrpo.rewards import Reward
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.trainer import ToolGRPOTrainer
from toolgrpo.trajectory import AttemptStatus, Trajectory

__all__ = ["EvaluationArguments", "EvaluationRun", "parse_evaluation_arguments"]

_DEFAULT_QUESTIONS = 100


@dataclass
class EvaluationArguments:
    """What is measured."""

    baseline: str | None = field(
        default=None, metadata={"help": "A second model, measured on the same questions: the one before training."}
    )
    samples: int = field(default=8, metadata={"help": "Episodes for each question."})
    ks: list[int] | None = field(
        default=None, metadata={"help": "The k of pass@k and maj@k; default: 1 and the number of samples."}
    )
    report: str | None = field(default=None, metadata={"help": "The JSON file; default: OUTPUT_DIR/evaluation.json."})

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples must be at least 1, got {self.samples}")
        self.ks = sorted(set(self.ks or (1, self.samples)))
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        if wrong:
            raise ConfigError(f"ks must lie between 1 and samples ({self.samples}), got {wrong[0]}; raise --samples")
        for name in ("baseline", "report"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(f"--{name} is given without a value; give one, or leave the flag out")
        if self.report is not None:
            _check_report(Path(self.report))


@dataclass(frozen=True)
class EvaluationRun:
    """The arguments of one evaluation; `run` does it."""

    evaluation: EvaluationArguments
    script: ScriptArguments
    config: ToolGRPOConfig
    model: ModelConfig
    terminal: Terminal

    def run(self) -> Comparison | None:
        """Measure, show the tables and write the JSON; None after a dry run."""
        rows = self._questions()
        baseline = None
        if self.evaluation.baseline:
            baseline = self._measure(self.evaluation.baseline, rows, "baseline")
        report = self._measure(str(self.model.model_name_or_path), rows, "model")
        if report is None:
            self.terminal.say("dry run: everything was loaded and checked")
            return None
        comparison = Comparison(self._spec(), self.config.temperature, report, baseline)
        self._show(comparison)
        return comparison

    def _parts(self, output_dir: str | None = None) -> RunParts:
        config = _for_measuring(self.config, output_dir or self.config.output_dir)
        return RunParts(self.script, config, self.model, self.terminal)

    def _questions(self) -> Dataset:
        if self.script.eval_questions < 1:
            self.script.eval_questions = _DEFAULT_QUESTIONS
        rows = self._parts().heldout_rows()
        assert rows is not None
        self.terminal.say(f"data      {self._spec()}: {len(rows)} questions, {self.evaluation.samples} episodes each")
        return rows

    def _measure(self, name: str, rows: Dataset, label: str) -> ModelReport | None:
        """One model on all questions; None in a dry run."""
        folder = Path(self.config.output_dir) / label
        for old in folder.glob("episodes*.jsonl"):
            old.unlink(missing_ok=True)
        parts = self._parts(str(folder))
        trainer, rewards = self._load(parts, name, rows)
        try:
            if self.script.dry_run:
                return None
            started = time.monotonic()
            facts = self._episodes(trainer, rewards, list(rows), label)
            return ModelReport(
                model=name,
                episodes=tuple(sorted(facts, key=lambda fact: fact.question)),
                samples=self.evaluation.samples,
                ks=tuple(self.evaluation.ks or ()),
                seconds=time.monotonic() - started,
            )
        finally:
            trainer.close()

    def _load(self, parts: RunParts, name: str, rows: Dataset) -> tuple[ToolGRPOTrainer, list[Reward]]:
        tools = parts.toolbox()
        try:
            rewards = parts.rewards()
            parts.check(rows, tools, rewards)
            path = parts.model_path(name)
            merged = _merged_adapter(Path(path), parts.model_init_kwargs())
            parts.config.model_init_kwargs = None if merged else parts.model_init_kwargs()
            trainer = parts.trainer(
                merged.model if merged else path,
                processing_class=merged.tokenizer if merged else None,
                reward_funcs=rewards,
                train_dataset=rows,  # TRL wants one; nothing is trained
                tools=tools,
            )
        except BaseException:
            if tools is not None:
                tools.close()
            raise
        trainer.model.eval()
        return trainer, rewards

    def _episodes(
        self, trainer: ToolGRPOTrainer, rewards: Sequence[Reward], rows: list[dict[str, Any]], label: str
    ) -> list[EpisodeFacts]:
        """The episodes of all questions, from all processes."""
        state = trainer.accelerator
        own = [
            (number, row)
            for number, row in enumerate(rows)
            if number % state.num_processes == state.process_index
            for _ in range(self.evaluation.samples)
        ]
        numbers, asked = [number for number, _ in own], [row for _, row in own]
        trajectories = trainer.rollout(asked, label=label).trajectories
        given = grade(trajectories, asked, rewards, trainer.reward_weights.tolist())
        good = succeeded(trajectories, asked, given, spec=self._spec(), threshold=self.config.success_threshold)
        trainer.recorder.record(trajectories, given, asked, step=0, mode="eval")
        facts = [_facts(*parts) for parts in zip(numbers, trajectories, given, good, strict=True)]
        gathered: list[EpisodeFacts] = gather_object(facts)
        return gathered

    def _spec(self) -> str:
        return str(self.script.eval_dataset_id_or_path or self.script.dataset_id_or_path)

    def _show(self, comparison: Comparison) -> None:
        for table in comparison.tables():
            self.terminal.console.print(table)
        if not Terminal.is_main_process():
            return
        path = Path(self.evaluation.report or Path(self.config.output_dir) / "evaluation.json")
        path.write_text(json.dumps(comparison.as_json(), indent=2, allow_nan=False) + "\n")
        self.terminal.say(f"report    {path}")
        if self.config.record_episodes:
            self.terminal.say(f"episodes  {Path(self.config.output_dir) / 'model' / 'episodes.jsonl'}")


def parse_evaluation_arguments(
    argv: Sequence[str],
) -> tuple[EvaluationArguments, ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """The command line over the YAML file over the defaults; the YAML file may be the one of the training."""
    evaluation, script, config, model = parse_args(
        (EvaluationArguments, ScriptArguments, ToolGRPOConfig, ModelConfig), list(argv)
    )
    check_arguments(script, config, model)
    return evaluation, script, config, model


def _check_report(path: Path) -> None:
    """Before hours of episodes, not after them."""
    if path.is_dir():
        raise ConfigError(f"--report {path} is a folder; give the file to write, e.g. {path / 'evaluation.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}; choose another file") from error


def _for_measuring(config: ToolGRPOConfig, output_dir: str) -> ToolGRPOConfig:
    """A copy of the config for a trainer that never trains: no reference model, no reports."""
    config = copy.copy(config)  # not `replace`, which would derive the derived fields again
    config.output_dir = output_dir
    config.beta = 0.0
    config.report_to = []
    config.disable_tqdm = True
    return config


@dataclass(frozen=True)
class _Merged:
    model: Any
    tokenizer: Any


def _merged_adapter(path: Path, kwargs: Mapping[str, Any]) -> _Merged | None:
    """The base model with the adapter of this folder in its weights; None if the folder holds a whole model."""
    if not (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return None
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    try:
        model = AutoPeftModelForCausalLM.from_pretrained(path, **kwargs).merge_and_unload()
        return _Merged(model, AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"the adapter in {path} cannot be loaded onto its base model: {error}") from error


def _facts(question: int, trajectory: Trajectory, reward: float, success: bool) -> EpisodeFacts:
    return EpisodeFacts(
        question=question,
        reward=reward,
        success=success,
        answer=given_answer(trajectory.messages),
        turns=len(trajectory.turns),
        sampled_tokens=trajectory.n_sampled,
        stop_reason=trajectory.stop_reason.value,
        calls=tuple(
            ToolCallFacts(
                result.name or "unnamed",
                None if result.error is None else result.error.value,
                result.duration_s,
                attempt.status is AttemptStatus.UNMARKED,
            )
            for turn in trajectory.turns
            for attempt, result in zip(turn.attempts, turn.results, strict=False)
        ),
    )

"""One evaluation from arguments to tables and JSON: what `recipes/evaluate.py` does.

The episodes are those of training (same loop, engine, tools, limits and rewards); nothing is
learned. With a baseline both models answer the same questions, one after the other. Several
processes share the questions.

A model may be a folder, a hub id, a named model, or the folder of a LoRA adapter, which is merged
into its base first; or a model behind a chat endpoint (`--engine chat_api`, `--baseline chat_api:NAME`).
"""

from __future__ import annotations

import json
import math
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator, PartialState
from datasets import Dataset

from toolgrpo.build import Parts, endpoint_rollouts
from toolgrpo.commands.arguments import DEFAULT_QUESTIONS, ScriptArguments, endpoint, name_at_endpoint
from toolgrpo.commands.check_lines import CheckReport
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import QUESTIONS, Job
from toolgrpo.commands.loaded_model import load_model
from toolgrpo.commands.preflight import Preflight
from toolgrpo.commands.run_file import held_out_otherwise, keep_run_config, read_run, run_file, run_text, run_values
from toolgrpo.commands.table import EvaluationArguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.build import EngineOptions
from toolgrpo.engines.policy import Policy
from toolgrpo.episode.dropped import DropCause, reasons_of
from toolgrpo.errors import ConfigError, TooManyDroppedError
from toolgrpo.evaluation.report import Comparison, ModelReport, on_shared_questions
from toolgrpo.evaluation.run import Evaluation, evaluate
from toolgrpo.observe.console import show_warnings
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.recorder import EpisodeRecorder, TokenText, episodes_path, token_texts
from toolgrpo.observe.rollout_lines import RolloutLines, RolloutLog
from toolgrpo.rollout import Rollouts
from toolgrpo.rollout.observers import Observers
from toolgrpo.support.storage import storage_errors, write_whole
from toolgrpo.trainer.assembly import engine_lines
from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig
from toolgrpo.trainer.hardware import check_backend

_AT_A_TIME = 64  # episodes, at least; an accelerator takes more (rollout/demand.py)


class EvaluationConfig(ToolGRPOConfig):
    """Keys of a training's file that an evaluation reads.

    Greedy episodes (temperature 0) are fine here. The engine is not bound to the training's batch,
    never sleeps, and gets whole weights.
    """

    may_be_greedy = True

    def __post_init__(self) -> None:
        # Batches of a training, which several processes may have filled; TRL would ask that groups fill them here too.
        self.per_device_train_batch_size: int = self.num_generations
        self.generation_batch_size = self.steps_per_generation = None
        super().__post_init__()

    def engine_options(self) -> EngineOptions:
        options = super().engine_options()
        at_a_time = options.max_rows
        if self.max_concurrent_episodes is None:
            at_a_time = max(at_a_time, _AT_A_TIME)
        awake = replace(options.vllm, enable_sleep_mode=False)
        return replace(options, max_rows=at_a_time, vllm=awake, lora_sync="merge")


@dataclass(frozen=True)
class EvaluationRun:
    """The arguments of one evaluation; `run` does it."""

    evaluation: EvaluationArguments
    script: ScriptArguments
    config: EvaluationConfig
    model: ModelConfig
    terminal: Terminal
    given: Given

    def run(self) -> Comparison | CheckReport:
        """Measure, show the tables and write the JSON; a dry run only checks."""
        rows = self._questions()
        baseline = None
        if self.evaluation.baseline:
            self.terminal.say(f"baseline  {self.evaluation.baseline}")
            baseline = self._measure(self.evaluation.baseline, rows, "baseline")
            self.terminal.say(f"model     {self.model.model_name_or_path}")
        report = self._measure(str(self.model.model_name_or_path), rows, "model")
        if isinstance(report, CheckReport):  # as a baseline's, whose rows and rewards are the same
            self.terminal.say(f"dry run: everything was loaded and checked; {report.closing()}")
            return report
        assert not isinstance(baseline, CheckReport)
        if baseline is not None:
            n = report.n_questions
            report, baseline = on_shared_questions(report, baseline)
            if report.n_questions < n:
                self.terminal.say(f"compared  on the {report.n_questions} questions that both models were asked")
        comparison = Comparison(self._spec(), self.config.temperature, report, baseline)
        self._show(comparison)
        return comparison

    def _questions(self) -> Dataset:
        """Return the rows; not of another seed or share than the model's run had, of which some were trained on."""
        known = read_run(run_file(Path(str(self.model.model_name_or_path))))
        had = held_out_otherwise(known, run_values(run_text(self.given))) if known.get("eval_share") else None
        if had is not None:
            raise ConfigError(
                f"eval_share {self.script.eval_share:g} with seed {self.config.seed} holds out other rows than the run of "
                f"{self.model.model_name_or_path}, which trained on some of them; give the values of that run: {had}"
            )
        rows = Job(self.script, self.config, self.model, self.terminal).heldout_rows(DEFAULT_QUESTIONS)
        assert rows is not None
        self.terminal.say(f"data      {self._spec()}: {len(rows)} questions, {self.evaluation.samples} episodes each")
        return rows

    def _measure(self, name: str, rows: Dataset, label: str) -> ModelReport | CheckReport:
        """Measure one model on all questions; in a dry run load it, and check what it would be measured with."""
        folder = Path(self.config.output_dir) / label
        if Terminal.is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
        config = self.config.changed(output_dir=str(folder))
        job = Job(self.script, config, self.model, self.terminal)
        with ExitStack() as opened:
            tools, player = job.open(opened)
            rewards = job.rewards()
            rows = job.rows_to_score(rows, tools, rewards, QUESTIONS, trains=False)
            job.say_rewards(tools, rewards)
            preflight = Preflight(job) if self.script.dry_run else None
            if preflight is not None:
                preflight.before_model(rows, tools, rewards)
            asked = name_at_endpoint(name, config.engine)
            policy: Policy | None = None
            if asked is not None:
                check_backend(Accelerator(cpu=config.use_cpu))
                observers = self._observers(config, PartialState().process_index)
                rollouts = endpoint_rollouts(config, asked, toolbox=tools, say=self.terminal.say, observers=observers)
                opened.callback(rollouts.close)
            else:
                parts = load_model(job, name, toolbox=tools, player=player)
                policy, rollouts = parts.policy, self._rollouts(parts, rows)
                opened.callback(rollouts.close)
                parts.prove_chat(rows["prompt"], [rows])
                rows = parts.fitting(rollouts.engine, self.terminal.say)(rows, name="the questions")
            if preflight is not None:
                return preflight.report
            evaluation = Evaluation(
                rows=list(rows),
                rewards=rewards,
                weights=config.reward_weights,
                threshold=config.success_threshold,
                options=config.sampling_options(),
                samples=self.evaluation.samples,
                ks=tuple(self.evaluation.ks or ()),
            )
            self._begin_recording(folder)
            report = evaluate(evaluation, rollouts, policy, name=asked or name, label=label)
            _check_lost(report, config, folder)
            return report

    def _begin_recording(self, folder: Path) -> None:
        """Replace an older recording, once nothing is left that can refuse the measurement."""
        if Terminal.is_main_process():
            for old in folder.glob("episodes*.jsonl*"):  # with its older parts
                old.unlink(missing_ok=True)
            keep_run_config(run_text(self.given), folder)
        PartialState().wait_for_everyone()

    def _rollouts(self, parts: Parts, rows: Dataset) -> Rollouts:
        show_warnings(self.terminal.say)
        built = parts.open_engine((), rows, samples=self.evaluation.samples)
        for line in engine_lines(parts, built):
            self.terminal.say(line)
        texts = token_texts(parts.tokenizer)
        return parts.rollouts(built.engine, self._observers(parts.config, parts.policy.process_index, texts))

    def _observers(self, config: ToolGRPOConfig, process: int, texts: TokenText | None = None) -> Observers:
        path = episodes_path(Path(config.output_dir), process)
        recorder = EpisodeRecorder(path, share=config.record_episodes, token_text=texts)
        progress = RunProgress(self.terminal.console, say=self.terminal.say)
        lines = [RolloutLines(self.terminal.say)] if progress.lines_only else []
        return Observers([recorder, progress, RolloutLog(), *lines])

    def _spec(self) -> str:
        return str(self.script.eval_dataset_id_or_path or self.script.dataset_id_or_path)

    def _show(self, comparison: Comparison) -> None:
        for table in comparison.tables():
            self.terminal.console.print(table, markup=False)  # tasks and tools are named in it
        for label, report in (("baseline", comparison.baseline), ("model", comparison.model)):
            for line in [] if report is None else report.lines(Path(self.config.output_dir) / label):
                self.terminal.say(f"{line} ({label})" if comparison.baseline else line)
        for line in [] if comparison.verdict is None else comparison.verdict.lines():
            self.terminal.say(line)
        if not Terminal.is_main_process():
            return
        path = Path(self.evaluation.report or Path(self.config.output_dir) / "evaluation.json")
        with storage_errors(f"the report {path}", path.parent):
            text = json.dumps(comparison.as_json(), indent=2, allow_nan=False) + "\n"
            if self.evaluation.report:
                path.write_text(text)  # as named: it may be /dev/stdout
            else:
                write_whole(path, text)
        self.terminal.say(f"report    {path}")
        if self.config.record_episodes:
            for label in (*(["baseline"] if comparison.baseline else []), "model"):
                self.terminal.say(f"episodes  {Path(self.config.output_dir) / label / 'episodes.jsonl'}")
        success = replace(comparison.model, ks=(1,)).shares()["pass@1"]
        self.terminal.say_objective(success.value if success.n else math.nan)


def evaluation_arguments(given: Given) -> tuple[EvaluationArguments, ScriptArguments, EvaluationConfig, ModelConfig]:
    """Return the arguments of an evaluation, whose YAML file may be that of the training."""
    endpoint(given)
    evaluation, script, config, model = given.made(
        (EvaluationArguments, ScriptArguments, EvaluationConfig, ModelConfig)
    )
    return evaluation, script, config, model


def run_evaluate(given: Given, terminal: Terminal) -> int:
    """Run the command."""
    evaluation, script, config, model = evaluation_arguments(given)
    with terminal.writing_into_folder(config, dry_run=script.dry_run) as config:
        done = EvaluationRun(evaluation, script, config, model, terminal, given).run()
    if isinstance(done, CheckReport):
        return done.exit_code
    return int(
        evaluation.fail_if is not None and done.verdict is not None and done.verdict.verdict == evaluation.fail_if
    )


def _check_lost(report: ModelReport, config: ToolGRPOConfig, folder: Path) -> None:
    """Raise where too many episodes could not be scored for the others to be a measurement."""
    drops = [one.drop for one in report.episodes if one.drop is not None]
    n, n_lost = len(report.episodes), sum(drop.cause is DropCause.ENDPOINT for drop in drops)
    most, share = config.max_infrastructure_failures, config.max_dropped_share
    where = f"toolgrpo show {shlex.quote(str(folder))} --cause dropped shows them"
    if most is not None and n_lost > most * n:
        raise TooManyDroppedError(
            f"the endpoint lost {n_lost} of {n} episodes of {report.model}, after retries: {reasons_of(drops)}. {where}. "
            f"Measure again, with a smaller --max_concurrent_episodes or a larger "
            f"--engine_timeout, or raise max_infrastructure_failures (now {most:g})"
        )
    if len(drops) == n:
        raise TooManyDroppedError(
            f"none of {n} episodes of {report.model} could be scored: {reasons_of(drops)}. {where}. Fix the cause and "
            f"measure again"
        )
    if len(drops) - n_lost > share * n:
        raise TooManyDroppedError(
            f"{len(drops) - n_lost} of {n} episodes of {report.model} could not be scored, more than max_dropped_share "
            f"({share:g}) allows: {reasons_of(drops)}. {where}. Fix the cause and measure again, or allow more with "
            f"--max_dropped_share"
        )

"""One training run from arguments to the closing table: what `recipes/train.py` does.

load and check   model, tools, rewards, data (`job.py`): every mistake in them is found here, before the first step
before           success on held-out rows
train            TRL's loop
save             the model, before anything else can go wrong
after            the same held-out rows again; left out if a signal stopped the training
close            print the table; if measuring failed or was interrupted, without that column, and then the error goes on
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from rich.table import Table
from transformers import TrainerCallback, TrainerState, TrainingArguments

from toolgrpo.commands.arguments import ScriptArguments, training_arguments
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import HELDOUT_ROWS, TRAINING_ROWS, Job
from toolgrpo.commands.look import report_line
from toolgrpo.commands.preflight import Preflight
from toolgrpo.commands.run_file import (
    asks_the_same,
    held_out_otherwise,
    keep_run_config,
    read_run,
    resume_command,
    run_file,
    run_text,
    run_values,
)
from toolgrpo.commands.terminal import Terminal
from toolgrpo.data.load import hub_ids
from toolgrpo.data.table import n_trained_on, trained_on_line
from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.evaluation.measures import Share
from toolgrpo.models import folder_of
from toolgrpo.observe.progress import training_line
from toolgrpo.observe.watch import TOLD_EVERY, DoctorWatch
from toolgrpo.support.plain_text import counted, without_secrets
from toolgrpo.support.run_lock import claim_folder
from toolgrpo.support.shipped_files import page_here
from toolgrpo.support.storage import storage_errors, write_whole
from toolgrpo.trainer.checkpoint_files import BegunRun
from toolgrpo.trainer.checkpointing import begin_together
from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig
from toolgrpo.trainer.stopping import finish_before_stopping, report_first_failure
from toolgrpo.trainer.trainer import ToolGRPOTrainer

# What is said at the end of a training: that held-out success did not rise, or nothing was learned, and
# what is still wrong.


def doctor_summary(doctor: DoctorWatch) -> dict[str, Any]:
    """Return what the doctor says of the whole run, as JSON."""
    at_end = doctor.at_end()
    rules = {one.rule for one in at_end}
    return {
        "learned_nothing": doctor.learned_nothing,
        "findings": [
            {
                "rule": one.rule,
                "step": one.step,
                "sentence": one.sentence,
                "link": one.link,
                "still_holds": one.rule in rules,
            }
            for one in (*doctor.told, *(one for one in at_end if one not in doctor.told))
        ],
    }


def doctor_lines(doctor: DoctorWatch) -> list[str]:
    """Return what a person is told at the end, and was not told lately."""
    nothing = ["doctor    nothing was learned: in every step, the episodes of each group had equal rewards"]
    told = {one.rule: one.step for one in doctor.told}
    left = [one for one in doctor.at_end() if one.step - told.get(one.rule, -math.inf) >= TOLD_EVERY]
    at_end = [f"doctor    {one.sentence} ({one.link_here})" for one in left]
    return [*(nothing if doctor.learned_nothing else []), *at_end]


def outcome_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return what is to be said under the table of held-out success, if it did not clearly rise.

    It rose where an interval after lies above the one before; both hold `rate` and `interval` by name.
    """
    both = [name for name in before if name in after]
    if not both or any(after[name]["interval"][0] > before[name]["interval"][1] for name in both):
        return None
    fell = [name for name in both if after[name]["interval"][1] < before[name]["interval"][0]]
    lower = [name for name in both if after[name]["rate"] < before[name]["rate"]]
    if fell:
        said = f"held-out success fell ({', '.join(fell)})"
    else:
        below = f"; {' and '.join(lower)} went down" if lower else ""
        said = f"held-out success did not clearly change (the intervals overlap{below})"
    return f"{said}: see {page_here('held-out-success-does-not-rise')}"


def run_train(given: Given, terminal: Terminal) -> int:
    """Run the command; 130 says that Ctrl-C ended it before its last step."""
    script, config, model = training_arguments(given)
    text = run_text(given)  # while the files of an earlier run are in place
    run = TrainingRun(script, config, model, terminal)
    with terminal.writing_into_folder(config, dry_run=script.dry_run, begins=run.begin) as config:
        same = _goes_on_alike(run.begun, text)
        if run.begun is not None and terminal.is_main_process():
            keep_run_config(text, Path(config.output_dir), run.begun.run)
        run = TrainingRun(script, config, model, terminal, run.begun, same_questions=same)
        run.run()
    return run.exit_code


def _goes_on_alike(begun: BegunRun | None, text: str) -> bool:
    """Return whether a run measures what the one that it goes on with did; it may not hold out what that trained on."""
    if begun is None or begun.checkpoint is None:
        return True
    found = None
    if PartialState().is_main_process:
        known, now = read_run(run_file(begun.checkpoint)), run_values(text)
        found = (held_out_otherwise(known, now) if known else None, not known or asks_the_same(known, now))
    ((had, same),) = broadcast_object_list([found])
    if had is not None:
        raise ConfigError(
            f"eval_share holds out other rows than the resumed run, which trained on some of them; give the "
            f"values of that run, {had}, or start a new run with --resume_from_checkpoint false"
        )
    return bool(same)


@dataclass
class TrainingRun:
    """Holds the loaded parts between the stages."""

    script: ScriptArguments
    config: ToolGRPOConfig
    model: ModelConfig
    terminal: Terminal
    begun: BegunRun | None = None  # None: it begins with its first stage
    same_questions: bool = True  # as the run had that it goes on with
    exit_code: int = 0  # 130: Ctrl-C ended it before its last step

    def __post_init__(self) -> None:
        self.job = Job(self.script, self.config, self.model, self.terminal)
        self.preflight = Preflight(self.job) if self.script.dry_run else None

    def begin(self) -> bool:
        """Begin the run in its folder, which is claimed; return whether it goes on with an earlier one."""
        folder, wanted = Path(self.config.output_dir), self.config.resume_from_checkpoint
        self.begun = begin_together(folder, wanted, self.terminal.say, model=folder_of(self.job.model_name))
        return self.begun.checkpoint is not None

    def run(self) -> dict[str, Any] | None:
        """Run all stages; return the summary that the table shows, or None after a dry run."""
        with ExitStack() as opened:
            trainer, heldout = self._load(opened)
            self.terminal.say(training_line(trainer.args, trainer.n_steps, trainer.train_dataset))
            if self.preflight is not None:
                self.preflight.with_model(trainer, trainer.train_dataset, list(heldout or ()))
                self.terminal.say(f"dry run: everything was loaded and checked; {self.preflight.report.closing()}")
                self.exit_code = self.preflight.report.exit_code
                return None
            if self.begun is None:
                opened.callback(claim_folder(Path(self.config.output_dir), self.terminal.rank()).release)
                self.begin()
            (earlier,) = broadcast_object_list([self._earlier() if self.terminal.is_main_process() else None])
            before = _measured_before(earlier, heldout) if self.same_questions else {}
            if not before:
                before = self._success(trainer, heldout, "before")
                self._keep({"before": _as_json(before)})  # for the run that resumes this one, should it be killed
            trainer.card = replace(
                trainer.card,
                base_model=self.job.model_name,
                data=without_secrets(self.job.dataset_spec),
                system_prompt=self.script.system_prompt,
                datasets=hub_ids(self.job.dataset_spec, self.script.dataset_split),
                success={"before": before},
                measured_on=self.job.measured_on() if before else {},
                n_trained_on=self.n_trained_on,
            )
            first_step = _FirstStep()
            trainer.add_callback(first_step)
            train_started = time.monotonic()
            try:
                output = trainer.train(resume_from_checkpoint=self.begun)
            except ToolGRPOError:
                if any(Path(self.config.output_dir).glob("checkpoint-*")):
                    self._say_how_to_go_on()
                raise
            train_s = time.monotonic() - train_started
            self._save(trainer)
            after: dict[str, Share] = {}
            try:
                if not trainer.stopped_by:
                    after = self._success(trainer, heldout, "after")
                    trainer.card = replace(trainer.card, success={"before": before, "after": after})
                    with storage_errors("the model card", Path(self.config.output_dir)):
                        trainer.write_card()
                    if self.config.push_to_hub:
                        trainer.push_to_hub(commit_message="The card has the measurements after the training")
            finally:
                steps = 0 if first_step.number is None else output.global_step - first_step.number
                summary = self._summary(trainer, before, after, train_s, steps, earlier)
                self._keep(summary)
                self._show(summary, doctor_lines(trainer.doctor))
                if trainer.stopped_by and trainer.state.global_step < trainer.state.max_steps:
                    self.exit_code = 130 if trainer.stopped_by == "SIGINT" else 0
                    self._say_how_to_go_on()
            return summary

    def _say_how_to_go_on(self) -> None:
        self.terminal.say(f"go on     {resume_command('train', Path(self.config.output_dir))}")

    def _save(self, trainer: ToolGRPOTrainer) -> None:
        folder, say = self.config.output_dir, self.terminal.say
        with finish_before_stopping("the model is saved", say), storage_errors("the trained model", Path(folder)):
            trainer.save_model(folder)
            trainer.save_state()
            say(f"saved     {folder}")

    def _load(self, opened: ExitStack) -> tuple[ToolGRPOTrainer, Dataset | None]:
        job, say = self.job, self.terminal.say
        dataset, heldout = job.training_rows(), job.heldout_rows()
        tools, player = job.open(opened)
        rewards = job.rewards()
        say(f"data      {job.dataset_spec}: {len(dataset)} rows, {len(heldout or ())} held out")
        self.n_trained_on = 0 if heldout is None else n_trained_on(dataset, heldout)
        if self.n_trained_on:
            say(f"          {trained_on_line(self.n_trained_on, len(heldout or ()))}")
        dataset = job.rows_to_score(dataset, tools, rewards, TRAINING_ROWS)
        heldout = heldout and job.rows_to_score(heldout, tools, rewards, HELDOUT_ROWS)
        job.say_rewards(tools, rewards)
        if self.preflight is not None:
            self.preflight.before_model(dataset, tools, rewards, heldout)
        trainer = job.trainer(
            reward_funcs=[replace(reward, refused=None) for reward in rewards],  # its rows were looked at
            train_dataset=dataset,
            heldout=heldout or (),
            eval_dataset=None if self.config.eval_strategy == "no" else heldout,
            tools=tools,
            agent=player,
        )
        opened.callback(trainer.close)
        return trainer, trainer.fitting(heldout, name=HELDOUT_ROWS)

    def _success(self, trainer: ToolGRPOTrainer, rows: Dataset | None, when: str) -> dict[str, Share]:
        if rows is None:
            return {}
        sharing = trainer.accelerator
        own = list(rows)[sharing.process_index :: sharing.num_processes]
        sampled = self.config.sampling_options()
        rates = {}
        with report_first_failure(Path(self.config.output_dir), sharing):
            for name, options in (("greedy", replace(sampled, temperature=0.0)), ("sampled", sampled)):
                successes = trainer.measure(own, options, label=f"{when} ({name})").successes
                rates[name] = Share.of(gather_object(list(successes)))
        self.terminal.say(f"{when:<9} " + ", ".join(f"{name} success {rate}" for name, rate in rates.items()))
        return rates

    def _summary(
        self,
        trainer: ToolGRPOTrainer,
        before: dict[str, Share],
        after: dict[str, Share],
        train_s: float,
        steps: int,
        earlier: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "before": _as_json(before),
            "after": _as_json(after),
            "steps": steps,
            "steps_in_all": trainer.state.global_step,
            "best_step": trainer.best_step,
            "seconds_per_step": {
                "all": train_s / max(1, steps),
                "rollout": trainer.rollout_batches.rollout_seconds / max(1, steps),
                "training": (train_s - trainer.rollout_batches.rollout_seconds) / max(1, steps),
            },
            "seconds_in_all": time.monotonic() - self.terminal.started_s,
            **doctor_summary(trainer.doctor),
            "model": str(self.config.output_dir),
            "episodes": str(trainer.recorder.path) if trainer.recorder.path else None,
            "log": str(self.terminal.log_file),
            "earlier_runs": [*earlier.pop("earlier_runs", []), earlier] if earlier else [],
        }

    def _keep(self, summary: dict[str, Any]) -> None:
        path = Path(self.config.output_dir) / "summary.json"
        if self.terminal.is_main_process():
            with storage_errors(f"the summary {path}", path.parent):
                write_whole(path, json.dumps(summary, indent=2) + "\n")

    def _earlier(self) -> dict[str, Any]:
        """Return the summary of the run that this one resumes; empty if there is none."""
        folder = Path(self.config.output_dir)
        if self.begun is None or self.begun.checkpoint is None:
            return {}
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def _show(self, summary: dict[str, Any], doctor: list[str]) -> None:
        table = Table(title="held-out success, 95 % interval", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column)
        for name in summary["before"]:
            table.add_row(name, *(_rate(summary[when].get(name)) for when in ("before", "after")))
        if summary["before"]:
            self.terminal.console.print(table)
        outcome = outcome_line(summary["before"], summary["after"])
        if outcome is not None:
            self.terminal.say(outcome)
        seconds = summary["seconds_per_step"]
        self.terminal.say(
            f"{counted(summary['steps'], 'step')}, {seconds['all']:.2f} s each with saving and measuring (rollout {seconds['rollout']:.2f}, "
            f"all else {seconds['training']:.2f}); {summary['seconds_in_all']:.0f} s in all"
        )
        for line in doctor:
            self.terminal.say(line)
        best = summary["best_step"]
        of_step = (
            "" if best is None else f" (of step {best}, the best of {summary['steps_in_all']} by held-out success)"
        )
        for name, more in (("model", of_step), ("episodes", ""), ("log", "")):
            if summary[name]:
                self.terminal.say(f"{name:<9} {summary[name]}{more}")
        if summary["episodes"] and self.terminal.is_main_process():
            self.terminal.say(f"report    {report_line(Path(self.config.output_dir))}")
        if "sampled" in summary["after"]:
            sampled = summary["after"]["sampled"]
            self.terminal.say_objective(sampled["rate"] if sampled["n"] else math.nan)


class _FirstStep(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Remembers after how many steps a training began: some, where it was resumed; None if it did not begin."""

    number: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self.number = state.global_step


def _measured_before(earlier: dict[str, Any], heldout: Dataset | None) -> dict[str, Share]:
    """Return what the first run measured before it trained, if it asked as many questions."""
    shares = {name: Share(rate["rate"], rate["n"]) for name, rate in earlier.get("before", {}).items()}
    same = heldout is None or all(share.n == len(heldout) for share in shares.values())
    return shares if same else {}


def _as_json(rates: dict[str, Share]) -> dict[str, Any]:
    return {name: {"rate": rate.value, "interval": list(rate.interval), "n": rate.n} for name, rate in rates.items()}


def _rate(value: dict[str, Any] | None) -> str:
    if value is None or not value["n"]:  # where every episode was dropped
        return "(not measured)"
    low, high = value["interval"]
    return f"{value['rate']:.3f}  [{low:.3f}, {high:.3f}]"

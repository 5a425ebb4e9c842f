"""One training run from arguments to the closing table: what `recipes/train.py` does.

load and check   model, tools, rewards, data: every mistake in them is found here, before the first step
before           success on held-out rows
train            TRL's loop
after            the same held-out rows again
close            save the model, print the table
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.table import Table
from trl import ModelConfig, get_peft_config, get_quantization_config

from toolgrpo.config_files import parse_args
from toolgrpo.data import BadRows, check_gold, load_tasks
from toolgrpo.data.arithmetic import success
from toolgrpo.errors import ConfigError, DataError
from toolgrpo.evaluation import SuccessRate, grade
from toolgrpo.nano import ensure_nano
from toolgrpo.observe.progress import RunProgress, StepsCallback
from toolgrpo.observe.terminal import Terminal
from toolgrpo.rewards import get_reward, load_reward
from toolgrpo.tools import Toolbox, load_tools
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.trainer import ToolGRPOTrainer
from toolgrpo.trajectory import Trajectory

__all__ = ["ScriptArguments", "TrainingRun", "parse_arguments"]

_LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class ScriptArguments:
    """What is trained on: tools, rewards, data."""

    tools_script: str | None = field(
        default=None, metadata={"help": "Path of a Python file that exports TOOL_FUNCTIONS."}
    )
    tool_functions_module: str | None = field(
        default=None, metadata={"help": "Importable module that exports TOOL_FUNCTIONS."}
    )
    environment: str | None = field(
        default=None, metadata={"help": "A class with state, one instance an episode: PATH.py:Class."}
    )
    mcp_config: str | None = field(default=None, metadata={"help": "Path of an mcp.json that names MCP servers."})
    cache_tools: bool = field(
        default=False, metadata={"help": "Answer a repeated call of a stateless tool from memory."}
    )
    tool_workers: int = field(default=2, metadata={"help": "Processes that run tools."})
    reward_fn: str | None = field(
        default=None, metadata={"help": "Path of a Python file that exports a reward function."}
    )
    reward_function_name: str = field(
        default="reward_func", metadata={"help": "Name of the function in the reward file."}
    )
    reward: list[str] | None = field(default=None, metadata={"help": "Built-in rewards by name, e.g. accuracy."})
    dataset_id_or_path: str | None = field(
        default=None, metadata={"help": "A file, a hub id, or a named task set such as `arithmetic` or `gsm8k`."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    max_rows: int | None = field(default=None, metadata={"help": "Use at most this many rows."})
    eval_dataset_id_or_path: str | None = field(
        default=None, metadata={"help": "Held-out rows for the before/after table; default: the task set's own."}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Split of the held-out rows; default: the whole file, or the task set's own."}
    )
    eval_questions: int = field(default=0, metadata={"help": "Held-out rows to measure success on; 0: none."})
    skip_bad_rows: bool = field(
        default=False, metadata={"help": "Leave bad rows out and say how many, instead of stopping at the first."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Load and check everything, then stop."})


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """The command line over the YAML file over the defaults."""
    script, config, model = parse_args((ScriptArguments, ToolGRPOConfig, ModelConfig), list(argv))
    for name, flag in (
        ("model_name_or_path", model.model_name_or_path),
        ("dataset_id_or_path", script.dataset_id_or_path),
    ):
        if not flag:
            raise ConfigError(f"--{name} is missing; for a first look: --config recipes/configs/nano.yaml")
    if script.environment and not script.reward_fn and not script.reward:
        script.reward = ["environment"]
    if not script.reward_fn and not script.reward:
        raise ConfigError("no reward is given: --reward_fn FILE.py, or --reward NAME for a built-in (e.g. accuracy)")
    if script.tools_script and script.tool_functions_module:
        raise ConfigError("--tools_script and --tool_functions_module exclude each other; give one")
    return script, config, model


class TrainingRun:
    """Holds the loaded parts between the stages."""

    def __init__(
        self,
        script: ScriptArguments,
        config: ToolGRPOConfig,
        model: ModelConfig,
        terminal: Terminal,
        *,
        started: float,
    ) -> None:
        self.script = script
        self.config = config
        self.dataset_spec = str(script.dataset_id_or_path)
        self.model = model
        self.terminal = terminal
        self.started = started

    def run(self) -> dict[str, Any] | None:
        """All stages; the summary that the table shows, or None after a dry run."""
        trainer, heldout = self._load()
        try:
            if self.script.dry_run:
                self.terminal.say("dry run: everything was loaded and checked")
                return None
            before = self._success(trainer, heldout, "before")
            train_started = time.monotonic()
            output = trainer.train(resume_from_checkpoint=self.config.resume_from_checkpoint)
            train_s = time.monotonic() - train_started
            after = self._success(trainer, heldout, "after")
            trainer.save_model(self.config.output_dir)
            trainer.save_state()
            summary = self._summary(trainer, before, after, train_s, output.global_step)
            self._show(summary)
            return summary
        finally:
            trainer.close()

    def _load(self) -> tuple[ToolGRPOTrainer, Dataset | None]:
        say = self.terminal.say
        dataset = self._training_rows()
        heldout = self._heldout_rows()
        tools = self._load_tools()
        rewards = self._load_rewards()
        path = self._model_path()
        say(
            f"model     {self.model.model_name_or_path}"
            + (f" ({path})" if path != self.model.model_name_or_path else "")
        )
        say(f"data      {self.dataset_spec}: {len(dataset)} rows, {len(heldout or ())} held out")
        for reward in rewards:
            checked = check_gold(dataset, reward) if self.script.dry_run else None
            gold = "" if checked is None else f"; the gold answers of all {checked} rows score full marks"
            say(f"reward    {reward.__name__}: {reward.source}{gold}")
        self.config.disable_tqdm = True
        self.config.model_init_kwargs = self._model_init_kwargs()
        trainer = ToolGRPOTrainer(
            model=path,
            reward_funcs=rewards,
            args=self.config,
            train_dataset=dataset,
            tools=tools,
            peft_config=self._peft_config(),
        )
        say(f"engine    {trainer.engine_choice.name} ({trainer.engine_choice.why}), {trainer.chat.name} chat format")
        trainer.progress = RunProgress(self.terminal.console)
        trainer.add_callback(StepsCallback(trainer.progress))
        return trainer, heldout

    def _training_rows(self) -> Dataset:
        bad_rows = BadRows()
        skip: dict[str, Any] = {"on_bad_row": bad_rows.add} if self.script.skip_bad_rows else {}
        dataset = load_tasks(
            self.dataset_spec,
            split=self.script.dataset_split,
            limit=self.script.max_rows,
            seed=self.config.seed,
            **skip,
        )
        if self.script.skip_bad_rows:
            self.terminal.say(bad_rows.summary())
        prompts = self.config.generation_batch_size // self.config.num_generations
        if len(dataset) < prompts:
            raise DataError(
                f"{self.dataset_spec} has {len(dataset)} rows, but one step takes {prompts} different prompts (a generation "
                f"batch of {self.config.generation_batch_size} episodes in groups of {self.config.num_generations}). Give "
                f"more rows, a smaller --per_device_train_batch_size or --gradient_accumulation_steps, or larger groups."
            )
        return dataset

    def _model_path(self) -> str:
        name = str(self.model.model_name_or_path)
        return str(ensure_nano(console=self.terminal.console)) if name == "nano" else name

    def _model_init_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "revision": self.model.model_revision,
            "attn_implementation": self.model.attn_implementation,
            "dtype": self.model.dtype,
        }
        quantization = get_quantization_config(self.model)
        if quantization is not None:
            kwargs["quantization_config"] = quantization
        return {key: value for key, value in kwargs.items() if value is not None}

    def _peft_config(self) -> Any:
        if self.model.use_peft and not self.model.lora_target_modules:
            self.model.lora_target_modules = _LORA_TARGETS
        return get_peft_config(self.model)

    def _load_tools(self) -> Toolbox | None:
        script = self.script
        spec = script.tools_script or script.tool_functions_module
        sources = [str(source) for source in (spec, script.environment, script.mcp_config) if source]
        if not sources:
            self.terminal.say("tools     none")
            return None
        toolbox = load_tools(
            spec,
            environment=script.environment,
            mcp_config=script.mcp_config,
            cache_tools=script.cache_tools,
            workers=script.tool_workers,
            tool_timeout_s=self.config.tool_timeout,
            log_path=Path(self.config.output_dir) / "tools.log",
        )
        signatures = ", ".join(_signature(schema) for schema in toolbox.schemas)
        self.terminal.say(f"tools     {signatures} from {', '.join(sources)}")
        return toolbox

    def _load_rewards(self) -> list[Any]:
        rewards = [get_reward(name) for name in self.script.reward or ()]
        if self.script.reward_fn:
            rewards.append(load_reward(self.script.reward_fn, self.script.reward_function_name))
        return rewards

    def _heldout_rows(self) -> Dataset | None:
        if self.script.eval_questions < 1:
            return None
        given = self.script.eval_dataset_id_or_path
        split = self.script.eval_split or ("train" if given else "heldout")
        return load_tasks(given or self.dataset_spec, split=split, limit=self.script.eval_questions)

    def _success(self, trainer: ToolGRPOTrainer, rows: Dataset | None, when: str) -> dict[str, SuccessRate]:
        if rows is None:
            return {}
        rows = list(rows)
        sampled = self.config.sampling_options()
        rates = {}
        for name, options in (("greedy", replace(sampled, temperature=0.0)), ("sampled", sampled)):
            result = trainer.rollout(rows, options, label=f"{when} ({name})")
            succeeded = self._succeeded(result.trajectories, rows, trainer)
            rates[name] = SuccessRate(sum(succeeded), len(succeeded))
        self.terminal.say(f"{when:<9} " + ", ".join(f"{name} success {rate}" for name, rate in rates.items()))
        return rates

    def _succeeded(
        self, trajectories: Sequence[Trajectory], rows: list[Mapping[str, Any]], trainer: ToolGRPOTrainer
    ) -> list[bool]:
        """The embedded task has a measure of its own, stricter than its reward; elsewhere the reward decides."""
        if (self.script.eval_dataset_id_or_path or self.dataset_spec) == "arithmetic":
            return [success(t.messages, row["answer"]) for t, row in zip(trajectories, rows, strict=True)]
        rewards = grade(trajectories, rows, trainer.reward_funcs, trainer.reward_weights.tolist())
        return [reward >= self.config.success_threshold for reward in rewards]

    def _summary(
        self,
        trainer: ToolGRPOTrainer,
        before: dict[str, SuccessRate],
        after: dict[str, SuccessRate],
        train_s: float,
        steps: int,
    ) -> dict[str, Any]:
        def as_json(rates: dict[str, SuccessRate]) -> dict[str, Any]:
            return {
                name: {"rate": rate.rate, "interval": list(rate.interval), "n": rate.n} for name, rate in rates.items()
            }

        return {
            "before": as_json(before),
            "after": as_json(after),
            "steps": steps,
            "seconds_per_step": {
                "all": train_s / max(1, steps),
                "rollout": trainer.rollout_seconds / max(1, steps),
                "training": (train_s - trainer.rollout_seconds) / max(1, steps),
            },
            "seconds_in_all": time.monotonic() - self.started,
            "model": os.path.abspath(self.config.output_dir),
            "episodes": str(trainer.recorder.path) if trainer.recorder.path else None,
            "log": str(self.terminal.log_file),
        }

    def _show(self, summary: dict[str, Any]) -> None:
        table = Table(title="held-out success, 95 % interval", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column)
        for name in summary["before"]:
            table.add_row(name, *(_rate(summary[when][name]) for when in ("before", "after")))
        if summary["before"]:
            self.terminal.console.print(table)
        seconds = summary["seconds_per_step"]
        self.terminal.say(
            f"{summary['steps']} steps, {seconds['all']:.2f} s each (rollout {seconds['rollout']:.2f}, "
            f"training {seconds['training']:.2f}); {summary['seconds_in_all']:.0f} s in all"
        )
        for name in ("model", "episodes", "log"):
            if summary[name]:
                self.terminal.say(f"{name:<9} {summary[name]}")


def _signature(schema: Mapping[str, Any]) -> str:
    function = schema["function"]
    properties = function.get("parameters", {}).get("properties", {})
    parameters = ", ".join(f"{name}: {spec.get('type', 'any')}" for name, spec in properties.items())
    return f"{function['name']}({parameters})"


def _rate(value: dict[str, Any]) -> str:
    low, high = value["interval"]
    return f"{value['rate']:.3f}  [{low:.3f}, {high:.3f}]"

"""Load and check what was typed for a run: model, tools, rewards, rows.

Every mistake in them is found here, before step 1. Tools, rewards and rows come through the doors that a trainer in
Python uses too (`open_tools`, `named_rewards`, `suited_rows`). Each says one line about what was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from toolgrpo.chat.base import ChatFormat
from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.plugins import load_rewards, load_toolbox
from toolgrpo.commands.terminal import Terminal
from toolgrpo.data import BadRows, load_tasks
from toolgrpo.data.load import hold_out, hub_place
from toolgrpo.errors import ConfigError, ModelError, ToolGRPOError
from toolgrpo.models import NAMED_MODELS, check_model, folder_of
from toolgrpo.observe.console import show_warnings
from toolgrpo.observe.progress import RunProgress
from toolgrpo.rewards import Reward
from toolgrpo.rewards.base import source_text
from toolgrpo.rewards.by_task import ByTask
from toolgrpo.rollout import Player
from toolgrpo.rollout.demand import MOST_AT_A_TIME, PROMPT_ROOM, Prompts, Window
from toolgrpo.rollout.row_parts import OFFERED, TOOL_COLUMNS, check_user_turns
from toolgrpo.support.plain_text import without_secrets
from toolgrpo.support.shipped_files import page_here
from toolgrpo.support.storage import storage_errors
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer.assembly import check_rows_of_a_step, open_player, suited_rows
from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig, get_peft_config, get_quantization_config
from toolgrpo.trainer.memory import Device, Estimate, RunShape, estimate
from toolgrpo.trainer.trainer import ToolGRPOTrainer

# The projections of attention, MLP and recurrent layers, as model families call them; PEFT takes those
# that the model has. Not Mamba's `out_proj`, whose weight a kernel for the whole layer reads past any
# adapter, nor gates that are narrower than an adapter.
LORA_TARGETS = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),  # most of them
    *("qkv_proj", "gate_up_proj"),  # Phi-3 and GLM-4 keep several in one
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # DeepSeek's are factored
    *("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "linear_attn.out_proj"),  # Qwen3.5, Qwen3-Next
    *("conv.in_proj", "conv.out_proj", "self_attn.out_proj", "w1", "w2", "w3"),  # LFM2
    *("mixer.in_proj", "mamba.in_proj", "input_linear", "output_linear"),  # Nemotron-H, Granite 4
]

_NANO_TOOLS, _TUTORIAL = 4, "docs/tutorials/half_an_hour.md"
TRAINING_ROWS, HELDOUT_ROWS, QUESTIONS = "the training rows", "the held-out rows", "the questions"


@dataclass(frozen=True)
class Job:
    """The arguments of a run, and what each of them stands for."""

    script: ScriptArguments
    config: ToolGRPOConfig
    model: ModelConfig
    terminal: Terminal

    @property
    def dataset_spec(self) -> str:
        return str(self.script.dataset_id_or_path)

    @property
    def model_name(self) -> str:
        return str(self.model.model_name_or_path)

    def training_rows(self) -> Dataset:
        """Return the rows to train on; at least as many as one step takes."""
        dataset, _ = self._shares
        check_rows_of_a_step(dataset, self.config, self.dataset_spec)
        return dataset

    def heldout_rows(self, default: int = 0) -> Dataset | None:
        """Return the rows to measure success on, or None where none are asked for."""
        if self.script.eval_share:
            _, heldout = self._shares
            return heldout.select(range(min(len(heldout), self.script.eval_questions or len(heldout))))
        n_questions = self.script.eval_questions or default
        if n_questions < 1:
            return None
        return self._rows(*self.script.heldout_source(), n_questions)

    def measured_on(self) -> dict[str, Any]:
        """Return the data set of the held-out rows in the fields of an EvalResult, with no folder of this machine."""
        shared = bool(self.script.eval_share)
        spec, split = (self.dataset_spec, self.script.dataset_split) if shared else self.script.heldout_source()
        place = hub_place(spec, split)
        return {
            "dataset_type": place.repository if place else "local",
            "dataset_name": place.repository if place else Path(without_secrets(spec)).name,
            "dataset_config": place.config if place else None,
            "dataset_split": place.split if place else None if split == "train" else split,  # of a file it is the whole
            "dataset_args": {"held_out_share": self.script.eval_share} if shared else None,
        }

    @cached_property
    def _shares(self) -> tuple[Dataset, Dataset]:
        # those to train on, and those that --eval_share holds out of them
        rows = self._rows(self.dataset_spec, self.script.dataset_split, self.script.max_rows)
        if not self.script.eval_share:
            return rows, rows.select([])
        held = hold_out(rows["prompt"], self.script.eval_share, self.config.seed)
        return rows.select(held.train), rows.select(held.heldout)

    def toolbox(self) -> ToolProvider | None:
        return load_toolbox(self.script, self.config, self.terminal)

    def player(self) -> Player | None:
        """Return what plays the episodes, if it is not our own loop."""
        player = open_player(self.script.agent, None, self.config, self.script.agent_host)
        if player is not None:
            self.terminal.say(f"agent     {without_secrets(str(getattr(player, 'name', self.script.agent)))}")
        return player

    def open(self, opened: ExitStack) -> tuple[ToolProvider | None, Player | None]:
        """Open the tools, or the agent, that play the episodes; `opened` closes them."""
        tools, player = self.toolbox(), self.player()
        for one in (tools, player):
            if one is not None:
                opened.callback(one.close)
        return tools, player

    def rewards(self) -> list[Reward]:
        return load_rewards(self.script, self.config, self.terminal)

    def say_rewards(self, tools: ToolProvider | None, rewards: Sequence[Reward]) -> None:
        """Say what is graded by, and what a model or a threshold may not be up to."""
        if self.model.model_name_or_path == "nano" and tools is not None and len(tools.names) != _NANO_TOOLS:
            self.terminal.say(
                f"          nano was taught {_NANO_TOOLS} tools at a time (tools_funcs/arithmetic_tools.py), and may call none "
                f"of {len(tools.names)} right: teach it their form first, with toolgrpo sft ({page_here('3-show-the-form', _TUTORIAL)})"
            )
        most = sum(max(0.0, weight) for weight in self.config.reward_weights or [1.0] * len(rewards))
        if most < self.config.success_threshold - 1e-6:
            self.terminal.say(
                f"          success_threshold is {self.config.success_threshold:g}, and the weights of the rewards add up to "
                f"{most:g}: no episode succeeds unless a reward gives more than 1"
            )
        default = (
            "; the default, since no --reward and no --reward_fn is given" if self.script.reward_is_default else ""
        )
        for reward in rewards:
            self.terminal.say(f"reward    {reward.name}: {source_text(reward)}{default}")

    def rows_to_score(
        self, rows: Dataset, tools: ToolProvider | None, rewards: Sequence[Reward], name: str, *, trains: bool = True
    ) -> Dataset:
        """Return the rows whose tools are there and that every reward can score; --skip_bad_rows leaves out the others.

        What only measures may do without the tools that rows name as right.
        """
        try:
            _check_columns(rows, tools, rewards)
        except ToolGRPOError as error:
            raise error if name == TRAINING_ROWS else type(error)(f"{name}: {error}") from error
        columns = () if self.script.agent else TOOL_COLUMNS if trains or tools is not None else OFFERED

        def look(find: Callable[[], dict[int, str]]) -> dict[int, str]:
            (refused,) = broadcast_object_list([find() if self.terminal.is_main_process() else {}])
            return dict(refused)

        suited: Dataset = suited_rows(
            *(rows, name, tools, rewards, columns),
            left_out=(lambda text: self.terminal.say(f"          {text}")) if self.script.skip_bad_rows else None,
            advice="leave them out with --skip_bad_rows",
            look=look,
        )
        return suited

    def model_path(self, name: str) -> str:
        """Return where the model lies; the named models are built or unpacked first."""
        path = self._place_of(name)
        self.terminal.say(f"model     {name}" + (f" ({path})" if path != name else ""))
        return path

    def trainer(self, **arguments: Any) -> ToolGRPOTrainer:
        """Build the trainer.

        What a library says against the settings meanwhile is shown as the user's mistake it is.
        """
        model, peft_config = self.model_path(self.model_name), self.peft_config()
        config = self.config.changed(disable_tqdm=True, model_init_kwargs=init_kwargs_of(self.model))
        progress = RunProgress(self.terminal.console, say=self.terminal.say)
        show_warnings(self.terminal.say)
        try:
            with storage_errors("what the trainer keeps on the disk", Path(config.output_dir)):
                trainer = ToolGRPOTrainer(
                    model=model, args=config, peft_config=peft_config, progress=progress, **arguments
                )
        except ToolGRPOError:
            raise
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"the trainer cannot be built with these settings: {error}") from error
        if self.model.use_peft:
            tuner = trainer.policy.model.base_model
            names = (*tuner.targeted_module_names, *tuner.targeted_parameter_names)  # the latter: experts kept in one
            adapted = {name.rpartition(".")[2] for name in names}
            self.terminal.say(f"          LoRA of rank {self.model.lora_r} on {', '.join(sorted(adapted))}")
            if self.dropout:
                self.terminal.say(f"          {self.dropout}")
        return trainer

    def estimate(
        self,
        model: Any,
        chat: ChatFormat | None,
        tools: ToolProvider | None,
        rows: Sequence[Mapping[str, Any]],
        heldout: Sequence[Mapping[str, Any]] = (),
        *,
        dtype: torch.dtype,
        engine: str,
        device: Device,
        bits: int = 16,
    ) -> tuple[Estimate, Window]:
        """Return what training on these rows takes of a device, and the window; the model may be on the meta device."""
        config = self.config
        prompts = Prompts(chat=chat, tools=tools, enable_thinking=config.enable_thinking)
        room = PROMPT_ROOM if self.script.agent else 0
        window = prompts.window([*rows, *heldout], config.episode_limits().max_completion_length, room)
        assert window is not None
        at_a_time = config.engine_options().max_rows
        if not device.is_cpu and config.max_concurrent_episodes is None:
            at_a_time = max(at_a_time, min(len(heldout), MOST_AT_A_TIME))
        context = min(window.tokens, config.vllm_max_model_length or window.tokens)
        run = RunShape.of(model, config, dtype=dtype, engine=engine, context=context, at_a_time=at_a_time, bits=bits)
        return estimate(run, device), window

    def estimate_of(
        self, trainer: ToolGRPOTrainer, rows: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]] = ()
    ) -> Estimate:
        """Return what this trainer takes of the device that it is on."""
        policy, engine = trainer.policy, trainer.engine_choice.name
        model, device = policy.get_model(), Device.here(policy.device)
        found, _ = self.estimate(
            model, trainer.chat, trainer.toolbox, rows, heldout, dtype=policy.dtype, engine=engine, device=device
        )
        return found

    @property
    def dropout(self) -> str:
        said = f"lora_dropout {self.model.lora_dropout:g}: the training pass scores a different policy than the sampled one; 0 is exact"
        return said if self.model.use_peft and self.model.lora_dropout else ""

    def peft_config(self) -> Any:
        """Return LoRA on the projections of every layer, unless the user names other modules."""
        model = self.model
        if model.use_peft:
            path = self._place_of(self.model_name)
            model = with_lora_modules(model, lambda: shape_of(path, model, self.config.trust_remote_code))
        return of_revision(get_peft_config(model), model)

    def _rows(self, spec: str, split: str, limit: int | None) -> Dataset:
        bad_rows = BadRows()
        skip: dict[str, Any] = {"on_bad_row": bad_rows.add} if self.script.skip_bad_rows else {}
        dataset = load_tasks(
            spec, split=split, limit=limit, seed=self.config.seed, system_prompt=self.script.system_prompt, **skip
        )
        if self.script.skip_bad_rows:
            self.terminal.say(bad_rows.summary())
        return dataset

    def _place_of(self, name: str) -> str:
        if name in NAMED_MODELS:
            return str(folder_of(name, self.terminal.say))
        check_model(name)
        path = Path(name).expanduser()
        return str(path) if path.exists() else name


def of_revision(adapter: Any, model: ModelConfig) -> Any:
    """Return an adapter's config, if there is one, with the revision of its base model, which PEFT loads it onto."""
    if adapter is not None and model.model_revision not in (None, "main"):
        adapter.revision = model.model_revision
    return adapter


def init_kwargs_of(model: ModelConfig) -> dict[str, Any]:
    """Return with which arguments the model is loaded."""
    given = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "quantization_config": get_quantization_config(model),
    }
    return {key: value for key, value in given.items() if value is not None}


def shape_of(path: str, model: ModelConfig, trust_remote_code: bool) -> Any:
    """Return the model without its weights."""
    origin = {"revision": model.model_revision, "trust_remote_code": trust_remote_code}
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, **origin)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model_name_or_path {path}: no model can be loaded from there: {error}") from error


def with_lora_modules(model: ModelConfig, shape: Callable[[], Any]) -> ModelConfig:
    """Return the same with the modules that get an adapter: ours, or the user's, each of which the model has."""
    asked = model.lora_target_modules
    if not asked:
        return replace(model, lora_target_modules=LORA_TARGETS)  # type: ignore[call-arg]  # TRL ships no types
    names = [asked] if isinstance(asked, str) else list(asked)
    if names == ["all-linear"] or not all(name.replace(".", "_").isidentifier() for name in names):
        return model  # PEFT's word, or a pattern
    there = [name for name, module in shape().named_modules() if not list(module.children())]
    missing = [name for name in names if not any(f".{one}".endswith(f".{name}") for one in there)]
    if missing:
        have = sorted({one.rpartition(".")[2] for one in there if one.rpartition(".")[2] in LORA_TARGETS})
        raise ConfigError(
            f"lora_target_modules: the model has no module {', '.join(missing)}; it has {', '.join(have)}, and "
            f"all-linear means every linear one"
        )
    model = replace(model)
    model.lora_target_modules = names  # a single one too: as text PEFT would take it for a pattern
    return model


def _check_columns(rows: Dataset, tools: ToolProvider | None, rewards: Sequence[Reward]) -> None:
    if "user_turns" in rows.column_names:
        for script in rows["user_turns"]:
            check_user_turns(tools, script)
    for reward in rewards:
        reward.check_columns(rows.column_names)
        if isinstance(reward.function, ByTask):
            reward.function.check_columns(rows["reward"], rows.column_names)

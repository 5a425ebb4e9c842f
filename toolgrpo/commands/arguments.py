"""Arguments of each command, as flags and YAML keys: dataclasses that import nothing heavy.

`flags_of(command)` says all that a command takes. What a training has and nothing else reads is refused as a
flag of `evaluate` and `gateway`; a YAML file of a training may hold it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolgrpo.commands.flags import Flag, flags_of_classes, flags_of_source
from toolgrpo.commands.given import read_given
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.errors import ConfigError
from toolgrpo.options import (
    THEMES,
    DrawingOptions,
    EpisodeOptions,
    LearningOptions,
    Options,
    OverlapOptions,
    PassOptions,
    WatchOptions,
    at_least,
    call_markers_option,
    max_tokens_per_pass_option,
    option,
    prefix_sharing_option,
)
from toolgrpo.storage import AN_EVALUATION, check_output

if TYPE_CHECKING:
    from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig

# What `evaluate` and `gateway` read of the fields of TRL and Transformers.
READ_WITHOUT_TRAINING = frozenset(
    (
        *("max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "reward_weights"),
        *("use_vllm", "vllm_mode", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
        *("vllm_tensor_parallel_size", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        *("vllm_server_timeout", "vllm_group_port", "trust_remote_code", "model_init_kwargs"),
        *("generation_kwargs", "chat_template_kwargs"),
        *("output_dir", "seed", "bf16", "fp16", "use_cpu", "report_to", "run_name", "disable_tqdm", "full_determinism"),
        *("ddp_backend", "ddp_timeout", "local_rank", "log_level", "log_level_replica"),
    )
)

DEFAULT_QUESTIONS = 100  # of an evaluation

_SOME_TEXT: dict[str, Any] = {
    "allowed": lambda text: text is None or text.strip(),
    "wrong": "--{name} is given without a value; give one, or leave the flag out",
}


@dataclass
class ScriptArguments(Options):
    """Tools, rewards and data."""

    tools_script: str | None = option(None, "Python file that exports TOOL_FUNCTIONS.")
    tool_functions_module: str | None = option(None, "Importable module that exports TOOL_FUNCTIONS.")
    environment: str | None = option(None, "FILE.py:Class, an instance for each episode.")
    agent: str | None = option(
        None, "What plays an episode: FILE.py with `run(client, row)`, or a command line (docs/how-to/agents.md)."
    )
    agent_host: str = option("127.0.0.1", "Address of this machine for agents elsewhere; lets other machines in.")
    mcp_config: str | None = option(None, "Path of an mcp.json that names MCP servers.")
    cache_tools: bool = option(False, "Answer a repeated call of a stateless tool from memory.")
    tool_workers: int = option(4, "Processes that run tools.", **at_least(1))
    reward_fn: list[str] | None = option(None, "Python files that export a reward function.")
    reward_function_name: str | None = option(
        None, "Name of the function in the reward files (reward_func); without a file, of a built-in."
    )
    reward: list[str] | None = option(None, "Built-in rewards by name, e.g. exact_match; TRL's, and dotted paths.")
    dataset_id_or_path: str | None = option(None, "File, hub id or task set (arithmetic, gsm8k).")
    dataset_split: str = option("train", "Split to train on.")
    max_rows: int | None = option(None, "Use at most this many rows.", **at_least(1))
    system_prompt: str | None = option(None, "System message of rows that have none.")
    eval_dataset_id_or_path: str | None = option(None, "Other rows to measure success on; default: the task set's own.")
    eval_split: str | None = option(None, "Their split; default: heldout, test, eval or validation, or a whole file.")
    eval_share: float = option(
        0.0,
        "Hold this share of the rows out to measure success on, drawn by the seed; 0: none.",
        allowed=lambda share: 0 <= share < 1,
        wrong="{name} must be a share of the rows, at least 0 and below 1; got {value}",
    )
    eval_questions: int = option(0, "Held-out rows to measure; 0: none.", **at_least(0))
    skip_bad_rows: bool = option(False, "Leave bad rows out and say how many, instead of stopping at the first.")
    dry_run: bool = option(False, "Load and check everything, then stop.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_share and (self.eval_dataset_id_or_path or self.eval_split):
            raise ConfigError(
                "eval_share takes held-out rows from the training data, and eval_dataset_id_or_path or eval_split from "
                "elsewhere; give one of them"
            )
        self._choose_reward()

    def heldout_source(self) -> tuple[str, str]:
        """Return the data and the split of held-out rows that are no share of the rows to train on."""
        from toolgrpo.data.load import held_out_split  # brings YAML's and pydantic's weight, which help does not need

        given = self.eval_dataset_id_or_path
        spec = str(given or self.dataset_id_or_path)
        split = self.eval_split or held_out_split(spec)
        if split == "train" and not given and not self.eval_split:
            split = "heldout"  # never the rows of the training; the source says what to give instead
        return spec, split

    def _choose_reward(self) -> None:
        """Take a function name without a file as a built-in reward, and a default where there is none."""
        self.reward_is_default = False
        if self.reward_fn:
            return
        if self.reward_function_name is not None:
            if self.reward and self.reward_function_name not in self.reward:
                raise ConfigError(
                    f"--reward_function_name {self.reward_function_name} names a function of --reward_fn FILE.py, which "
                    f"is not given; a built-in of that name goes to --reward, beside {', '.join(self.reward)}"
                )
            self.reward = self.reward or [self.reward_function_name]
        if not self.reward:
            self.reward = ["environment" if self.environment or self.agent else "tool_result"]
            self.reward_is_default = True


@dataclass(frozen=True, kw_only=True)
class CheckArguments(Options):
    """Arguments of `check`."""

    questions: int = option(8, "Questions put to the untrained model.", **at_least(1))
    samples: int = option(4, "Episodes for each of them.", **at_least(2))
    step: bool = option(True, "Also do one training step (nothing of it is kept).")
    estimate: bool = option(False, "Only estimate the memory, from the model's config: no weights are loaded.")
    card: str | None = option(
        None, "Estimate for a GPU with this much memory, as 24GB or 22.5GiB; default: this machine."
    )
    json: bool = option(False, "Print the result as JSON instead of lines.")


@dataclass
class EvaluationArguments(Options):
    """Arguments of `evaluate`."""

    baseline: str | None = option(
        None, "A second model, measured on the same questions: the one before training.", **_SOME_TEXT
    )
    samples: int = option(8, "Episodes for each question.", **at_least(1))
    ks: list[int] | None = option(None, "The k of pass@k and maj@k; default: 1 and the number of samples.")
    report: str | None = option(None, "The JSON file; default: OUTPUT_DIR/evaluation.json.", **_SOME_TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ks = sorted(set(self.ks or (1, self.samples)))
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        if wrong:
            raise ConfigError(f"ks must lie between 1 and samples ({self.samples}), got {wrong[0]}; raise --samples")
        if self.report is not None:
            check_output(Path(self.report), "the report", "--report", AN_EVALUATION)


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(Options):
    """Arguments of `replay`."""

    folder: str = option("", "The run's output folder.")
    episode: int = option(-1, "The number of the episode.")
    with_model: str | None = option(None, "Draw the whole episode again with this model: a folder, hub id or name.")
    all: bool = option(False, "Ask the rewards about every recorded episode, in a table (in place of EPISODE).")
    run_its_files: bool = option(False, "Run Python files of the recording's own folder; whoever made it wrote them.")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(EpisodeOptions, WatchOptions):
    """Fields of a training that a replay reads without a model."""

    output_dir: str = "trainer_output"
    reward_weights: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class GatewayArguments(Options):
    """Arguments of `gateway`."""

    port: int = option(
        8000,
        "Port to listen on; 0: a free one.",
        allowed=lambda port: 0 <= port < 65536,
        wrong="--{name} must lie between 0 and 65535, got {value}",
    )
    host: str = option("127.0.0.1", "Interface to listen on; another than this lets others in.")
    api_key: str | None = option(
        None,
        "Key that clients must give; default: any will do.",
        allowed=lambda key: key is None or (key.isascii() and key.isprintable() and key.strip() == key != ""),
        wrong="--{name} must be printable ASCII text without spaces at its ends, got {value!r}; leave it out to answer everyone",
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments(Options):
    """Arguments of `data`."""

    show: int = option(3, "Rows that are shown.")
    model_name_or_path: str | None = option(None, "Show prompts as this model reads them: a folder, hub id or name.")


@dataclass(frozen=True, kw_only=True)
class SFTArguments(Options):
    """Arguments of `sft`."""

    dataset_id_or_path: str | None = option(None, "Conversations: a file, a folder or a hub id; it must be given.")
    dataset_split: str = option("train", "Split to learn from.")
    tools_script: str | None = option(None, "Tools that rows without a column `tools` are rendered with.")
    environment: str | None = option(None, "A class with state, whose tools come beside those: PATH.py:Class.")
    mcp_config: str | None = option(None, "Path of an mcp.json that names MCP servers, whose tools come beside those.")
    system_prompt: str | None = option(None, "Text of a system message for conversations that have none.")
    batch_size: int | None = option(
        None,
        "Conversations per optimizer step, of all processes; sets gradient_accumulation_steps.",
        **at_least(1),
    )
    micro_batch_size: int | None = option(None, "Another name for per_device_train_batch_size.", **at_least(1))


@dataclass(frozen=True, kw_only=True)
class SFTOptions(Options):
    """The fields that `ToolSFTConfig` has instead of TRL's."""

    max_length: int | None = option(None, "Longer conversations are an error; default: the model's context window.")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: by the model's size, 3e-3 for nano to 2e-5 from 1B on.",
        allowed=lambda rate: rate is None or rate > 0,
        wrong="{name} must be positive, got {value}",
    )
    logging_steps: float = option(1, "Steps between two entries of the log.")
    call_markers: str = call_markers_option()
    prefix_sharing: str = prefix_sharing_option()
    max_tokens_per_pass: int | None = max_tokens_per_pass_option()


_TRAINING = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
)
_GRPO = (*_TRAINING, ("trl", "trainer/grpo_config.py", "GRPOConfig"))
_SFT = (*_TRAINING, ("trl", "trainer/sft_config.py", "SFTConfig"))
_MODEL = ("trl", "trainer/model_config.py", "ModelConfig")

_OWN: Mapping[str, tuple[type[Any], ...]] = {
    "train": (ScriptArguments, *THEMES),
    "check": (CheckArguments, ScriptArguments, *THEMES),
    "replay": (ReplayArguments, ScriptArguments, *THEMES),
    "evaluate": (EvaluationArguments, ScriptArguments, *THEMES),
    "gateway": (GatewayArguments, *THEMES),
    "sft": (SFTArguments, SFTOptions),
    "chat": (ScriptArguments, *THEMES),
    "data": (DataArguments, ScriptArguments),
}
_TRAINS_NOTHING = ("evaluate", "gateway", "chat")
_OF_TRAINING = (LearningOptions, DrawingOptions, OverlapOptions, PassOptions)


@cache
def flags_of(command: str) -> dict[str, Flag]:
    """Return every flag that a command takes; later dataclasses stand over earlier ones."""
    if command == "data":
        return flags_of_classes(_OWN[command])
    found = {flag.name: flag for source in (_SFT if command == "sft" else _GRPO) for flag in flags_of_source(*source)}
    if command in _TRAINS_NOTHING:
        found = {name: replace(flag, of_training=name not in READ_WITHOUT_TRAINING) for name, flag in found.items()}
    found |= {flag.name: flag for flag in flags_of_source(*_MODEL)} | flags_of_classes(_OWN[command])
    if command in _TRAINS_NOTHING:
        taught = {one.name for theme in _OF_TRAINING for one in fields(theme)}
        found |= {name: replace(found[name], of_training=True) for name in taught}
    return found


def own_classes(command: str) -> tuple[type[Any], ...]:
    """Return the dataclasses of ours that a command reads; they need no PyTorch."""
    return _OWN[command]


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read the command line of a training over the YAML file over the defaults."""
    from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig

    _, script, config, model = parse_checked((ScriptArguments, ToolGRPOConfig, ModelConfig), argv)
    return script, config, model


def parse_checked(kinds: Sequence[type[Any]], argv: Sequence[str], *, trains: bool = True) -> tuple[Any, ...]:
    """Return what is given, and a checked instance of each kind, of which the last three are those of a training."""
    given = read_given(flags_of_classes(kinds), argv)
    made = given.made(kinds)
    script, config, model = made[-3:]
    check_arguments(script, config, model, given.values, trains=trains)
    return given.values, *made


def is_missing(name: str, command: str = "train") -> str:
    """Return what is said where a flag that is needed is not given."""
    shown = {
        "chat": "toolgrpo chat nano",
        "gateway": "toolgrpo gateway --model nano",
        "sft": "--config recipes/configs/sft/qwen3_1.7b.yaml",
    }
    return f"--{name} is missing; for a first look: {shown.get(command, '--config recipes/configs/nano.yaml')}"


def check_reward_given(script: ScriptArguments) -> None:
    """Refuse a training for which nobody chose a reward."""
    if script.reward == ["tool_result"] and script.reward_is_default:
        raise ConfigError(
            "no reward is given, and it decides what the model learns: --reward exact_match (the answer stands in the final "
            "response), tool_result (the last tool response is the answer, whatever the model says after it) or another "
            "built-in (docs/how-to/rewards.md), or --reward_fn my_reward.py"
        )


def check_arguments(
    script: ScriptArguments,
    config: ToolGRPOConfig,
    model: ModelConfig,
    given: Mapping[str, Any],
    *,
    trains: bool = True,
) -> None:
    """Check that what must be given is given, once, and that the output folder can be written.

    `given` names the fields that have a value of the user's. Where nothing `trains`, the questions are all the rows that are
    needed.
    """
    _check_paths(script)
    lora = sorted(name for name in given if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    if lora and not model.use_peft and "use_peft" not in given:
        raise ConfigError(f"{lora[0]} is given, but not use_peft, so all weights would be trained; add --use_peft")
    odd = question_iterations(config.num_iterations)
    if odd is not None:
        raise ConfigError(odd)
    for name, flag in (
        ("model_name_or_path", model.model_name_or_path),
        ("dataset_id_or_path", script.dataset_id_or_path or (not trains and script.eval_dataset_id_or_path)),
    ):
        if not flag:
            raise ConfigError(is_missing(name))
    if trains:
        check_reward_given(script)
    _check_agent(script)
    if script.tools_script and script.tool_functions_module:
        raise ConfigError("--tools_script and --tool_functions_module exclude each other; give one")
    check_folder(config.output_dir, keep=not script.dry_run)


def check_folder(output_dir: str, *, keep: bool = False) -> None:
    """Check that the output folder can be made and written to; `keep` it if it is made for that."""
    folder = Path(output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(OSError):  # another process was first
            for made in () if keep else missing:
                made.rmdir()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--output_dir {output_dir} cannot be a folder to write to: {why}; choose another one"
        ) from error


def _check_agent(script: ScriptArguments) -> None:
    """Refuse what an agent has no use for: it brings its own tools."""
    if script.agent is None:
        if script.agent_host != ScriptArguments.agent_host:
            raise ConfigError("--agent_host is where an agent connects to, and there is none; give --agent too")
        return
    if not script.agent.strip():
        raise ConfigError("--agent is given without a value; give FILE.py or a command line, or leave the flag out")
    for name in ("tools_script", "tool_functions_module", "environment", "mcp_config"):
        if getattr(script, name):
            raise ConfigError(
                f"--agent and --{name} exclude each other: an agent plays the episode itself, with its own tools; give one"
            )


def _check_paths(script: ScriptArguments) -> None:
    """Refuse a file flag with nothing after it (an unset variable of a shell), and a folder."""
    for name in ("tools_script", "tool_functions_module", "environment", "mcp_config", "reward_fn"):
        given = getattr(script, name)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not value.strip():
                raise ConfigError(f"--{name} is given without a value; give one, or leave the flag out")
            path = value.partition(":")[0]
            if name != "tool_functions_module" and Path(path).is_dir():
                raise ConfigError(f"--{name} {path} is a folder; give the file in it")

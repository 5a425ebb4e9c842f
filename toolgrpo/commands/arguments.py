"""What a run is about, as flags and YAML keys: tools, rewards, data.

Shared by the training and the evaluation command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trl import ModelConfig

from toolgrpo.commands.config_files import given_names, parse_args
from toolgrpo.commands.given_words import is_missing
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.errors import ConfigError
from toolgrpo.tools.base import TOOL_WORKERS
from toolgrpo.trainer.config import ToolGRPOConfig


@dataclass
class ScriptArguments:
    """Tools, rewards and data."""

    tools_script: str | None = field(
        default=None, metadata={"help": "Path of a Python file that exports TOOL_FUNCTIONS."}
    )
    tool_functions_module: str | None = field(
        default=None, metadata={"help": "Importable module that exports TOOL_FUNCTIONS."}
    )
    environment: str | None = field(
        default=None, metadata={"help": "A class with state, one instance an episode: PATH.py:Class."}
    )
    agent: str | None = field(
        default=None,
        metadata={
            "help": "What plays an episode: FILE.py with `run(client, row)`, or a command line (docs/how-to/agents.md)."
        },
    )
    mcp_config: str | None = field(default=None, metadata={"help": "Path of an mcp.json that names MCP servers."})
    cache_tools: bool = field(
        default=False, metadata={"help": "Answer a repeated call of a stateless tool from memory."}
    )
    tool_workers: int = field(default=TOOL_WORKERS, metadata={"help": "Processes that run tools."})
    reward_fn: list[str] | None = field(
        default=None, metadata={"help": "Path of a Python file that exports a reward function; several may be given."}
    )
    reward_function_name: str | None = field(
        default=None,
        metadata={"help": "Name of the function in the reward files (reward_func); without a file, of a built-in."},
    )
    reward: list[str] | None = field(default=None, metadata={"help": "Built-in rewards by name, e.g. accuracy."})
    dataset_id_or_path: str | None = field(
        default=None, metadata={"help": "A file, a hub id, or a named task set such as `arithmetic` or `gsm8k`."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    max_rows: int | None = field(default=None, metadata={"help": "Use at most this many rows."})
    system_prompt: str | None = field(
        default=None, metadata={"help": "Text of a system message for rows that have none."}
    )
    eval_dataset_id_or_path: str | None = field(
        default=None, metadata={"help": "Other rows to measure success on; default: the task set's own."}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Their split; default: heldout, test, eval or validation, or a whole file."}
    )
    eval_share: float = field(
        default=0.0,
        metadata={"help": "Hold this share of the rows out to measure success on, drawn by the seed; 0: none."},
    )
    eval_questions: int = field(default=0, metadata={"help": "Held-out rows to measure success on; 0: none."})
    skip_bad_rows: bool = field(
        default=False, metadata={"help": "Leave bad rows out and say how many, instead of stopping at the first."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Load and check everything, then stop."})

    def __post_init__(self) -> None:
        for name, least in (("tool_workers", 1), ("max_rows", 1), ("eval_questions", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.eval_share < 1:
            raise ConfigError(f"eval_share must be a share of the rows, at least 0 and below 1; got {self.eval_share}")
        if self.eval_share and (self.eval_dataset_id_or_path or self.eval_split):
            raise ConfigError(
                "eval_share takes held-out rows from the training data, and eval_dataset_id_or_path or eval_split from "
                "elsewhere; give one of them"
            )
        self._choose_reward()

    def _choose_reward(self) -> None:
        """Take a function name without a file as a built-in reward, and a default where there is
        none.
        """
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
            self.reward = ["environment" if self.environment or self.agent else "accuracy"]
            self.reward_is_default = True


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read the command line over the YAML file over the defaults."""
    kinds = (ScriptArguments, ToolGRPOConfig, ModelConfig)
    script, config, model = parse_args(kinds, list(argv))
    check_arguments(script, config, model, given_names(kinds, argv))
    return script, config, model


def check_arguments(
    script: ScriptArguments,
    config: ToolGRPOConfig,
    model: ModelConfig,
    given: Collection[str] = frozenset(),
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
    _check_agent(script)
    if script.tools_script and script.tool_functions_module:
        raise ConfigError("--tools_script and --tool_functions_module exclude each other; give one")
    folder = Path(config.output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another process was first
            for made in missing if script.dry_run else ():
                made.rmdir()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--output_dir {config.output_dir} cannot be a folder to write to: {why}; choose another one"
        ) from error


def _check_agent(script: ScriptArguments) -> None:
    """Refuse what an agent has no use for: it brings its own tools."""
    if script.agent is None:
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

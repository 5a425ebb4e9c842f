"""Arguments that several commands share, and the looks at them before the seconds in which PyTorch is imported.

Everything is read by the code that reads it later, with the same sentences: rows, models, the output folder, a port.
Plugin files are compiled, and nothing of them runs. A look raises what is wrong; the table says which command has which.

Not covered: rows behind the first `_ROWS`, those of the hub and of reasoning_gym, conversations of a mixture; what a
plugin file exports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolgrpo.commands.given import Given
from toolgrpo.commands.output_folder import check_folder
from toolgrpo.data.rows import raise_bad_row
from toolgrpo.engines.base import CHAT_API, NO_TOKENS
from toolgrpo.errors import ConfigError, DataError
from toolgrpo.models import check_model
from toolgrpo.options import EpisodeOptions, Options, WatchOptions, at_least, batch_of_parts, option
from toolgrpo.rewards import IMPORTED, check_weights, get_reward
from toolgrpo.support.plugin_files import check_python
from toolgrpo.support.shipped_files import located, nearest, no_data_file

if TYPE_CHECKING:
    from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig

DEFAULT_QUESTIONS = 100  # of an evaluation
_AT_ENDPOINT = f"{CHAT_API}:"  # before the name of a baseline that a chat endpoint plays
TOOL_SOURCES = ("tools_script", "tool_functions_module", "environment", "mcp_config")  # flags
_ROWS = 10_000  # that are looked at: half a second
_DATA_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune"),
    *("swanlab", "tensorboard", "trackio", "wandb"),
)
"""The trackers that Transformers knows, beside all and none."""


@dataclass
class ScriptArguments(Options, theme="tools"):
    """Tools, rewards and data."""

    tools_script: str | None = option(None, "Python file that exports TOOL_FUNCTIONS.")
    tool_functions_module: str | None = option(None, "Importable module that exports TOOL_FUNCTIONS.")
    environment: str | None = option(None, "FILE.py:Class; each episode gets an instance.")
    agent: str | None = option(
        None, "Program that plays the episodes: FILE.py with `run(client, row)`, or a command (docs/how-to/agents.md)."
    )
    agent_host: str = option(
        "127.0.0.1", "Address on which agents reach this machine; change it to admit other machines."
    )
    mcp_config: str | None = option(None, "Path of an mcp.json that names MCP servers.")
    cache_tools: bool = option(False, "Answer repeated calls of stateless tools from memory.")
    tool_workers: int = option(4, "Number of processes that run tools.", **at_least(1))
    reward: list[str] | None = option(
        None, "Built-in rewards by name, e.g. exact_match; also TRL's, and dotted paths.", theme="rewards"
    )
    reward_fn: list[str] | None = option(None, "Python files that export a reward function.", theme="rewards")
    reward_function_name: str | None = option(
        None, "Name of the function in the reward files (reward_func); without a file, of a built-in.", theme="rewards"
    )
    dataset_id_or_path: str | None = option(
        None, "Data: a file, a hub id or a task set (arithmetic, gsm8k).", theme="data"
    )
    dataset_split: str = option("train", "Split to train on.", theme="data")
    max_rows: int | None = option(None, "Maximum number of rows to use.", theme="data", **at_least(1))
    system_prompt: str | None = option(None, "System message of rows that have none.", theme="data")
    eval_dataset_id_or_path: str | None = option(
        None, "Data to measure success on; default: the held-out split of the training data.", theme="evaluation"
    )
    eval_split: str | None = option(
        None,
        "Split to measure success on; default: heldout, test, eval or validation, or a whole file.",
        theme="evaluation",
    )
    eval_share: float = option(
        0.0,
        "Share of the rows to hold out and measure success on, chosen by the seed; 0: none.",
        allowed=lambda share: 0 <= share < 1,
        wrong="{name} must be a share of the rows, at least 0 and below 1; got {value}",
        theme="evaluation",
    )
    eval_questions: int = option(
        0, "Number of held-out rows to measure; 0: none, or all of eval_share.", theme="evaluation", **at_least(0)
    )
    skip_bad_rows: bool = option(
        False, "Leave bad rows out and report how many, instead of stopping at the first.", theme="data"
    )
    dry_run: bool = option(False, "Load and check everything, then stop.", theme="watching")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_share and (self.eval_dataset_id_or_path or self.eval_split):
            raise ConfigError(
                "eval_share takes held-out rows from the training data, and eval_dataset_id_or_path or eval_split from "
                "elsewhere; give one of them"
            )
        self._check_paths()
        self._check_agent()
        if self.tools_script and self.tool_functions_module:
            raise ConfigError("--tools_script and --tool_functions_module exclude each other; give one")
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
                    f"is not given; give a built-in of that name to --reward, beside {', '.join(self.reward)}"
                )
            self.reward = self.reward or [self.reward_function_name]
        if not self.reward:
            self.reward = ["environment" if self.environment or self.agent else "tool_result"]
            self.reward_is_default = True

    def _check_agent(self) -> None:
        """Refuse what an agent has no use for: it brings its own tools."""
        if self.agent is None:
            if self.agent_host != ScriptArguments.agent_host:
                raise ConfigError(
                    "--agent_host is the address that an agent connects to, but there is no agent; give --agent too"
                )
            return
        if not self.agent.strip():
            raise ConfigError("--agent is given without a value; give FILE.py or a command line, or leave the flag out")
        for name in TOOL_SOURCES:
            if getattr(self, name):
                raise ConfigError(
                    f"--agent and --{name} exclude each other: an agent plays the episode itself, with its own tools; give one"
                )

    def _check_paths(self) -> None:
        """Refuse a file flag with nothing after it (an unset variable of a shell), and a folder."""
        for name in (*TOOL_SOURCES, "reward_fn"):
            given = getattr(self, name)
            for value in given if isinstance(given, list) else [] if given is None else [given]:
                if not value.strip():
                    raise ConfigError(f"--{name} is given without a value; give one, or leave the flag out")
                path = value.partition(":")[0]
                if name != "tool_functions_module" and Path(path).is_dir():
                    raise ConfigError(f"--{name} {path} is a folder; give the file in it")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(EpisodeOptions, WatchOptions):
    """Fields of a training that a replay reads without a model."""

    output_dir: str = "trainer_output"
    reward_weights: list[float] | None = None


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Read the command line of a training over the YAML file over the defaults."""
    from toolgrpo.commands.main import read  # which imports this module

    return training_arguments(read("train", argv))


def training_arguments(given: Given) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    """Return the arguments of a training, whose output folder can be written to."""
    from toolgrpo.trainer.config import ModelConfig, ToolGRPOConfig

    script, config, model = given.made((ScriptArguments, ToolGRPOConfig, ModelConfig))
    no_endpoint(given)
    reward_is_given(given)
    check_folder(config.output_dir, keep=not script.dry_run)
    return script, config, model


# Looks at several values of a command, each of which is right by itself.


def _script(given: Given) -> ScriptArguments:
    (script,) = given.made((ScriptArguments,))
    return script  # type: ignore[no-any-return]


def reward_is_given(given: Given) -> None:
    """Refuse a training for which nobody chose a reward."""
    script = _script(given)
    if script.reward == ["tool_result"] and script.reward_is_default:
        raise ConfigError(
            "no reward is given, and the reward decides what the model learns: give --reward exact_match (the answer is in "
            "the final response), tool_result (the last tool response is the answer, whatever the model says after it) or another "
            "built-in (docs/how-to/rewards.md), or --reward_fn my_reward.py"
        )


def rewards(given: Given) -> None:
    """Refuse rewards that there are not, and weights that do not fit them."""
    script = _script(given)
    function, files = script.reward_function_name, script.reward_fn or []
    names = list(script.reward or ())
    for name in names:
        if _is_ours(name):
            get_reward(name)
    several = len(files) > 1
    names += [
        f"{Path(one).stem}.{function or 'reward_func'}" if several else function or "reward_func" for one in files
    ]
    check_weights(given.values.get("reward_weights"), names)


def _is_ours(reward: str) -> bool:
    """Return whether looking a reward up imports nothing of TRL or another package."""
    return reward not in IMPORTED and "." not in reward


def rows(given: Given) -> None:
    """Read the rows to train on."""
    script = _script(given)
    _read_rows(given, str(script.dataset_id_or_path), script.dataset_split, script.max_rows or _ROWS)


def heldout_rows(given: Given, default: int = 0) -> None:
    """Read the rows to measure on, where they are other rows."""
    script = _script(given)
    n = script.eval_questions or default
    if n and not script.eval_share:
        _read_rows(given, *script.heldout_source(), n)


def questions(given: Given) -> None:
    """Read the rows of an evaluation."""
    if given.values.get("eval_share"):
        rows(given)
    heldout_rows(given, DEFAULT_QUESTIONS)


def _read_rows(given: Given, spec: str, split: str, limit: int) -> None:
    """Read rows as they are read later, and see whether built-in rewards get their columns."""
    from toolgrpo.data.load import hub_place, is_mixture, parts_of, task_rows  # not for help and a wrong flag

    on_bad_row: Callable[[DataError], None] = (
        (lambda error: None) if given.values.get("skip_bad_rows") else raise_bad_row
    )
    for part, part_split in parts_of(spec, split):
        if part.startswith("reasoning_gym:") or hub_place(part, part_split) is not None:
            continue
        rows = task_rows(part, split=part_split, limit=min(limit, _ROWS), on_bad_row=on_bad_row)
        columns, n = set[str](), 0
        for row in rows:
            columns |= row.keys()
            n += 1
        if not n:
            raise DataError(f"{part} [{part_split}] has no rows that can be used")
        if n < _ROWS and not is_mixture(spec):  # else others may have more columns
            for name in filter(_is_ours, given.values.get("reward") or ()):
                if name != "by_task":
                    get_reward(name).check_columns(columns)


def conversations(given: Given) -> None:
    """Read the conversations of a supervised training."""
    from toolgrpo.commands.show import recording_in
    from toolgrpo.data.load import hub_place, is_mixture
    from toolgrpo.sft.encoder import read_conversations

    known = given.known()
    if known["from_run"]:
        recording_in(Path(known["from_run"]))
        return
    spec, split = str(known["dataset_id_or_path"]), known["dataset_split"]
    if not is_mixture(spec) and hub_place(spec, split) is None:
        read_conversations(spec, split, _ROWS)


def port(given: Given) -> None:
    """Listen on the port for a moment."""
    from toolgrpo.gateway.server import listening

    known = given.known()
    listening(known["host"], known["port"]).close()


def batch(given: Given) -> None:
    """Refuse a batch that groups do not fill, where it follows from the sizes of passes alone."""
    if given.launches:
        return  # the processes know how many they are
    known = given.known()
    group, at_once = known["num_generations"], known["per_device_train_batch_size"]
    passes = known["gradient_accumulation_steps"] * int(os.environ.get("WORLD_SIZE", "1"))
    if group < 2:
        raise ConfigError(f"num_generations must be at least 2 (GRPO compares the episodes of a group), got {group}")
    if not (known["generation_batch_size"] or known["steps_per_generation"]) and at_once * passes % group:
        raise ConfigError(batch_of_parts(group, at_once, at_once * passes))


def trackers(given: Given) -> None:
    """Refuse a tracker that Transformers does not know."""
    report_to = given.values.get("report_to")
    for name in report_to if isinstance(report_to, list) else [report_to or "none"]:
        if name not in (*TRACKERS, "all", "none"):
            raise ConfigError(
                f"report_to {name} is not a tracker; there are {', '.join(TRACKERS)}, all and none; the nearest is "
                f"{nearest(str(name), TRACKERS)[0]!r}"
            )


def something_is_measured(given: Given) -> None:
    """Refuse held-out rows of which none is asked for, and evaluations without any."""
    known = given.known()
    strategy = "steps" if known["eval_steps"] else known["eval_strategy"]
    if strategy not in ("no", None) and not (known["eval_questions"] or known["eval_share"]):
        raise ConfigError(
            f"eval_strategy is {strategy}, but no held-out rows are asked for; add --eval_questions N, or --eval_share 0.1"
        )
    for name in ("eval_dataset_id_or_path", "eval_split"):
        if given.values.get(name) and not {"eval_questions", "eval_share"} & given.values.keys():
            raise ConfigError(
                f"--{name} is given, but no --eval_questions N, so nothing would be measured on it; add it, or 0 to "
                f"measure nothing"
            )


def name_at_endpoint(name: str, engine: str | None) -> str | None:
    """Return the name that a chat endpoint is asked for, or None for a model that is loaded here."""
    if name.startswith(_AT_ENDPOINT):
        return name.removeprefix(_AT_ENDPOINT)
    return name if engine == CHAT_API else None


def no_endpoint(given: Given) -> None:
    """Refuse to train, to serve or to talk to a model that gives no tokens."""
    known = given.known()
    if known["engine"] == CHAT_API:
        raise ConfigError(NO_TOKENS)
    if known["base_url"]:
        raise ConfigError(f"base_url {known['base_url']} is used only by `toolgrpo evaluate` and `check`; leave it out")


def endpoint(given: Given) -> None:
    """Refuse an endpoint without an address, an address that nobody asks, and what an endpoint cannot do."""
    known = given.known()
    named = [name for name in ("model_name_or_path", "baseline") if known.get(name)]
    asked = [name for name in named if name_at_endpoint(str(known[name]), known["engine"]) is not None]
    if asked and not known["base_url"]:
        raise ConfigError(
            f"{asked[0]} {known[asked[0]]} is a model behind a chat endpoint, but base_url does not give its address; add "
            f"--base_url https://HOST/v1"
        )
    if known["base_url"] and not asked:
        raise ConfigError(
            f"base_url {known['base_url']} is given, but nothing uses it; add --engine {CHAT_API}, or "
            f"--baseline {_AT_ENDPOINT}NAME to `toolgrpo evaluate`"
        )
    if str(known["model_name_or_path"]).startswith(_AT_ENDPOINT):
        raise ConfigError(
            f"model_name_or_path {known['model_name_or_path']}: write --engine {CHAT_API} and the name alone; the prefix is "
            f"for --baseline"
        )
    for name in ("agent", "context", "estimate", "card") if asked else ():
        if known.get(name):
            raise ConfigError(
                f"{name} needs a model that toolgrpo runs, but {asked[0]} {known[asked[0]]} is behind a chat endpoint; leave "
                f"{name} out"
            )


def recording(given: Given) -> None:
    """Refuse a folder without a recording."""
    from toolgrpo.commands.show import recording_in

    recording_in(Path(given.values["folder"]))


# Looks at the file that one value names.


def _python(value: str) -> None:
    path = value.partition(":")[0]
    if path.endswith(".py") and " " not in value.strip():
        check_python(Path(path))


def _mcp(value: str) -> None:
    if value.endswith(".json"):
        from toolgrpo.tools.mcp.config_file import read_mcp_config  # imports pydantic

        read_mcp_config(value)


def _data(value: str) -> None:
    path = located(value)
    if ":" not in value and path.suffix.lower() in _DATA_FILES and not path.exists():
        raise DataError(no_data_file(Path(value)))


FILES: Mapping[str, Callable[[str], None]] = {
    **dict.fromkeys(("tools_script", "environment", "agent", "reward_fn", "stage_fn"), _python),
    "mcp_config": _mcp,
    "model_name_or_path": check_model,
    "baseline": partial(check_model, flag="baseline"),
    "with_model": partial(check_model, flag="with_model"),
    "dataset_id_or_path": _data,
}

"""The commands, one row each, with the dataclass of each one's own flags.

A new command is its module, with a dataclass and a row here, a test and a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from toolgrpo.commands import arguments as look
from toolgrpo.commands import output_folder
from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.flags import Flag, Source, flags_of_classes, flags_of_source
from toolgrpo.commands.given import Given
from toolgrpo.errors import ConfigError
from toolgrpo.options import (
    CHAT_ADDRESS,
    THEMES,
    DrawingOptions,
    LearningOptions,
    Options,
    OverlapOptions,
    PassOptions,
    at_least,
    call_markers_option,
    max_tokens_per_pass_option,
    option,
    prefix_sharing_option,
)
from toolgrpo.support.storage import AN_EVALUATION, check_output
from toolgrpo.trainer.trl.fields import READ_HERE


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    `run` is MODULE:NAME of a function of `Given`, and of the `Terminal` where there is one; it returns an exit code, or
    yields the lines to print. `purpose` stands in the overview, and with `more` on the page.
    """

    name: str
    purpose: str
    more: str = ""
    run: str
    # values of the words without a flag, as usage shows them
    positional: Mapping[str, str] = field(default_factory=dict)
    asks: str = ""  # said where one of these is missing or wrong
    classes: Sequence[type[Any] | Source] = ()  # whose fields are its flags, later ones over earlier ones
    needs: Sequence[str] = ()  # flags; A/B: one of them
    example: str = "--config recipes/configs/nano.yaml"  # of what it needs
    themes: Sequence[str] = ()  # of its page; "NAME: A B" has the flags of the themes A and B, which may be flags too
    defaults: Mapping[str, str] = field(default_factory=dict)  # its own, of flags that have another or none
    looks: Sequence[Callable[[Given], None]] = ()  # before PyTorch is imported
    trains: bool = True  # else the flags that only a training reads are refused
    reads_run: bool = False  # of the folder that its first word names, where no --config is given
    on_terminal: bool = False  # a `Terminal` is opened before the module is imported
    loads: bool = False  # it says first that PyTorch is loaded; a command without a terminal, on standard error

    @property
    def usage(self) -> str:
        """The words after its name."""
        return " ".join(
            [*self.positional.values(), *(["[--config FILE.yaml] [--flag value ...]"] if self.classes else [])]
        )


# Fields of TRL and Transformers that commands which train nothing read too.
_READ_WITHOUT_TRAINING = READ_HERE - {
    *("num_generations", "steps_per_generation", "generation_batch_size", "log_completions")
} | {
    *("output_dir", "seed", "bf16", "fp16", "use_cpu", "report_to", "run_name", "disable_tqdm", "full_determinism"),
    *("ddp_backend", "ddp_timeout", "local_rank", "log_level", "log_level_replica"),
}

_SOME_TEXT: dict[str, Any] = {
    "allowed": lambda text: text is None or text.strip(),
    "wrong": "--{name} is given without a value; give one, or leave the flag out",
}


def allow_writes_option(theme: str) -> Any:
    """Return the field that lets tools be called which may write."""
    text = "Call tools that an MCP server does not mark readOnlyHint with drawn arguments, too."
    return option(False, text, theme=theme)


TASKS = ("my_task", "shop")  # of `init`, the first where none is named


@dataclass(frozen=True, kw_only=True)
class InitArguments(Options, theme="written"):
    """Arguments of `init`."""

    task: str = option(TASKS[0], f"Task to begin with: {' or '.join(TASKS)}.")
    folder: str | None = option(None, "Folder to write; default: the task's name.")
    skills: bool = option(False, "Write the skills for coding agents instead, into FOLDER or skills/.")
    tools_script: str | None = option(
        None, "Write rows drawn from the tools of this Python file, which are run, into FOLDER.", theme="rows"
    )
    environment: str | None = option(None, "The same, from the methods of FILE.py:Class.", theme="rows")
    mcp_config: str | None = option(None, "The same, from the MCP servers of an mcp.json.", theme="rows")
    rows: int = option(200, "Number of rows to draw, a fifth of them held out.", theme="rows", **at_least(10))
    hold_out: str | None = option(None, "Tool whose rows are all held out, or several: a,b.", theme="rows")
    allow_writes: bool = allow_writes_option("rows")
    writer: str | None = option(
        None,
        "Address of an OpenAI-compatible endpoint, up to /v1, that words the questions.",
        theme="rows",
        **CHAT_ADDRESS,
    )
    writer_model: str | None = option(None, "Model to use at that endpoint.", theme="rows")


@dataclass(frozen=True, kw_only=True)
class CheckArguments(Options, theme="samples"):
    """Arguments of `check`."""

    questions: int = option(8, "Number of rows that the untrained model plays.", **at_least(1))
    samples: int = option(4, "Episodes per row.", **at_least(2))
    step: bool = option(True, "Do one training step too (its weights are not kept).")
    estimate: bool = option(False, "Estimate the memory from the model's config, and load no weights.")
    card: str | None = option(None, "GPU memory to estimate for, such as 24GB or 22.5GiB; default: this machine's.")
    json: bool = option(False, "Print the result as JSON instead of lines.")
    allow_writes: bool = allow_writes_option("tools")


@dataclass
class EvaluationArguments(Options, theme="measurement"):
    """Arguments of `evaluate`."""

    baseline: str | None = option(
        None,
        "Second model to measure on the same questions, such as the one before training; chat_api:NAME is behind --base_url.",
        **_SOME_TEXT,
    )
    fail_if: str | None = option(
        None,
        "With a baseline: exit with 1 if the model is worse, by the interval of the difference.",
        choices=("worse",),
    )
    samples: int = option(8, "Episodes per question.", **at_least(1))
    ks: list[int] | None = option(None, "Values of k for pass@k and maj@k; default: 1 and the number of samples.")
    report: str | None = option(None, "JSON file to write; default: OUTPUT_DIR/evaluation.json.", **_SOME_TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ks = sorted(set(self.ks or (1, self.samples)))
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        if wrong:
            raise ConfigError(f"ks must be between 1 and samples ({self.samples}), got {wrong[0]}; raise --samples")
        if self.fail_if and not self.baseline:
            raise ConfigError(
                f"fail_if {self.fail_if} compares with a baseline, and none is given; add --baseline MODEL"
            )
        if self.report is not None:
            check_output(Path(self.report), "the report", "--report", AN_EVALUATION)


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(Options, theme="replayed"):
    """Arguments of `replay`."""

    folder: str = option("", "Output folder of the run.")
    episode: int = option(-1, "Number of the episode.")
    with_model: str | None = option(None, "Sample the whole episode again with this model: a folder, hub id or name.")
    all: bool = option(False, "Apply the rewards to every recorded episode, as a table (instead of EPISODE).")
    run_its_files: bool = option(
        False, "Run Python files in the recording's folder, which the author of the recording wrote."
    )


@dataclass(frozen=True, kw_only=True)
class ShowArguments(Options, theme="shown"):
    """Arguments of `show`."""

    folder: str = option("", "Output folder of the run.")
    episode: int | None = option(None, "Number of one episode.")
    step: int | None = option(
        None, "Step to show, from 1; default: the last, or every step with --cause or --successes."
    )
    worst: int | None = option(
        None, "Show the N episodes of the step with the least reward (5).", bare=5, **at_least(1)
    )
    best: int | None = option(None, "Show the N episodes of the step with the most reward (5).", bare=5, **at_least(1))
    cause: str | None = option(None, "Show episodes with this end or error, e.g. timeout, length, invalid_json.")
    successes: bool = option(False, "Show episodes that succeeded.")
    as_examples: str | None = option(None, "File (.jsonl) to write the successes of any step to, for `toolgrpo sft`.")
    tokens: bool = option(False, "Show tokens, coloured by their probability.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worst and self.best:
            raise ConfigError("--worst and --best exclude each other; give one")
        if self.as_examples and not self.successes:
            raise ConfigError("--as_examples writes what a model will imitate; give --successes with it")


@dataclass(frozen=True, kw_only=True)
class ReportArguments(Options, theme="page"):
    """Arguments of `report`."""

    folder: str = option("", "Output folder of the run.")
    other: str | None = option(None, "Output folder of a second run, to compare the two.")
    out: str | None = option(None, "HTML file to write; default: OUTPUT_DIR/report.html.")
    most_episodes: int | None = option(
        None, "Maximum episodes shown, evenly spread over the steps of a longer run; default: 12000.", **at_least(1)
    )
    live: bool = option(False, "Serve the page to this machine only, and follow the run.")
    port: int = option(0, "Port to serve it on, with --live; 0: a free one.")


@dataclass(frozen=True, kw_only=True)
class ExportArguments(Options, theme="forms"):
    """Arguments of `export`."""

    folder: str = option("", "Output folder of a training.")
    merge: str | None = option(None, "Folder to write the whole weights of a LoRA adapter to.")
    dtype: str = option(
        "auto",
        "Type of the merged weights; auto: the base model's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    gguf: str | None = option(
        None, "Write a GGUF file of this type, with llama.cpp's converter.", choices=("f32", "f16", "bf16", "q8_0")
    )


@dataclass(frozen=True, kw_only=True)
class GatewayArguments(Options, theme="where"):
    """Arguments of `gateway`."""

    port: int = option(
        8000,
        "Port to listen on; 0: a free one.",
        allowed=lambda port: 0 <= port < 65536,
        wrong="--{name} must be between 0 and 65535, got {value}",
    )
    host: str = option("127.0.0.1", "Interface to listen on; change it to admit other machines.")
    api_key: str | None = option(
        None,
        "Key that clients must send; default: any key is accepted.",
        allowed=lambda key: key is None or (key.isascii() and key.isprintable() and key.strip() == key != ""),
        wrong="--{name} must be printable ASCII text without spaces at its ends, got {value!r}; leave it out to answer everyone",
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments(Options, theme="shown"):
    """Arguments of `data`."""

    show: int = option(3, "Number of rows to show.")
    model_name_or_path: str | None = option(
        None, "Model whose prompts are shown as it reads them: a folder, hub id or name."
    )


@dataclass(frozen=True, kw_only=True)
class SFTArguments(Options, theme="data"):
    """Arguments of `sft`."""

    dataset_id_or_path: str | None = option(None, "Conversations: a file, a folder or a hub id.")
    from_run: str | None = option(
        None, "Output folder of a run; its different successful episodes are the conversations.", **_SOME_TEXT
    )
    dataset_split: str = option("train", "Split to train on.")
    tools_script: str | None = option(None, "Python file with the tools of conversations that name none.")
    environment: str | None = option(None, "FILE.py:Class with further tools.")
    mcp_config: str | None = option(None, "Path of an mcp.json that names MCP servers with further tools.")
    system_prompt: str | None = option(None, "System message of conversations that have none.")
    batch_size: int | None = option(
        None,
        "Conversations per optimizer step in all processes; sets gradient_accumulation_steps.",
        theme="training",
        **at_least(1),
    )
    micro_batch_size: int | None = option(
        None, "Another name for per_device_train_batch_size.", theme="training", **at_least(1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_run and self.dataset_id_or_path:
            raise ConfigError("from_run and dataset_id_or_path both name conversations; give one of them")


@dataclass(frozen=True, kw_only=True)
class SFTOptions(Options, theme="training"):
    """The fields that `ToolSFTConfig` has instead of TRL's."""

    max_length: int | None = option(
        None,
        "Maximum tokens of a conversation; default: the model's context window. A longer one is an error.",
        theme="data",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: by the model's size, from 3e-3 for nano to 2e-5 from 1B on.",
        allowed=lambda rate: rate is None or rate > 0,
        wrong="{name} must be positive, got {value}",
    )
    logging_steps: float = option(1, "Steps between two log entries.", theme="watching")
    call_markers: str = call_markers_option()
    prefix_sharing: str = prefix_sharing_option()
    max_tokens_per_pass: int | None = max_tokens_per_pass_option()


_TRAINING = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
)
_MODEL = ("trl", "trainer/model_config.py", "ModelConfig")
_GRPO = (*_TRAINING, ("trl", "trainer/grpo_config.py", "GRPOConfig"), _MODEL)
_SFT = (*_TRAINING, ("trl", "trainer/sft_config.py", "SFTConfig"), _MODEL)
_OF_TRAINING = (LearningOptions, DrawingOptions, OverlapOptions, PassOptions)
_OUTPUT = {"output_dir": "trainer_output"}  # Transformers' own

COMMANDS: Mapping[str, Command] = {
    one.name: one
    for one in (
        Command(
            name="init",
            purpose="write a task to begin with, or rows drawn from your tools",
            run="init:init",
            positional={"task": f"[{'|'.join(TASKS)}]", "folder": "[FOLDER]"},
            asks=f"name a task and a folder: toolgrpo init [{'|'.join(TASKS)}] [FOLDER]",
            classes=(InitArguments,),
            themes=("written", "rows"),
        ),
        Command(
            name="train",
            purpose="teach a model to use tools by reinforcement learning",
            run="train:run_train",
            loads=True,
            classes=(*_GRPO, ScriptArguments, *THEMES),
            needs=("model_name_or_path", "dataset_id_or_path"),
            themes=(
                *("model: model lora", "tools", "rewards", "data", "evaluation", "episode: episode sampling", "engine"),
                *("training", "drawing", "credit", "correction", "overlap", "saving", "watching"),
            ),
            defaults=_OUTPUT,
            looks=(
                *(look.no_endpoint, look.reward_is_given, look.rewards, look.rows, look.heldout_rows, look.batch),
                *(look.trackers, look.something_is_measured, output_folder.checkpoint, output_folder.contents),
            ),
            on_terminal=True,
        ),
        Command(
            name="check",
            purpose="check everything a training needs, play some episodes, do one step",
            more="Nothing is kept.",
            run="check:run_check",
            loads=True,
            classes=(*_GRPO, CheckArguments, ScriptArguments, *THEMES),
            needs=("model_name_or_path", "dataset_id_or_path"),
            themes=(
                *("samples", "model: model lora", "tools", "rewards", "data", "episode: episode sampling", "engine"),
                "training",
            ),
            looks=(look.endpoint, look.rewards, look.rows, look.batch, look.trackers),
            on_terminal=True,
        ),
        Command(
            name="evaluate",
            purpose="measure a model, or two side by side, on held-out questions",
            run="evaluate:run_evaluate",
            loads=True,
            classes=(*_GRPO, EvaluationArguments, ScriptArguments, *THEMES),
            needs=("model_name_or_path", "dataset_id_or_path/eval_dataset_id_or_path"),
            themes=(
                "measurement: measurement eval_questions eval_share eval_dataset_id_or_path eval_split",
                *("model", "tools", "rewards", "data", "episode: episode sampling", "engine"),
                "saving: saving record_episodes dry_run seed",
            ),
            defaults=_OUTPUT | {"eval_questions": str(look.DEFAULT_QUESTIONS)},
            looks=(look.endpoint, look.rewards, look.questions, look.trackers, output_folder.contents),
            trains=False,
            on_terminal=True,
        ),
        Command(
            name="replay",
            purpose="repeat the calls and rewards of an episode, or the whole episode",
            more="Tools, rewards and limits are those of OUTPUT_DIR/run.yaml.",
            run="replay:run_replay",
            positional={"folder": "OUTPUT_DIR", "episode": "EPISODE"},
            asks="give the run's output folder and the number of an episode: toolgrpo replay DIR EPISODE (or --all)",
            classes=(*_GRPO, ReplayArguments, ScriptArguments, *THEMES),
            needs=("folder", "episode/all"),
            themes=("replayed", "tools", "rewards", "episode: episode sampling", "engine"),
            looks=(look.recording,),
            on_terminal=True,
        ),
        Command(
            name="show",
            purpose="show the episodes that a run recorded",
            run="show:show",
            positional={"folder": "OUTPUT_DIR", "episode": "[EPISODE]"},
            asks="give the run's output folder, and an episode's number to show only that one: toolgrpo show DIR [EPISODE]",
            classes=(ShowArguments,),
            needs=("folder",),
            themes=("shown",),
        ),
        Command(
            name="chat",
            purpose="talk to a model in the terminal, with its tools",
            more="A folder that a training wrote provides the tools and the system message of its run.",
            run="chat:run_chat",
            loads=True,
            positional={"model_name_or_path": "MODEL"},
            classes=(*_GRPO, ScriptArguments, *THEMES),
            needs=("model_name_or_path",),
            example="toolgrpo chat nano",
            themes=("tools: tools system_prompt", "answers: sampling max_turn_tokens", "model", "engine"),
            looks=(look.no_endpoint,),
            trains=False,
            reads_run=True,
            on_terminal=True,
        ),
        Command(
            name="data",
            purpose="show rows as the model and the reward will see them",
            more="FILE may be a hub id or a named task set too.",
            run="look:data_lines",
            positional={"dataset_id_or_path": "FILE"},
            asks="name the rows: toolgrpo data FILE --show 3 (a file, a hub id, or a task set such as arithmetic)",
            classes=(DataArguments, ScriptArguments),
            needs=("dataset_id_or_path",),
            themes=(
                "shown: shown dataset_split max_rows system_prompt",
                "tools: tools_script tool_functions_module environment mcp_config",
            ),
            looks=(look.rows,),
        ),
        Command(
            name="export",
            purpose="merge a LoRA adapter, write a GGUF file and a Modelfile for Ollama",
            run="export:export_lines",
            positional={"folder": "OUTPUT_DIR"},
            asks="give the output folder of a training: toolgrpo export OUTPUT_DIR",
            classes=(ExportArguments,),
            needs=("folder",),
            themes=("forms",),
        ),
        Command(
            name="env",
            purpose="print the facts about this machine that a bug report needs",
            run="look:environment_lines",
            asks="toolgrpo env takes no arguments",
        ),
        Command(
            name="gateway",
            purpose="serve a model over OpenAI's API, as agents see it in a training",
            run="gateway:run_gateway",
            loads=True,
            classes=(*_GRPO, GatewayArguments, *THEMES),
            needs=("model_name_or_path",),
            example="toolgrpo gateway --model nano",
            themes=("where", "model", "answers: sampling", "engine"),
            looks=(look.no_endpoint, look.port),
            trains=False,
            on_terminal=True,
        ),
        Command(
            name="sft",
            purpose="teach a model the form of tool calls from example conversations",
            run="sft:run",
            loads=True,
            classes=(*_SFT, SFTArguments, SFTOptions),
            needs=("model_name_or_path", "dataset_id_or_path/from_run", "output_dir"),
            example="--config recipes/configs/sft/qwen3_1.7b.yaml",
            themes=(
                "data: model_name_or_path data call_markers output_dir",
                "training: training bf16",
                "model: model lora",
                "saving",
                "watching",
            ),
            looks=(look.conversations, look.trackers, output_folder.checkpoint, output_folder.contents),
        ),
        Command(
            name="report",
            purpose="show what a run did, as one HTML file",
            more="The file needs no network and no server.",
            run="look:report",
            positional={"folder": "OUTPUT_DIR", "other": "[OTHER_DIR]"},
            asks="give the output folder of a run, or of two to compare: toolgrpo report OUTPUT_DIR [OTHER_DIR]",
            classes=(ReportArguments,),
            needs=("folder",),
            themes=("page",),
        ),
        Command(
            name="completion",
            purpose="print the shell completion of commands and flags",
            run="main:print_completion",
            positional={"shell": "bash|zsh|fish"},
            asks=(
                'give bash, zsh or fish: eval "$(toolgrpo completion bash)" in ~/.bashrc, or zsh in ~/.zshrc; '
                "toolgrpo completion fish | source, in ~/.config/fish/config.fish"
            ),
            needs=("shell",),
        ),
    )
}


@cache
def flags_of(command: str) -> dict[str, Flag]:
    """Return every flag that a command takes; later dataclasses stand over earlier ones."""
    row, found = COMMANDS[command], dict[str, Flag]()
    for one in row.classes:
        flags = (
            {flag.name: flag for flag in flags_of_source(*one)} if isinstance(one, tuple) else flags_of_classes((one,))
        )
        of_training = not row.trains and (one in _OF_TRAINING or (isinstance(one, tuple) and one != _MODEL))
        if of_training:
            flags = {
                name: replace(flag, of_training=name not in _READ_WITHOUT_TRAINING) for name, flag in flags.items()
            }
        found = {name: flag for name, flag in found.items() if name not in flags} | flags
    return found

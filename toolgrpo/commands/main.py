"""Run `toolgrpo COMMAND ...`: the commands by name, each imported when it is asked for.

The first line of a command stands on the terminal before PyTorch is imported, which takes seconds.
`accelerate launch -m toolgrpo COMMAND ...` starts the same in several processes.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from toolgrpo.commands.early import early_errors
from toolgrpo.commands.help_page import PAGES, asked_for, completion, help_text
from toolgrpo.commands.terminal import LOADING, Terminal, plain_warnings
from toolgrpo.errors import ConfigError, ToolGRPOError, UserError
from toolgrpo.named_files import LAUNCH_FILES, located, nearest_is, shipped_names, shipped_root
from toolgrpo.plain_text import plain
from toolgrpo.settings_files import BadSettings, read_yaml
from toolgrpo.startup import prepare
from toolgrpo.storage import check_output_folder

_TASKS = ("my_task", "shop")  # the first is what `init` alone copies
_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
LAUNCHER_FLAGS = {"accelerate_config": str, "main_process_ip": str} | dict.fromkeys(_NUMBERS, int)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it is for, and MODULE:NAME of the function that gets the words after its name.

    The function returns an exit code, or yields the lines to print.
    """

    purpose: str
    function: str
    on_terminal: bool = False  # the function gets the `Terminal` too, which is opened before it is imported
    loads: bool = True  # that terminal first says that PyTorch is loaded
    usage: str | None = None  # the words after its name, of a command that has no page and no parser of its own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return its exit code.

    That is 2 where what the user gave is wrong (a `UserError`), 1 for another failure, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # `help COMMAND THEME` is `COMMAND --help THEME`
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        from toolgrpo import __version__

        print(f"toolgrpo {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"toolgrpo: there is no command {name!r}{nearest_is(name, COMMANDS)}.\n\n{_overview()}",
            file=sys.stderr,
        )
        return 2
    theme = asked_for(arguments[1:])
    if theme is not None and (name in PAGES or COMMANDS[name].usage is not None):
        return _show_help(name, theme)
    try:
        launch, words = launched(arguments[1:])
    except ConfigError as error:
        print(f"toolgrpo: {error}", file=sys.stderr)
        return 2
    if name in PAGES and not _can_be_right(name, words):
        return 2
    if launch:
        os.execv(sys.executable, [*launch, "-m", "toolgrpo", name, *words])
    prepare(words)  # before anything imports PyTorch
    return _run(name, words)


def launched(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return how `accelerate` starts a command, empty if nobody asks for that, and the command's other words.

    `--accelerate_config` takes a file or the name of a shipped one, as TRL's commands do; flags of the launcher go
    over what it says.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS)
    for name, kind in LAUNCHER_FLAGS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind)
    try:
        namespace, rest = parser.parse_known_args(words)
    except ArgumentError as error:
        raise ConfigError(str(error)) from error
    given = vars(namespace)
    if not given:
        return [], list(words)
    default = "multi_gpu" if Path("/proc/driver/nvidia").exists() else "cpu_ddp"
    path = located(given.pop("accelerate_config", default), LAUNCH_FILES)
    if not path.is_file():
        names = ", ".join(shipped_names(LAUNCH_FILES))
        raise ConfigError(f"--accelerate_config {path}: there is no such file; give a YAML file or one of {names}")
    try:
        read_yaml(path)
    except (OSError, BadSettings) as error:
        raise ConfigError(f"--accelerate_config {path} {error}") from error
    over = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(path), *over], rest


def init(words: list[str]) -> int:
    """Copy a task to begin with into a new folder."""
    from toolgrpo.observe.doctor import page_here

    name = words[0] if words else _TASKS[0]
    folder = Path(words[1] if len(words) == 2 else name)
    if len(words) > 2 or name.startswith("-"):
        raise ConfigError(f"say which task, and into which folder: toolgrpo init [{'|'.join(_TASKS)}] [FOLDER]")
    if name not in _TASKS:
        raise ConfigError(f"there is no task {name!r}{nearest_is(name, _TASKS)}; there is {', '.join(_TASKS)}")
    check_output_folder(folder, "the task", f"toolgrpo init {name} FOLDER")
    shutil.copytree(
        shipped_root() / "recipes" / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    print(f"{folder}/ has {', '.join(sorted(file.name for file in folder.iterdir()))}")
    page = page_here(page="docs/tutorials/half_an_hour.md") if name == "shop" else folder / "README.md"
    print(f"Go on with {page}")
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:<{width}}  {one.purpose}{f': {one.usage}' if one.usage else ''}" for name, one in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: toolgrpo COMMAND [--config FILE.yaml] [flags]",
            "",
            *lines,
            "",
            "`toolgrpo COMMAND --help` shows the first flags and the themes of the others.",
            "`--accelerate_config NAME|FILE --num_processes N` runs a command in several",
            *textwrap.wrap(f"processes; the names are {', '.join(shipped_names(LAUNCH_FILES))}.", 80),
            f"The pages that messages name as docs/... are in {shipped_root() / 'docs'}.",
        ]
    )


def _show_help(command: str, theme: str) -> int:
    try:
        if command in PAGES:
            print(help_text(command, theme), flush=True)
        else:
            purpose, usage = COMMANDS[command].purpose, COMMANDS[command].usage
            print(f"usage: toolgrpo {command} {usage}".rstrip(), purpose, sep="\n\n")
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except ConfigError as error:
        print(f"toolgrpo: {error}", file=sys.stderr)
        return 2
    return 0


def _can_be_right(command: str, arguments: list[str]) -> bool:
    """Return whether flags, keys and values can be what the command takes; say what is wrong, before the imports."""
    errors = early_errors(command, arguments)
    for error in errors:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
    return not errors


def sft(words: list[str]) -> int:
    """Run `toolgrpo sft`, whose first line stands there before the imports."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    if Terminal.is_main_process():
        console.print(LOADING, markup=False, highlight=False)
    from toolgrpo.commands.sft import parse_sft_arguments, run_sft

    return run_sft(*parse_sft_arguments(words), console, words).exit_code


def print_completion(words: list[str]) -> int:
    """Print the script by which a shell completes commands and flags."""
    if words not in (["bash"], ["zsh"], ["fish"]):
        raise ConfigError(
            'give bash, zsh or fish: eval "$(toolgrpo completion bash)" in ~/.bashrc, or zsh in ~/.zshrc; '
            "toolgrpo completion fish | source, in ~/.config/fish/config.fish"
        )
    print(completion(words[0], list(COMMANDS)))
    return 0


def _run(name: str, words: list[str]) -> int:
    """Run a command; where it has no `Terminal`, an error of ours is one paragraph."""
    module, _, function = COMMANDS[name].function.partition(":")
    if COMMANDS[name].on_terminal:
        terminal = Terminal.of_command(name, quiet="--json" in words, loads=COMMANDS[name].loads)
        try:
            return int(getattr(import_module(f"toolgrpo.commands.{module}"), function)(words, terminal))
        except UserError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # the terminal's, which also logs it
            return 2
    plain_warnings()
    try:
        done = getattr(import_module(f"toolgrpo.commands.{module}"), function)(words)
        if isinstance(done, int):
            return done
        for line in done:
            print(line, flush=True)
    except ToolGRPOError as error:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


COMMANDS: Mapping[str, Command] = {
    "init": Command("write a task to begin with into a folder", "main:init", usage=f"[{'|'.join(_TASKS)}] [FOLDER]"),
    "train": Command("teach a model to use tools by reinforcement learning", "train:run_train", on_terminal=True),
    "check": Command(
        "look at all that a training needs, draw some episodes, do one step", "check:run_check", on_terminal=True
    ),
    "evaluate": Command(
        "measure a model, or two side by side, on held-out questions", "evaluate:run_evaluate", on_terminal=True
    ),
    "replay": Command(
        "do the calls and rewards of a recorded episode again, or all of it",
        "replay:run_replay",
        on_terminal=True,
        loads=False,
    ),
    "show": Command("look at the episodes that a run recorded", "show:show"),
    "chat": Command("talk to a model in the terminal, with its tools", "chat:run_chat", on_terminal=True),
    "data": Command("show rows as the model and the reward will see them", "look:data_lines"),
    "export": Command("merge a LoRA adapter, write a GGUF file and a Modelfile for Ollama", "export:export_lines"),
    "env": Command("print what a bug report needs to know of this machine", "look:environment_lines", usage=""),
    "gateway": Command(
        "serve a model over OpenAI's API, as agents see it in a training", "gateway:run_gateway", on_terminal=True
    ),
    "sft": Command("teach a model the form of tool calls from example conversations", "main:sft"),
    "report": Command("show what a run did, as one HTML file", "report:run_report"),
    "completion": Command(
        "print what completes commands and flags in a shell", "main:print_completion", usage="bash|zsh|fish"
    ),
}

"""Run `toolgrpo COMMAND ...`: its words and its file are read once, then its module is imported.

Whatever is wrong with them is reported before PyTorch is imported, all at once, and the first line of a command stands on
the terminal before that, for it takes seconds. `accelerate launch -m toolgrpo COMMAND ...` starts the same in several
processes.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any

from toolgrpo.commands import arguments as look
from toolgrpo.commands.flags import Flag
from toolgrpo.commands.given import Given, read_given, split_words
from toolgrpo.commands.help_page import asked_for, completion, help_text
from toolgrpo.commands.other_names import LAUNCHER_FLAGS
from toolgrpo.commands.run_file import LAUNCHED_WITH, at_home, run_file
from toolgrpo.commands.table import COMMANDS, Command, flags_of
from toolgrpo.commands.terminal import LOADING, Terminal, plain_warnings
from toolgrpo.errors import ConfigError, ToolGRPOError, UserError
from toolgrpo.support.plain_text import plain
from toolgrpo.support.process_setup import prepare
from toolgrpo.support.settings_files import BadSettings, read_yaml
from toolgrpo.support.shipped_files import LAUNCH_FILES, located, nearest_is, shipped_names, shipped_root
from toolgrpo.support.storage import storage_errors
from toolgrpo.trainer.trl.fields import without_effect

_MOST_ITERATIONS = 8
_IN_SEVERAL = ("train", "sft", "evaluate")  # processes, where a file says so and no launcher started this one


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return its exit code.

    That is 2 where what the user gave is wrong (a `UserError`), 1 for another failure, 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may be ASCII, and a file's name no text
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
        print(f"toolgrpo: there is no command {name!r}{nearest_is(name, COMMANDS)}.\n\n{_overview()}", file=sys.stderr)
        return 2
    theme = asked_for(arguments[1:])
    try:
        if theme is not None:
            print(help_text(name, theme), flush=True)
            return 0
        launch, words = launched(arguments[1:])
    except ConfigError as error:
        print(f"toolgrpo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return _nobody_reads()
    try:
        given = read(name, words)
        alone = {"RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
        in_file = bool(given.launcher) and name in _IN_SEVERAL and not alone
        errors = mistakes(replace(given, launches=in_file or bool(launch)))
        if launch and name not in _IN_SEVERAL:
            flags = "--accelerate_config, --num_processes and other flags of the launcher"
            errors.append(ConfigError(f"toolgrpo {name} runs in one process; leave out {flags}"))
        if in_file:
            launch, words = launched(arguments[1:], given.launcher)
    except ToolGRPOError as unreadable:  # its file
        errors = [unreadable]
    for one in errors:
        print(plain(f"{type(one).__name__}: {one}"), file=sys.stderr)
    if errors:
        return 2
    if launch:
        # what was typed of the launcher, for the line that goes on with the run
        os.environ[LAUNCHED_WITH] = shlex.join(["--accelerate_config", *launch[launch.index("--config_file") + 1 :]])
        os.execv(sys.executable, [*launch, "-m", "toolgrpo", name, *words])
    prepare(words)  # before anything imports PyTorch
    return _run(COMMANDS[name], given)


def launched(words: Sequence[str], in_file: Mapping[str, Any] = MappingProxyType({})) -> tuple[list[str], list[str]]:
    """Return how `accelerate` starts a command, empty if nobody asks for that, and the command's other words.

    `--accelerate_config` takes a file or the name of a shipped one, as TRL's commands do; flags of the launcher go
    over what it says, and over what the command's own file says of it.
    """
    found, rest = split_words(words, dict.fromkeys(LAUNCHER_FLAGS, 1))
    given: dict[str, Any] = {}
    for name, behind in [*((name, [str(value)]) for name, value in in_file.items()), *found]:
        try:
            if not behind:
                raise ValueError("needs a value after it")
            given[name] = Flag(name, LAUNCHER_FLAGS[name]).from_text(behind[0])
        except ValueError as error:
            raise ConfigError(f"--{name} {error}") from error
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


def read(name: str, argv: Sequence[str]) -> Given:
    """Read the words of a command, and its file; raise ConfigError for a file that cannot be read."""
    command = COMMANDS[name]
    given = at_home(read_given(flags_of(name), argv, command.positional, command.asks))
    if command.reads_run and given.file is None:
        folder = given.values.get(next(iter(command.positional)))
        if folder is not None and (file := run_file(Path(folder))) is not None:
            given = at_home(given.over(file))
    return replace(given, command=name, complaints=list(dict.fromkeys([*given.complaints, *_missing(command, given)])))


def _missing(command: Command, given: Given) -> list[str]:
    """Return what is said of values that are needed, or that make no sense by themselves."""
    has = {name for name, value in given.values.items() if value is not False and value not in (None, "", [])}
    said = []
    for names in (need.split("/") for need in command.needs):
        asks = command.asks if names[0] in command.positional else ""
        if has.isdisjoint(names):
            said.append(asks or f"--{names[0]} is missing; for a first look: {command.example}")
    lora = sorted(name for name in given.values if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    if lora and "use_peft" not in given.values:
        said.append(f"{lora[0]} is given, but not use_peft, so all weights would be trained; add --use_peft")
    if "vllm_mode" in given.flags:  # those of ToolGRPOConfig, which refuses them too, but after seconds
        defaults = {name: flag.default for name, flag in given.flags.items()}
        said += without_effect({**defaults, **given.values}, defaults)
    if given.values.get("model_init_kwargs"):
        said.append(
            "model_init_kwargs is read in Python alone; write dtype, attn_implementation and model_revision here"
        )
    iterations = given.values.get("num_iterations")
    if isinstance(iterations, int) and iterations > _MOST_ITERATIONS:
        few = f"at most {_MOST_ITERATIONS} here, more in a Python script"
        said.append(
            f"num_iterations {iterations} are passes over each batch ({few}); write max_steps {iterations} for steps"
        )
    return said


def mistakes(given: Given) -> list[ToolGRPOError]:
    """Return an error for each unknown name, each wrong value and each file that is not there."""
    command = COMMANDS[given.command]
    errors: list[ToolGRPOError] = [ConfigError(one) for one in given.complaints]
    if given.values.get("json"):
        return errors  # a check answers in its report, of files too
    for name, look_at in look.FILES.items():
        value = given.values.get(name)
        of_training = name in given.flags and given.flags[name].of_training  # passed over in a training's file
        if of_training or (name == "dataset_id_or_path" and look.rows not in command.looks):
            continue
        if name in ("reward_fn", "agent") and given.command == "chat":  # nothing is scored, and a person asks
            continue
        elsewhere = name in ("model_name_or_path", "baseline") and look.endpoint in command.looks
        for one in value if isinstance(value, list) else [value]:
            if elsewhere and look.name_at_endpoint(str(one), given.values.get("engine")) is not None:
                continue
            if isinstance(one, str) and one.strip():
                errors += _raised(look_at, one, given.places.get(name))
    if not errors:
        for kind in (one for one in command.classes if isinstance(one, type)):
            errors += _raised(given.made, (kind,))
    if not errors:
        errors = [error for look_at in command.looks for error in _raised(look_at, given)]
    return [given.placed(error) for error in errors]


def _raised(look_at: Callable[..., Any], given: Any, place: str | None = None) -> list[ToolGRPOError]:
    try:
        look_at(given)
    except ToolGRPOError as error:
        return [error if place is None else type(error)(f"{place}: {error}")]
    return []


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:<{width}}  {one.purpose}{f': {one.usage}' if one.usage and not one.classes else ''}"
        for name, one in COMMANDS.items()
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


def print_completion(given: Given) -> int:
    """Print the script by which a shell completes commands and flags."""
    shell = given.values["shell"]
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(COMMANDS["completion"].asks)
    print(completion(shell, list(COMMANDS)))
    return 0


def _run(command: Command, given: Given) -> int:
    """Run a command; where it has no `Terminal`, an error of ours is one paragraph."""
    module, _, function = command.run.partition(":")

    def run(*arguments: Any) -> Any:
        return getattr(import_module(f"toolgrpo.commands.{module}"), function)(given, *arguments)

    if command.on_terminal:
        terminal = Terminal.of_command(command.name, quiet=bool(given.values.get("json")), loads=command.loads)
        for number, line in enumerate(given.said if command.trains else ()):
            terminal.say(f"{'' if number else 'read':<9} {line}")
        try:
            return int(run(terminal))
        except UserError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # the terminal's, which also logs it
            return 2
        except KeyboardInterrupt as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return 130
    plain_warnings()
    try:
        if command.loads and Terminal.is_main_process():
            print(LOADING, file=sys.stderr, flush=True)
        done = run()
        if isinstance(done, int):
            return done
        for line in done:
            with storage_errors("what the command prints", Path()):
                print(line, flush=True)
    except ToolGRPOError as error:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _nobody_reads()
    return 0


def _nobody_reads() -> int:
    """Print nothing more: `| head` has read enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0

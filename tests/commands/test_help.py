"""`toolgrpo COMMAND --help`: at once, by theme, and true."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.commands.flags import flags_of_classes, is_known
from toolgrpo.commands.given import read_given
from toolgrpo.commands.help_page import completion, help_text
from toolgrpo.commands.main import main, mistakes, read
from toolgrpo.commands.table import COMMANDS, flags_of
from toolgrpo.trainer.trl.fields import WITHOUT_EFFECT

WITH_FLAGS = [name for name, command in COMMANDS.items() if command.classes]
WITH_FIELDS_OF_TRL = [name for name in WITH_FLAGS if "output_dir" in flags_of(name)]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  --(\w+)", text, flags=re.MULTILINE))


def classes_of(command: str) -> list[type[Any]]:
    """The dataclasses that the command fills."""
    from trl import ModelConfig

    from toolgrpo.commands import arguments, table
    from toolgrpo.commands.evaluate import EvaluationConfig
    from toolgrpo.commands.sft import ToolSFTConfig
    from toolgrpo.trainer.config import ToolGRPOConfig

    own: dict[str, list[type[Any]]] = {
        "train": [],
        "check": [table.CheckArguments],
        "replay": [table.ReplayArguments],
    }
    own = {name: [*kinds, arguments.ScriptArguments, ToolGRPOConfig, ModelConfig] for name, kinds in own.items()}
    own["evaluate"] = [table.EvaluationArguments, arguments.ScriptArguments, EvaluationConfig, ModelConfig]
    own["chat"] = [arguments.ScriptArguments, EvaluationConfig, ModelConfig]
    own["gateway"] = [table.GatewayArguments, EvaluationConfig, ModelConfig]
    return {**own, "sft": [table.SFTArguments, ToolSFTConfig, ModelConfig]}[command]


@pytest.mark.lock
@pytest.mark.parametrize("command", WITH_FIELDS_OF_TRL)
def test_the_flags_read_from_the_source_are_those_of_the_dataclasses(command: str) -> None:
    early, late = flags_of(command), flags_of_classes(classes_of(command))
    assert early.keys() == late.keys()
    for name, flag in early.items():
        if is_known(flag.type):
            assert flag.type == late[name].type, name
        if flag.default is not None:
            assert flag.default == late[name].default, name
    assert sum(not is_known(flag.type) for flag in early.values()) < 12


def test_help_imports_nothing_heavy_and_names_the_command() -> None:
    """Of all commands in one process: what one of them imports stays."""
    script = (
        "import sys; from toolgrpo.commands.main import main; codes = {main([name, '--help']) for name in sys.argv[1:]};"
        "print(*sys.modules, file=sys.stderr); sys.exit(sum(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *WITH_FLAGS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert usages == [f"usage: toolgrpo {name} {COMMANDS[name].usage}".splitlines()[0] for name in WITH_FLAGS]
    assert {"torch", "trl", "transformers", "datasets", "pydantic"} & set(done.stderr.split()) == set()


@pytest.mark.parametrize("words", ["help", "help env", "env --help", "init -h", "completion --help", "help init"])
def test_help_is_help_wherever_it_is_asked_for(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: toolgrpo ") and said.err == "" and "sandbox " not in said.out


def test_help_of_a_command_may_stand_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "train", "drawing"]) == main(["train", "--help", "drawing"]) == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second
    assert main(["help", "tarin"]) == 2 and "the nearest is 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("command", WITH_FIELDS_OF_TRL)
def test_every_spelling_of_a_flag_is_known(command: str) -> None:
    words = ["--learning-rate", "-1", "--model=x", "--no_gradient_checkpointing", "--run_name", "--a b"]
    said = [one for one in read_given(flags_of(command), [*words, "--", "--anything"]).complaints if "unknown" in one]
    assert said == []


@pytest.mark.parametrize(("command", "allowed"), [("evaluate", "--samples 2"), ("gateway", "--port 1")])
def test_what_trains_nothing_refuses_the_flags_of_a_training_and_takes_its_file(
    command: str, allowed: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1e-5\nstage_fn: recipes/stages/overlong.py\nmax_staleness: 1\n" + "temperature: 0.5\n"
    )
    needed = ["--model", "nano", *(["--dataset_id_or_path", "arithmetic"] if command == "evaluate" else [])]
    words = ["--config", str(file), *needed, *allowed.split(), "--vllm_max_model_length", "512"]
    if command == "evaluate":
        assert mistakes(read(command, words)) == []
    for flag in (
        "stage_fn=mine.py",
        "max_staleness=1",
        "learning_rate=1e-5",
        "num_generations=4",
        "prefix_sharing=off",
    ):
        (said,) = [str(one) for one in mistakes(read(command, [*needed, f"--{flag}"]))]
        assert said.startswith(f"--{flag.partition('=')[0]} is read by a training alone; leave it out here")


@pytest.mark.parametrize("command", WITH_FLAGS)
def test_the_first_page_fits_a_screen_and_names_the_themes(command: str) -> None:
    lines = help_text(command, width=100).splitlines()
    assert len(lines) <= 43 and max(map(len, lines)) <= 100, lines
    assert 1 <= len(flags_in("\n".join(lines))) <= 34
    assert ("--help THEME: one of " in "\n".join(lines[-2:])) == (len(COMMANDS[command].themes) > 1)
    assert all(re.match(r"\w+(:|$)", theme) for theme in COMMANDS[command].themes), "a theme is one word behind --help"
    if command == "train":
        assert len(flags_in("\n".join(lines))) == 25


def test_every_flag_of_ours_stands_in_a_theme_once() -> None:
    from toolgrpo.commands.arguments import ScriptArguments

    known = {field.name for field in dataclasses.fields(ScriptArguments) if field.init}
    text = "\n".join(help_text("train", theme.partition(":")[0], width=100) for theme in COMMANDS["train"].themes)
    lines = re.findall(r"^  --(\w+)", text, flags=re.MULTILINE)
    assert len(lines) == len(set(lines)) and set(lines) >= known
    assert "--num_generations N" in text and "[8]" in text
    assert "[trainer_output]" in text, "what Transformers fills in where nothing is given"


def test_all_flags_are_those_that_the_command_reads() -> None:
    shown = flags_in(help_text("train", "all", width=100))
    assert {"learning_rate", "tools_script", "adam_beta1", "lora_r"} <= shown
    assert flags_in(help_text("train", width=100)) < shown
    assert not shown & set(WITHOUT_EFFECT), "a flag that is refused is no help"


def test_a_switch_with_a_third_value_names_it() -> None:
    assert "--gradient_checkpointing true|false|auto\n" in help_text("train", "training")


def test_one_theme_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "tools"]) == 0
    shown = capsys.readouterr().out
    assert "tools_script" in flags_in(shown) and "learning_rate" not in flags_in(shown)
    assert main(["train", "--help", "tolls"]) == 2
    assert "the nearest is tools" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m toolgrpo train --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == "" and done.stdout.strip() == "0"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("eval", {"evaluate"}),
        ("train --kee", {"--keep"}),
        ("train --keep b", {"best"}),
        ("train --engine vllm_", {"vllm_colocate", "vllm_server"}),
        ("train --tools_script to", set()),
        ("evaluate --basel", {"--baseline"}),
        ("sft --max_turns", set()),
        ("train --loss_type n", set()),
        ("data --sho", {"--show"}),
        ("nonsense --ke", set()),
    ],
)
def test_a_shell_completes_commands_flags_and_their_values(words: str, offered: set[str]) -> None:
    script = completion("bash", ["train", "evaluate"])
    place = len(words.split())
    ask = f"{script}\nCOMP_WORDS=(toolgrpo {words}); COMP_CWORD={place}; _toolgrpo; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered and not done.stderr
    assert completion("zsh", ["train"]).startswith("autoload -U +X bashcompinit")
    fish = completion("fish", ["train"])
    of_train = "complete -c toolgrpo -n '__fish_seen_subcommand_from train' -l"
    for line in (f"{of_train} quiet\n", f"{of_train} tools_script -r\n", f"{of_train} keep -xa '"):
        assert line in fish

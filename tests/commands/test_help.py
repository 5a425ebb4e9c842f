"""`toolgrpo COMMAND --help`: at once, by theme, and true."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo import __version__
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

    from toolgrpo.commands import table
    from toolgrpo.commands.arguments import ScriptArguments
    from toolgrpo.commands.evaluate import EvaluationConfig
    from toolgrpo.commands.sft import ToolSFTConfig
    from toolgrpo.trainer.config import ToolGRPOConfig

    own: dict[str, list[type[Any]]] = {
        "train": [ScriptArguments, ToolGRPOConfig],
        "check": [table.CheckArguments, ScriptArguments, ToolGRPOConfig],
        "replay": [table.ReplayArguments, ScriptArguments, ToolGRPOConfig],
        "evaluate": [table.EvaluationArguments, ScriptArguments, EvaluationConfig],
        "chat": [ScriptArguments, EvaluationConfig],
        "gateway": [table.GatewayArguments, EvaluationConfig],
        "sft": [table.SFTArguments, ToolSFTConfig],
    }
    return [*own[command], ModelConfig]


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
    script = """
import sys
from toolgrpo.commands.main import main
codes = {main([name, "--help"]) for name in sys.argv[1:]}
print(*sys.modules, file=sys.stderr)
sys.exit(sum(codes))
"""
    done = subprocess.run([sys.executable, "-c", script, *WITH_FLAGS], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert usages == [f"usage: toolgrpo {name} {COMMANDS[name].usage}".splitlines()[0] for name in WITH_FLAGS]
    assert {"torch", "trl", "transformers", "datasets", "pydantic"} & set(done.stderr.split()) == set()


def test_the_commands_are_listed_with_their_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert f"  {name}" in shown and command.purpose in shown
        assert max(map(len, shown.splitlines()[:-1])) <= 80, "all but the folder of the pages"
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"toolgrpo {__version__}\n"


def test_help_is_help_wherever_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("help", "help env", "env --help", "init -h", "completion --help", "help init"):
        assert main(words.split()) == 0
        said = capsys.readouterr()
        assert said.out.startswith("usage: toolgrpo ") and said.err == "" and "sandbox " not in said.out, words


def test_every_spelling_of_a_flag_is_known() -> None:
    words = ["--learning-rate", "-1", "--model=x", "--no_gradient_checkpointing", "--run_name", "--a b"]
    said = read_given(flags_of("train"), [*words, "--", "--anything"]).complaints
    assert [one for one in said if "unknown" in one] == []


def test_what_trains_nothing_refuses_the_flags_of_a_training_and_takes_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\nstage_fn: recipes/stages/overlong.py\nmax_staleness: 1\ntemperature: 0.5\n")
    evaluate = ["--model", "nano", "--dataset_id_or_path", "arithmetic"]
    assert mistakes(read("evaluate", ["--config", str(file), *evaluate, "--vllm_max_model_length", "512"])) == []
    trains = ("stage_fn=mine.py", "max_staleness=1", "learning_rate=1e-5", "num_generations=4", "prefix_sharing=off")
    for command, needed in (("evaluate", evaluate), ("gateway", ["--model", "nano"])):
        for flag in trains:
            (said,) = [str(one) for one in mistakes(read(command, [*needed, f"--{flag}"]))]
            assert said.startswith(f"--{flag.partition('=')[0]} is only read in training")


@pytest.mark.parametrize("command", WITH_FLAGS)
def test_the_first_page_fits_a_screen_and_names_the_themes(command: str) -> None:
    lines = help_text(command, width=100).splitlines()
    assert len(lines) <= 43 and max(map(len, lines)) <= 100, lines
    assert 1 <= len(flags_in("\n".join(lines))) <= 34
    assert ("--help THEME: one of " in "\n".join(lines[-2:])) == (len(COMMANDS[command].themes) > 1)
    assert all(re.match(r"\w+(:|$)", theme) for theme in COMMANDS[command].themes), "a theme is one word behind --help"


def test_every_flag_of_ours_stands_in_a_theme_once_and_all_are_those_that_the_command_reads() -> None:
    from toolgrpo.commands.arguments import ScriptArguments

    known = {field.name for field in dataclasses.fields(ScriptArguments) if field.init}
    text = "\n".join(help_text("train", theme.partition(":")[0], width=100) for theme in COMMANDS["train"].themes)
    lines = re.findall(r"^  --(\w+)", text, flags=re.MULTILINE)
    assert len(lines) == len(set(lines)) and set(lines) >= known
    assert "--num_generations N" in text and "[8]" in text and "--gradient_checkpointing true|false|auto\n" in text
    assert "[trainer_output]" in text, "what Transformers fills in where nothing is given"
    every = flags_in(help_text("train", "all", width=100))
    assert {*lines, "adam_beta1"} <= every and flags_in(help_text("train", width=100)) < every
    assert not every & set(WITHOUT_EFFECT), "a flag that is refused is no help"


def test_one_theme_can_be_asked_for_and_help_may_stand_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "tools"]) == main(["help", "train", "tools"]) == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second and "tools_script" in flags_in(first) and "learning_rate" not in flags_in(first)
    assert main(["train", "--help", "tolls"]) == main(["help", "tarin"]) == 2
    said = capsys.readouterr().err
    assert "the nearest is tools" in said and "the nearest is 'train'" in said


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m toolgrpo train --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == "" and done.stdout.strip() == "0"


COMPLETED = {
    "eval": "evaluate",
    "train --kee": "--keep",
    "train --keep b": "best",
    "train --engine vllm_": "vllm_colocate vllm_server",
    "train --tools_script to": "",
    "evaluate --basel": "--baseline",
    "sft --max_turns": "",
    "train --loss_type n": "",
    "data --sho": "--show",
    "nonsense --ke": "",
}


def test_a_shell_completes_commands_flags_and_their_values() -> None:
    script = completion("bash", ["train", "evaluate"])
    for words in COMPLETED:
        script += f"\nCOMP_WORDS=(toolgrpo {words}); COMP_CWORD={len(words.split())}; _toolgrpo; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    offered = [" ".join(sorted(line.split())) for line in done.stdout.splitlines()]
    assert dict(zip(COMPLETED, offered, strict=True)) == COMPLETED and not done.stderr
    assert completion("zsh", ["train"]).startswith("autoload -U +X bashcompinit")
    fish = completion("fish", ["train"])
    of_train = "complete -c toolgrpo -n '__fish_seen_subcommand_from train' -l"
    for line in (f"{of_train} quiet\n", f"{of_train} tools_script -r\n", f"{of_train} keep -xa '"):
        assert line in fish

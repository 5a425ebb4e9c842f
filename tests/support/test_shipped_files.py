"""A shipped file is found by the path that pages write, or by its bare name; a file of the user's comes first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolgrpo.commands.main import launched, main
from toolgrpo.data import load_tasks
from toolgrpo.errors import ConfigError
from toolgrpo.support.shipped_files import CONFIGS, LAUNCH_FILES, PLUGINS, located, shipped_names, shipped_root
from toolgrpo.tools import load_tools

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "by_name", "found"),
    [
        ("recipes/configs/nano.yaml", (), "recipes/configs/nano.yaml"),
        ("nano", CONFIGS, "recipes/configs/nano.yaml"),
        ("calculator", PLUGINS, "tools_funcs/calculator_tools.py"),
        ("financial_tools_complex", PLUGINS, "tools_funcs/financial_tools_complex.py"),
        ("zero3", LAUNCH_FILES, "recipes/accelerate/zero3.yaml"),
        ("nano", (), None),
        ("calculater", PLUGINS, None),
        ("mine/nano", CONFIGS, None),
    ],
)
def test_a_shipped_file_is_found_from_anywhere(named: str, by_name: tuple[str, ...], found: str | None) -> None:
    assert located(named, by_name) == (Path(named) if found is None else shipped_root() / found)


def test_a_file_of_the_user_comes_first(elsewhere: Path) -> None:
    (elsewhere / "nano").write_text("mine")
    assert located("nano", CONFIGS) == Path("nano")
    for own in ("tools_funcs/math_tools.py", "recipes/accelerate/zero3.yaml"):
        (elsewhere / own).parent.mkdir(parents=True)
        (elsewhere / own).write_text("mine")
        assert located(own) == Path(own), "not the shipped one of that path"
    assert located("math", PLUGINS) == Path("tools_funcs/math_tools.py")
    assert located("zero3", LAUNCH_FILES) == Path("recipes/accelerate/zero3.yaml")
    assert {"calculator_tools", "math_reward"} <= set(shipped_names(PLUGINS)) and "nano" in shipped_names(CONFIGS)


def test_the_library_finds_shipped_tools_and_rows() -> None:
    with load_tools(Path("calculator")) as tools:
        assert tools.names
    assert len(load_tasks("gsm8k:recipes/data/gsm8k_30.jsonl")) == 30


def test_a_launch_file_starts_the_command_in_processes(elsewhere: Path) -> None:
    assert launched(["--config", "nano"]) == ([], ["--config", "nano"])
    launch, words = launched(["--accelerate_config", "zero3", "--config", "nano", "--num_processes", "8"])
    assert words == ["--config", "nano"]
    assert launch[-4:-2] == ["--config_file", str(shipped_root() / "recipes/accelerate/zero3.yaml")]
    assert launch[-2:] == ["--num_processes", "8"]
    assert "cpu_ddp.yaml" in " ".join(launched(["--num_processes", "2"])[0])
    with pytest.raises(ConfigError, match=r"zero9.*cpu_ddp"):
        launched(["--accelerate_config", "zero9"])


def test_a_task_is_copied_once(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "shop"]) == 0 and (elsewhere / "shop" / "shop_tools.py").is_file()
    assert main(["init", "shop"]) == 2 and "not empty" in capsys.readouterr().err
    assert main(["init", "shop", "other"]) == 0 and (elsewhere / "other" / "shop.yaml").is_file()
    assert main(["init", "shops"]) == 2 and "the nearest is 'shop'" in capsys.readouterr().err
    assert main(["init", "--skills"]) == 0 and (elsewhere / "skills" / "choose-the-road" / "SKILL.md").is_file()
    assert main(["init", "--skills"]) == 2 and "not empty" in capsys.readouterr().err


def test_every_file_that_the_package_names_is_shipped() -> None:
    pattern = re.compile(r"(?<![\w/.])((?:docs|recipes|tools_funcs|rewards)/[\w./-]+\.\w+)")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "toolgrpo").rglob("*.py")]
    named = {name for text in texts for name in pattern.findall(text)}
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []

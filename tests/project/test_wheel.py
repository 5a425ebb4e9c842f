"""The wheel is the product: installed, in an empty folder, it has what pages and messages name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
SANDBOX_ALONE = """
from confined_python import Sandbox
from confined_python.grading import Suite, grade
with Sandbox(workers=1) as sandbox:
    print(sandbox.run("6 * 7").value, grade(sandbox, "def f(x): return x", Suite(("assert f(3) == 3",))).all_passed)
try:
    import toolgrpo
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheels of this tree by the names of their packages."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, ROOT / "confined-python"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=300)
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.glob("*.whl")}


def environment_with(*wheels: Path, folder: Path) -> Path:
    """Return the site-packages of a new environment that has these wheels alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", *map(str, wheels)], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site-packages of an environment with both wheels, this environment's libraries, and not this tree."""
    site = environment_with(*wheels.values(), folder=tmp_path_factory.mktemp("both") / "env")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files, this tree's, are not read
    return site


def toolgrpo(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the wheel in a folder."""
    return subprocess.run(
        [str(site.parents[2] / "bin" / "toolgrpo"), *words],
        cwd=folder,
        env={**os.environ, "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_wheel_of_the_sandbox_works_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = environment_with(wheels["confined_python"], folder=tmp_path / "env")
    for name in ("landlockpy", "seccompy"):
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        shutil.copytree(Path(found.origin).parent, site / name)
    (tmp_path / "empty").mkdir()
    command = [str(tmp_path / "env" / "bin" / "python"), "-I", "-c", SANDBOX_ALONE]
    done = subprocess.run(command, cwd=tmp_path / "empty", capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["42", "True", "toolgrpo"], done.stderr


def test_the_files_that_a_newcomer_needs_are_in_it(installed: Path) -> None:
    shipped = installed / "toolgrpo" / "shipped"
    for name in ("docs", "recipes", "tools_funcs", "rewards", "skills"):
        here = {file.relative_to(ROOT) for file in (ROOT / name).rglob("*") if file.is_file()}
        here = {file for file in here if "__pycache__" not in file.parts}
        assert here <= {file.relative_to(shipped) for file in shipped.rglob("*")}
    assert "(docs/start.md)" in (shipped / "llms.txt").read_text() and (shipped / "llms-full.txt").is_file()


def test_the_first_page_is_walked_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    code = "import toolgrpo.sandbox as face, confined_python; print(face.__file__, confined_python.__file__)"
    command = [str(installed.parents[2] / "bin" / "python"), "-c", code]
    files = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    ).stdout.split()
    assert [Path(file).is_relative_to(installed) for file in files] == [True, True]
    helped = toolgrpo(installed, tmp_path, "--help")
    assert str(installed) in helped.stdout and "zero3" in helped.stdout
    assert toolgrpo(installed, tmp_path, "init", "shop").returncode == 0
    words = "--config nano --tools_script arithmetic --engine transformers --max_steps 1 --eval_questions 0"
    small = "--per_device_train_batch_size 8 --num_generations 4 --max_turn_tokens 16 --max_completion_length 32"
    done = toolgrpo(installed, tmp_path, "train", *words.split(), *small.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs/nano/model.safetensors").is_file()

"""The wheel is the product: installed, in an empty folder, it has what pages and messages name."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def toolgrpo(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the wheel in a folder, with this environment's libraries and not this tree."""
    # -S leaves out the .pth file by which this tree is installed.
    start = f"import sys; sys.path[:0] = {[str(site)]!r}; sys.path.append({sysconfig.get_path('purelib')!r}); "
    start += "import toolgrpo.commands.main as m; sys.argv[0] = 'toolgrpo'; sys.exit(m.main())"
    environment = {**os.environ, "PYTHONPATH": f"{site}:{sysconfig.get_path('purelib')}", "PYTHONNOUSERSITE": "1"}
    return subprocess.run(
        [sys.executable, "-S", "-c", start, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_files_that_a_newcomer_needs_are_in_it(installed: Path) -> None:
    shipped = installed / "toolgrpo" / "shipped"
    for name in ("docs", "recipes", "tools_funcs", "rewards", "skills"):
        here = {file.relative_to(ROOT) for file in (ROOT / name).rglob("*") if file.is_file()}
        here = {file for file in here if "__pycache__" not in file.parts}
        assert here <= {file.relative_to(shipped) for file in shipped.rglob("*")}
    assert "(docs/start.md)" in (shipped / "llms.txt").read_text() and (shipped / "llms-full.txt").is_file()


def test_the_first_page_is_walked_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    helped = toolgrpo(installed, tmp_path, "--help")
    assert str(installed) in helped.stdout and "zero3" in helped.stdout
    assert toolgrpo(installed, tmp_path, "init", "shop").returncode == 0
    words = ("--max_steps", "1", "--eval_questions", "0", "--engine", "transformers", "--max_completion_length", "32")
    small = ("--per_device_train_batch_size", "8", "--num_generations", "4", "--max_turn_tokens", "16")
    done = toolgrpo(installed, tmp_path, "train", "--config", "nano", "--tools_script", "arithmetic", *words, *small)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs/nano/model.safetensors").is_file()

"""Built once, complete or not there, built again when the recipe changes. A miniature recipe keeps it short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.mini_nano import MINI_NANO
from toolgrpo.errors import ModelError
from toolgrpo.models.nano import ensure_nano, nano_path

MINI = replace(MINI_NANO, phases=(replace(MINI_NANO.phases[0], steps=2),))
pytestmark = pytest.mark.timeout(900)
QUIET = Console(quiet=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "toolgrpo"


def test_it_is_built_once_and_loads(cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_nano(MINI, console=QUIET)
    assert path.parent == cache and path == nano_path(MINI)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert ensure_nano(MINI, console=QUIET) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template


def test_another_recipe_is_another_model() -> None:
    assert replace(MINI, seed=MINI.seed + 1).fingerprint() != MINI.fingerprint()
    assert replace(MINI).fingerprint() == MINI.fingerprint()


def test_the_same_recipe_gives_the_same_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from toolgrpo.models.nano.build import build_nano

    for name in ("one", "two"):
        build_nano(MINI, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


BUILD = """
import sys
sys.path.insert(0, {folder!r})
from test_nano_cache import MINI
from dataclasses import replace
from rich.console import Console
from toolgrpo.models.nano import ensure_nano
print(ensure_nano(replace(MINI, phases=(replace(MINI.phases[0], steps={steps}),)), console=Console()), flush=True)
"""


def _builder(cache: Path, steps: int) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "OMP_NUM_THREADS": "1"}
    code = BUILD.format(folder=os.path.dirname(__file__), steps=steps)
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_leaves_no_half_model_and_the_next_one_cleans_up(cache: Path) -> None:
    killed = _builder(cache, 100_000)
    assert killed.stdout is not None
    for line in killed.stdout:  # it is in the middle of its steps once the first of them is reported
        if "building nano" in line:
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not [path for path in cache.iterdir() if path.name.startswith("nano-")]
    left = [path for path in cache.iterdir() if ".build-" in path.name]
    assert left
    recipe = replace(MINI, phases=(replace(MINI.phases[0], steps=100_000),))
    (cache / left[0].name).rename(cache / f".{nano_path(MINI).name}.build-old")  # as if this recipe's build had died
    assert nano_path(recipe) != nano_path(MINI)
    assert ensure_nano(MINI, console=QUIET).is_dir()
    assert not [path for path in cache.iterdir() if ".build-" in path.name]


def test_two_builds_at_once_give_one_model(cache: Path) -> None:
    first, second = _builder(cache, 3), _builder(cache, 3)
    outputs = [process.communicate(timeout=600)[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    paths = [output.strip().splitlines()[-1] for output in outputs]
    assert paths[0] == paths[1]
    assert sum("building nano" in output for output in outputs) == 1
    assert len([path for path in cache.iterdir() if path.name.startswith("nano-")]) == 1


def test_a_cache_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        ensure_nano(MINI, console=QUIET)

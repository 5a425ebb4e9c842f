"""Every library that writes for a run, where the system lets no file grow: each failure is one sentence of ours."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from toolgrpo.errors import StorageError
from toolgrpo.support.storage import storage_errors, storage_failure

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LIMIT = 100_000  # the model has 400 kB
TOO_LARGE = "a file became larger than the system allows"

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from toolgrpo.data import load_tasks
from toolgrpo.support.storage import storage_errors

sys.path.insert(0, "tests/fixtures/scale")
import train_tiny

folder, model, rows = map(Path, sys.argv[1:])
large = torch.zeros(100_000)
config = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}

attempts = {
    "safetensors": lambda: save_file({"large": large}, folder / "large.safetensors"),
    "torch": lambda: torch.save(large, folder / "large.pt"),
    "text": lambda: (folder / "large.txt").write_text("x" * 10**6),
    "data set": lambda: load_tasks(rows),
    "checkpoint": lambda: train_tiny.run(train_tiny.Job(str(folder / "out"), str(model), config=config)),
}
said = {}
for name, attempt in attempts.items():
    try:
        with storage_errors("the model", folder):
            attempt()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_a_limit_of_file_sizes_is_named_by_whatever_library_meets_it(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} {'x' * 1000}", "answer": "1"}) + "\n" for i in range(1000)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tiny_model), str(rows)]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, preexec_fn=limit)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    begins = dict.fromkeys(("safetensors", "text", "torch"), "the model could not") | {
        "data set": "the rows of the data"
    }
    for name, words in begins.items():
        assert said[name].startswith(f"StorageError: {words}"), said[name]
    assert [name for name in said if TOO_LARGE not in said[name]] in ([], ["torch"]), said
    assert "checkpoint-1 could not be written" in said["checkpoint"]
    assert not (tmp_path / "out" / "checkpoint-1").exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EFBIG, "File too large"), TOO_LARGE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota is used up"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), "the quota is used up"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), TOO_LARGE),
        (ValueError("a wrong shape"), None),
    ],
)
def test_the_words_of_the_system_become_ours(tmp_path: Path, error: Exception, reason: str | None) -> None:
    assert storage_failure(error, tmp_path) == reason
    wrapped = KeyError("something else")
    wrapped.__cause__ = error
    assert storage_failure(wrapped, tmp_path) == reason
    with pytest.raises(StorageError if reason else ValueError), storage_errors("the log", tmp_path):
        raise error

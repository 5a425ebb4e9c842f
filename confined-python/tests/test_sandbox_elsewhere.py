"""The tests of this folder once more, on other ground: as a user without rights, and in an emulated default Docker container.

The repository and the interpreter may lie where only root may go, so the package, its two libraries, pytest and the tests are
copied to a folder that everybody can read and run there by an interpreter that everybody can run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from confined_python.client.host_process import open_to_all

NOBODY = 65534
HERE = Path(__file__).parent
MODULES = (
    "confined_python",
    "landlockpy",
    "seccompy",
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "py",
)
HOSTILE = ("test_sandbox_runs.py", "test_sandbox_hostile.py", "test_nothing_is_inherited.py")
FORGERIES = "test_forgeries.py"
WITNESS = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from confined_python import Sandbox
with Sandbox(workers=1) as sandbox:
    print("rung", sandbox.rung.value, "user", os.getuid(), "answer", sandbox.run("6 * 7").value)
"""


@pytest.fixture(scope="module")
def interpreter() -> str:
    """One of version 3.11 or newer that any user can run."""
    for path in (os.path.realpath(sys.executable), "/usr/local/bin/python3", "/usr/bin/python3"):
        if not Path(path).exists() or not open_to_all(path):
            continue
        version = subprocess.run([path, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
        if version.stdout.strip() == b"True":
            return path
    pytest.skip("no Python 3.11 or newer that every user can run")


@pytest.fixture(scope="module")
def copies() -> Iterator[Path]:
    """The package, what it and pytest need, and the tests, open to every user (pytest's own temporary folder is not)."""
    folder = Path(tempfile.mkdtemp(prefix="confined-test-"))
    for name in MODULES:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        source = Path(found.origin)
        if source.name == "__init__.py":
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source.parent, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / source.name)
    shutil.copytree(HERE, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder.chmod(0o755)
    (folder / "basetemp").mkdir(mode=0o777)
    (folder / "basetemp").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def elsewhere(interpreter: str, copies: Path, machine: str | None, code: str) -> subprocess.CompletedProcess[str]:
    """Run code as a user without rights, on a locked-down machine if one is named."""
    path = f"import sys; sys.path.insert(0, {str(copies)!r})\n"
    command = [interpreter, "-I", "-c", path + code]
    if machine is not None:
        lock = f"import sys, runpy; sys.path.insert(0, {str(copies)!r}); sys.argv = sys.argv[1:]; "
        lock += f"runpy.run_path({str(copies / 'tests' / 'docker_like.py')!r}, run_name='__main__')"
        command = [interpreter, "-I", "-c", lock, "docker_like.py", machine, *command]
    as_root = os.getuid() == 0
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
        user=NOBODY if as_root else None,
        group=NOBODY if as_root else None,
        extra_groups=[] if as_root else None,
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("machine", "rung"),
    [
        (None, "namespaces"),
        ("docker", "landlock"),
        pytest.param(None, "every", marks=pytest.mark.slow),
        pytest.param("docker", "every", marks=pytest.mark.slow),
    ],
)
def test_everything_holds_for_a_user_without_rights(
    interpreter: str, copies: Path, machine: str | None, rung: str
) -> None:
    if machine is None and os.getuid() != 0:
        pytest.skip("this user is not root: the other tests of this folder have shown it")
    # What a forgery meets depends on the user and the rung, not on what else the machine refuses: once is enough by default.
    names = HOSTILE if (machine, rung) == ("docker", "landlock") else (*HOSTILE, FORGERIES)
    files = [str(copies / "tests" / name) for name in names]
    options = ["-q", "-rs", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", os.devnull]
    options.append(f"--basetemp={copies / 'basetemp' / f'{machine}-{rung}'}")
    if rung != "every":
        options += ["-k", rung]
    options += [f"--rootdir={copies}", f"--confcutdir={copies}"]  # nor does a conftest.py in the temporary folder count
    code = f"import pytest\nsys.exit(pytest.main({[*options, *files]!r}))"
    done = elsewhere(interpreter, copies, machine, code)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 100, done.stdout[-2000:]
    if machine == "docker" and rung == "every":
        assert "does not hold the rung namespaces" in done.stdout, "the emulation lets namespaces through"
        assert "does not hold the rung landlock" not in done.stdout


@pytest.mark.parametrize(
    ("machine", "rung"),
    [(None, "namespaces"), ("docker", "landlock"), ("docker without Landlock", "seccomp")],
)
def test_the_strongest_rung_is_found_and_said(interpreter: str, copies: Path, machine: str | None, rung: str) -> None:
    ignoring = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # whose children's ends cannot be seen
    done = elsewhere(interpreter, copies, machine, (ignoring if machine == "docker" else "") + WITNESS)
    assert done.returncode == 0, done.stderr
    if machine is None and "rung namespaces" not in done.stdout:
        pytest.skip(f"users without rights cannot make namespaces here: {done.stdout.splitlines()[0]}")
    said, result = done.stdout.strip().splitlines()
    assert said.startswith(f"sandbox rung {rung}") and "not promised" in said
    if machine is not None:
        assert "not here: namespaces:" in said
    uid = NOBODY if os.getuid() == 0 else os.getuid()
    assert result == f"rung {rung} user {uid} answer 42"


def test_where_nothing_holds_it_refuses_unless_told_otherwise(interpreter: str, copies: Path) -> None:
    machine = "docker without Landlock and seccomp"
    refused = elsewhere(interpreter, copies, machine, WITNESS)
    assert refused.returncode == 1
    assert "SandboxError: nothing on this machine can confine" in refused.stderr and "allow_unsafe" in refused.stderr
    told = elsewhere(interpreter, copies, machine, WITNESS.replace("workers=1", "workers=1, allow_unsafe=True"))
    assert told.returncode == 0, told.stderr
    assert "sandbox rung unsafe" in told.stdout and "NOTHING" in told.stdout and "answer 42" in told.stdout

"""The rung `unsafe`: it confines nothing, runs on any POSIX system, and keeps the promises that are left.

Each test runs on this system and in a simulation of macOS (like_macos.py): the workers and the interpreters of the runs have
nothing that only Linux has. None of this has run on a real Mac.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import all_end, family_of, wait_for

from confined_python import Limits, Rung, RunStatus, Sandbox
from confined_python.errors import SandboxError
from confined_python.grading import Suite, grade

ROOT = str(Path(__file__).parents[2])
ADD = Suite(tests=("assert add(2, 3) == 5", "assert add(-1, 1) == 0"))


SMALL = Limits(memory_mb=200, file_mb=4, scratch_mb=8)


@pytest.fixture(scope="module", params=["this system", "like macOS"])
def unsafe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "like macOS":
            patch.setattr(sys, "executable", request.getfixturevalue("like_macos"))
        patch.setattr(tempfile, "tempdir", str(folder))
        with Sandbox(rung="unsafe", allow_unsafe=True, workers=1, limits=SMALL) as opened:
            assert opened.rung is Rung.UNSAFE
            yield opened
            family = family_of(opened._host.pid)
    assert all_end(*family) and list(folder.iterdir()) == [], "closing ends every process and removes every file"


@pytest.fixture(params=["this system", "like macOS"])
def interpreter(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("like_macos")) if request.param == "like macOS" else sys.executable


def test_a_run_prints_reads_its_input_and_gives_its_last_value(unsafe: Sandbox) -> None:
    result = unsafe.run("print(input())\n{'a': (1, 2.5), 'b': {3}}", stdin="hello")
    assert (result.status, result.stdout, result.exit_code) == (RunStatus.OK, "hello\n", 0)
    assert result.value == {"a": (1, 2.5), "b": {3}}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", RunStatus.TIMEOUT),
        ("import time; time.sleep(60)", RunStatus.TIMEOUT),
        ("import threading\ndef f():\n    while True: pass\nfor _ in range(4): threading.Thread(target=f).start()\nf()", RunStatus.TIMEOUT),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 22))", RunStatus.MEMORY),
        ("print('x' * 10**7)", RunStatus.OUTPUT),
        ("import time\nfor n in range(20): open(str(n), 'wb').write(bytes(1 << 20)); time.sleep(0.02)\ntime.sleep(60)", RunStatus.DISK),
        ("open('big', 'wb').write(bytes(1 << 23))", RunStatus.ERROR),
        ("1 / 0", RunStatus.ERROR),
        ("import os; os._exit(0)", RunStatus.ERROR),
        ("import sys; sys.exit(3)", RunStatus.ERROR),
        ("import os; os.closerange(0, 1000)", RunStatus.ERROR),
        ("import os; os.kill(os.getpid(), 9)", RunStatus.KILLED),
        ("import ctypes; ctypes.string_at(0)", RunStatus.KILLED),
    ],
)  # fmt: skip
def test_limits_end_a_run_and_the_next_one_works(unsafe: Sandbox, code: str, status: RunStatus) -> None:
    result = unsafe.run(code, timeout=0.5 if status is RunStatus.TIMEOUT else 60.0)
    assert result.status is status, result
    assert unsafe.run("6 * 7").value == 42


def test_a_run_is_a_program_by_itself(unsafe: Sandbox) -> None:
    """No arguments, no environment of ours, an empty folder, a main module without our names, no threads but its own."""
    found = unsafe.run("""
import os, sys, threading
open('left', 'w').close()
at_home = os.getcwd() == os.path.realpath(os.environ['HOME'])
(sys.argv, sorted(os.environ), at_home, os.listdir(), __name__, threading.active_count())
""")
    argv, environment, *rest = found.value
    assert (argv, rest) == (["-c"], [True, ["left"], "__main__", 1])
    ours = {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"}
    assert set(environment) - {"LD_LIBRARY_PATH"} <= ours, "an interpreter may need that one"
    for _ in range(2):  # both folders that the worker alternates between
        assert unsafe.run("import os; os.listdir()").value == []


def test_libraries_can_be_imported(unsafe: Sandbox) -> None:
    assert unsafe.run("import numpy\nint(numpy.arange(4).sum())").value == 6


def test_a_session_keeps_state_until_it_is_killed(unsafe: Sandbox) -> None:
    with unsafe.session() as session:
        session.run("x = 20; open('kept', 'w').write('x')")
        assert session.run("import os; (x + 1, os.listdir())").value == (21, ["kept"])
        assert session.run("while True: pass", timeout=0.3).state_lost
        assert session.run("x").status is RunStatus.ERROR
    assert unsafe.run("import os; os.listdir()").value == []


def test_a_session_that_ends_itself_between_runs_is_said_lost(unsafe: Sandbox) -> None:
    with unsafe.session() as session:
        session.run(
            "import threading, os, time; threading.Thread(target=lambda: (time.sleep(0.05), os._exit(3))).start()"
        )
        found = session.run("import time; time.sleep(5)")
        assert found.state_lost and not found.ok
        assert session.run("1 + 1").value == 2


def test_programs_are_graded(unsafe: Sandbox) -> None:
    assert grade(unsafe, "def add(a, b):\n    return a + b", ADD).all_passed
    for forgery in (
        "import sys; sys.exit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "class Liar(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Liar(7)",
        "def add(a, b): return 5",
    ):
        assert not grade(unsafe, forgery, ADD, timeout=2.0).all_passed, forgery


def test_processes_that_code_starts_end_with_the_run(unsafe: Sandbox) -> None:
    found = unsafe.run("import subprocess\nsubprocess.Popen(['/bin/sleep', '600']).pid")
    assert found.ok, found
    assert all_end(found.value)


def test_arun_runs_as_many_at_a_time_as_there_are_workers(unsafe: Sandbox) -> None:
    async def four() -> list[Any]:
        runs = await asyncio.gather(*(unsafe.arun(f"{number} + 1") for number in range(4)))
        return [run.value for run in runs]

    assert asyncio.run(four()) == [1, 2, 3, 4]


def test_a_killed_host_takes_its_runs_along(interpreter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(rung="unsafe", allow_unsafe=True, workers=1) as sandbox:
        with sandbox.session() as session:
            resting = session.run("import os; os.getpid()").value
            os.kill(sandbox._host.pid, signal.SIGKILL)
            assert all_end(resting)
            with pytest.raises(SandboxError, match="lost"):
                session.run("1")
        with pytest.raises(SandboxError, match="open another sandbox"):
            sandbox.run("1")
    assert list(tmp_path.iterdir()) == []


OPENER = """
import sys; sys.path.insert(0, {root!r})
import logging, tempfile
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
tempfile.tempdir = {folder!r}
from confined_python import Sandbox
"""
BUSY = """
sandbox = Sandbox(workers=2, rung="unsafe", allow_unsafe=True)
sandbox.run("open('left', 'w').write('x')")
holder = sandbox.session()
session = holder.__enter__()
session.run("open('kept', 'w').write('x')")
print(sandbox._host.pid, flush=True)
sandbox.run("open('more', 'w').write('x')\\nwhile True: pass", timeout=600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_opener_leaves_no_process_and_no_folder(interpreter: str, tmp_path: Path, how: signal.Signals) -> None:
    code = OPENER.format(root=ROOT, folder=str(tmp_path)) + BUSY
    opener = subprocess.Popen([interpreter, "-I", "-c", code], stdout=subprocess.PIPE, text=True)
    assert opener.stdout is not None
    opener.stdout.readline()  # the rung
    host = int(opener.stdout.readline())
    wait_for(lambda: list(tmp_path.glob("*/*/more")))
    family = family_of(host)
    assert len(family) >= 3, "a session's process and a run's"
    opener.send_signal(how)
    opener.communicate()
    assert all_end(*family)
    assert list(tmp_path.iterdir()) == []


def elsewhere(interpreter: str, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [interpreter, "-I", "-c", OPENER.format(root=ROOT, folder=str(folder)) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_on_macos_it_refuses_unless_told_otherwise(like_macos: str, tmp_path: Path) -> None:
    refused = elsewhere(like_macos, tmp_path, "Sandbox()")
    assert "SandboxError: nothing on this machine can confine" in refused.stderr
    assert all(word in refused.stderr for word in ("darwin", "allow_unsafe=True", "RemoteSandbox")), refused.stderr
    weaker = elsewhere(like_macos, tmp_path, "Sandbox(rung='landlock', allow_unsafe=True)")
    assert "cannot hold the sandbox rung 'landlock': this is darwin" in weaker.stderr


def test_on_macos_it_runs_when_told_so(like_macos: str, tmp_path: Path) -> None:
    told = """
import json
from confined_python.grading import Suite, grade
with Sandbox(workers=2, allow_unsafe=True) as sandbox:
    answers = [sandbox.rung.value, sandbox.run("6 * 7").value]
    with sandbox.session() as session:
        session.run("x = 3")
        answers.append(session.run("x * 2").value)
    answers.append(grade(sandbox, "def f(x): return x", Suite(("assert f(1) == 1",))).all_passed)
    answers.append(sandbox.run("while True: pass", timeout=0.3).status.value)
print(json.dumps(answers))
"""
    done = elsewhere(like_macos, tmp_path, told)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said, answers = done.stdout.splitlines()
    assert said.startswith("sandbox rung unsafe (this is darwin") and "promised: NOTHING" in said
    assert json.loads(answers) == ["unsafe", 42, 6, True, "timeout"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["CONFINED_PYTHON_ALLOW_UNSAFE", "TOOLGRPO_ALLOW_UNSAFE"])
def test_the_environment_can_allow_it_for_what_opens_a_sandbox_by_itself(
    like_macos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    done = elsewhere(like_macos, tmp_path, "with Sandbox(workers=1) as sandbox: print(sandbox.run('6 * 7').value)")
    assert done.stdout.splitlines()[-1] == "42", done.stderr

"""What a run does and what it cannot do, over every rung this machine holds."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from confined_python import Limits, Rung, RunStatus, Sandbox
from confined_python.errors import SandboxError, UserError
from confined_python.literals import NotPlainError, decode, encode


def test_a_run_prints_reads_its_input_and_gives_its_last_value(sandbox: Sandbox) -> None:
    result = sandbox.run("print(input())\n{'a': (1, 2.5), 'b': {3}}", stdin="hello")
    assert (result.status, result.stdout, result.exit_code) == (RunStatus.OK, "hello\n", 0)
    assert result.value == {"a": (1, 2.5), "b": {3}}
    assert type(result.value["a"]) is tuple


def test_an_uncaught_exception_is_an_error_with_the_models_frames_only(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exit_code) == (RunStatus.ERROR, 1)
    assert "ZeroDivisionError" in result.stderr
    assert "confined_python" not in result.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", RunStatus.TIMEOUT),
        ("import time; time.sleep(60)", RunStatus.TIMEOUT),
        ("x = [0] * 10**10", RunStatus.MEMORY),
        ("print('x' * 10**7)", RunStatus.OUTPUT),
        ("import os; os._exit(0)", RunStatus.ERROR),
        ("import sys; sys.exit(3)", RunStatus.ERROR),
        ("import ctypes; ctypes.string_at(0)", RunStatus.KILLED),
    ],
)
def test_limits_end_a_run_and_the_next_one_works(sandbox: Sandbox, code: str, status: RunStatus) -> None:
    assert sandbox.run(code, timeout=0.3 if status is RunStatus.TIMEOUT else 60.0).status is status
    assert sandbox.run("6 * 7").value == 42


def test_output_is_cut_with_a_notice(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('x' * 50_000)\nprint('y' * 30_000, file=sys.stderr)")
    assert result.stdout == "x" * 20_000 + "\n[output cut: 30001 more characters]"
    assert result.stderr == "y" * 20_000 + "\n[output cut: 10001 more characters]"
    assert result.ok and result.duration > 0


ENDS = """
import atexit, sys, threading, time
def main():
    time.sleep(0.2)
    print(42)
threading.Thread(target=main).start()
atexit.register(print, "bye")
print("first", file=sys.__stdout__)
"""


def test_a_program_ends_with_its_threads_and_what_it_registered(sandbox: Sandbox) -> None:
    assert sandbox.run(ENDS).stdout == "first\n42\nbye\n"
    endless = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    assert sandbox.run(endless, timeout=0.5).status is RunStatus.TIMEOUT


def test_what_a_program_writes_through_streams_of_its_own_is_output(sandbox: Sandbox) -> None:
    """As fast solutions of contests do: all is kept, and written at the end."""
    own = "import atexit, io, sys\nsys.stdout = io.BytesIO()\nsys.stdout.write(b'42')\n"
    assert (
        sandbox.run(f"{own}atexit.register(lambda: sys.__stdout__.buffer.write(sys.stdout.getvalue()))").stdout == "42"
    )


def test_a_last_value_that_answers_anything_is_no_error(sandbox: Sandbox) -> None:
    assert sandbox.run("class A(dict):\n    __getattr__ = dict.get\nA(a=1)").ok
    assert sandbox.run("class A:\n    __module__ = 'numpy'\nA()").ok, "as numpy.add, which has no size"


def test_many_threads_fit_into_the_memory_of_a_run(sandbox: Sandbox) -> None:
    program = (
        "import threading, time\ndef work():\n    made.append(bytearray(20_000))\n    time.sleep(0.2)\nmade = []\n"
        "threads = [threading.Thread(target=work) for _ in range(32)]\nfor one in threads:\n    one.start()\n"
    )
    result = sandbox.run(program + "for one in threads:\n    one.join()\nlen(made)")
    assert result.value == 32, result.stderr


def test_a_large_value_is_a_marked_text_alone(sandbox: Sandbox) -> None:
    assert sandbox.run("2**10000").value_repr.endswith("[output cut: 1011 more characters]")  # type: ignore[union-attr]
    numbers = ["__import__('numpy').zeros(3_000_000)"] if sandbox.run("import numpy").ok else []
    for large in ("[True] * 1_000_000", "['ä'] * 250_000", *numbers):
        result = sandbox.run(large)
        assert result.ok and not result.value_is_plain and result.value_repr, large


def test_no_single_call_takes_more_of_the_disk_than_a_file_may(strongest: Sandbox) -> None:
    keep_size = "ctypes.CDLL(None).fallocate(f, 1, ctypes.c_long(0), ctypes.c_long(1 << 30))"
    begin = "import ctypes, os\nf = os.open('a', os.O_CREAT | os.O_RDWR)\n"
    assert strongest.run(f"{begin}{keep_size}\nos.fstat(f).st_blocks").value == 0
    assert strongest.run(f"{begin}os.posix_fallocate(f, 0, 1 << 20)\nos.fstat(f).st_size").value == 1 << 20


def test_limits_too_low_for_any_program_are_an_error_and_no_failed_programs() -> None:
    with pytest.raises(SandboxError, match=r"open_files=4.*raise them"):
        Sandbox(limits=Limits(open_files=4))


@pytest.mark.skipif(
    os.getuid() != 0, reason="lowers the limit of processes, which counts where root runs code as another user"
)
def test_a_lower_limit_of_the_opener_stays() -> None:
    """As in a container: root without CAP_SYS_RESOURCE, who cannot have more than its hard limit."""
    lower = ["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", "prlimit", "--nproc=1000:1000"]
    code = "from confined_python import Sandbox\nwith Sandbox(workers=1) as s: print(s.run('1 + 1').value)"
    done = subprocess.run(["setpriv", *lower, sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\n", done.stderr


def test_each_limit_is_the_one_asked_for(sandbox: Sandbox) -> None:
    large = "len(bytearray(200 << 20))"
    assert sandbox.run(large, memory_mb=100).status is RunStatus.MEMORY
    assert sandbox.run(large, memory_mb=400).value == 200 << 20
    opened = sandbox.run("import os\nn = 0\ntry:\n    while True: os.dup(1); n += 1\nexcept OSError: pass\nn")
    assert 50 <= opened.value < sandbox.limits.open_files
    if sandbox.rung is not Rung.SECCOMP:
        write = "open('f', 'wb').write(bytes({} << 20))"
        assert sandbox.run(write.format(sandbox.limits.file_mb)).ok
        assert "File too large" in sandbox.run(write.format(sandbox.limits.file_mb + 1)).stderr


def test_what_is_preloaded_can_be_chosen() -> None:
    loaded = "import sys\n[name in sys.modules for name in ('numpy', 'sympy', 'wave')]"
    installed = [importlib.util.find_spec(name) is not None for name in ("numpy", "sympy")]
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run(loaded).value == [*installed, False]
    with Sandbox(workers=1, preload=["wave", "a_library_that_nobody_has"]) as sandbox:
        assert sandbox.run(loaded).value == [False, False, True]
        assert "ModuleNotFoundError" in sandbox.run("import a_library_that_nobody_has").stderr


@pytest.mark.parametrize(
    "attempt",
    [
        "open({secret!r}).read()",
        "open({secret!r}, 'a').write('x')",
        "open('/var/tmp/confined-escaped', 'w')",
        "os.listdir('/var')",
        "os.symlink({secret!r}, 'link')",
        "os.link({secret!r}, 'link')",
        "os.chmod({secret!r}, 0o777)",
        "os.chown({secret!r}, 0, 0)",
        "os.utime({secret!r})",
        "os.setxattr({secret!r}, 'user.x', b'1')",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "os.posix_spawn('/bin/sh', ['sh'], {{}})",
        "os.kill(os.getppid(), 9)",
        "os.kill({canary}, 9)",
        "os.kill(1, 0)",
        "open('/proc/{canary}/environ').read()",
        "open('/proc/self/environ').read()",
        "os.memfd_create('x')",
        "os.mkfifo('f')",
        "sys.modules['_socket'].socket().connect(('127.0.0.1', {port}))",
        "sys.modules['_socket'].socket(1, 1).connect({unix!r})",
        "sys.modules['_socket'].socketpair(1, 2)",
    ],
)
def test_nothing_outside_is_reached(sandbox: Sandbox, outside: dict[str, object], attempt: str) -> None:
    result = sandbox.run(f"import os, sys\n{attempt.format(**outside)}", timeout=60.0)
    assert result.status is RunStatus.ERROR, result
    assert "Permission" in result.stderr or "not permitted" in result.stderr, result.stderr
    assert Path(str(outside["secret"])).read_text() == "a secret"
    assert sandbox.run("1 + 1").value == 2


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """A secret, listeners and a process to attack, all reachable for this user."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("a secret")
    canary = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "s"))
        unix.listen()
        yield {
            "secret": str(folder / "secret"),
            "canary": canary.pid,
            "port": tcp.getsockname()[1],
            "unix": str(folder / "s"),
        }
    assert canary.poll() is None, "the canary was killed"
    canary.kill()
    canary.communicate()


def test_the_environment_is_not_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLGRPO_SECRET", "xyz")
    with Sandbox(workers=1) as sandbox:
        assert "TOOLGRPO_SECRET" not in str(sandbox.run("import os; dict(os.environ)").value)


def test_scratch_files_are_gone_after_the_run(sandbox: Sandbox) -> None:
    if sandbox.rung is Rung.SECCOMP:
        pytest.skip("the rung seccomp has no files")
    assert sandbox.run("open('a', 'w').write('x'); import os; os.makedirs('d/e'); sorted(os.listdir())").value == [
        "a",
        "d",
    ]
    assert sandbox.run("import os; os.listdir()").value == []


def test_a_session_keeps_state_until_it_is_killed(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 20")
        assert session.run("x + 1").value == 21
        assert session.run("while True: pass", timeout=0.3).state_lost
        assert session.run("x").status is RunStatus.ERROR
    with pytest.raises(SandboxError, match="closed"):
        session.run("1")


def test_arun_is_not_tied_to_one_event_loop(sandbox: Sandbox) -> None:
    for number in range(3):
        assert asyncio.run(sandbox.arun(f"{number} + 1")).value == number + 1


def test_no_descriptor_is_inherited_however_many_the_opener_holds() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2100:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2100), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2000)]
    try:
        with Sandbox(workers=1, preload=[]) as sandbox:
            look = "import os\nfound = []\nfor fd in range(3000):\n    try: found.append((os.fstat(fd), fd)[1])\n    except OSError: pass\nfound"
            assert sandbox.run(look).value == [0, 1, 2, 3, 4]
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_runs_unconfined_without_being_told_to() -> None:
    with pytest.raises(UserError, match="allow_unsafe"):
        Sandbox(rung="unsafe")
    with pytest.raises(UserError, match="no sandbox rung"):
        Sandbox(rung="jail")


@pytest.mark.parametrize(
    "value", [None, True, -5, 0.1, float("inf"), 1j, "é", b"\x00", [1, (2, {3})], {(1,): frozenset({2})}]
)
def test_plain_values_cross_with_their_exact_types(value: object) -> None:
    assert decode(encode(value)) == value
    assert type(decode(encode(value))) is type(value)


@pytest.mark.parametrize("form", [{"i": []}, {"q": 1}, {"s": [{"l": []}]}, [1], 3, {"d": [[1]]}, {"c": []}])
def test_malformed_forms_are_refused(form: object) -> None:
    with pytest.raises(NotPlainError):
        decode(form)

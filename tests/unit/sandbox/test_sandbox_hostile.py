"""Programs that attack the sandbox on each rung; after each, the next honest run works.

tests/unit/sandbox/test_sandbox_runs.py has the attacks that must raise a permission error; here are those that can end in any
way, as long as nothing outside changes and the worker lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from toolgrpo.sandbox import Rung, RunStatus, Sandbox
from toolgrpo.sandbox.ladder import probe

_CALL = "import ctypes\nprint(ctypes.CDLL(None, use_errno=True).syscall({}), ctypes.get_errno())"
X32 = 0x40000000
SYSCALLS = {  # x86-64 numbers: each must answer -1 with EPERM, or ENOSYS
    "mount": "165, 0, 0, 0, 0, 0",
    "ptrace": "101, 16, 1, 0, 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "unshare a user namespace": "272, 0x10000000",
    "clone a namespace": "56, 0x10000011, 0, 0, 0, 0",
    "clone3": "435, 0, 0",
    "vfork": "58",
    "io_uring_setup": "425, 8, 0",
    "userfaultfd": "323, 0",
    "add_key": "248, 0, 0, 0, 0, 0",
    "keyctl": "250, 0, 0, 0, 0, 0",
    "bpf": "321, 0, 0, 0",
    "perf_event_open": "298, 0, 0, 0, 0, 0",
    "pidfd_getfd": "438, 3, 0, 0",
    "open_by_handle_at": "304, 0, 0, 0",
    "memfd_create": "319, 0, 0",
    "execveat": "322, 0, 0, 0, 0, 0",
    "tgkill another": "234, 1, 1, 9",
    "pidfd_send_signal": "424, 3, 9, 0, 0",
    "setuid": "105, 0",
    "chroot": "161, 0",
    "init_module": "175, 0, 0, 0",
    "kexec_load": "246, 0, 0, 0, 0",
    "raising a limit": "302, 0, 7, 1, 0",
    "x32 getpid": f"{X32} | 39",
    "x32 open": f"{X32} | 2, 0, 0",
}
PROGRAMS = {
    "fork bomb": "import os\nfor _ in range(400):\n    try: os.fork()\n    except OSError: pass",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "a loop that catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "output flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "error flood": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "file bomb": "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "many files": "for n in range(100000): open(str(n), 'w').write('x' * 4096)",
    "deep folders": "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "all descriptors": "import os\nwhile True: os.dup(1)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "threads that outlive the run": "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(60,)).start()",
    "a thread that prints on": "import threading\ndef f():\n    while True: print('x')\nthreading.Thread(target=f, daemon=True).start()",
    "closing every descriptor": "import os\nos.closerange(0, 1000)",
    "garbage on the pipes": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 4096)\n    except OSError: pass",
    "a frame of nonsense": "import os\nos.write(4, b'\\x00\\x00\\x00\\x02[[')",
    "eating the requests": "import os\nos.read(3, 1 << 20)",
    "stopping itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "aborting": "import os\nos.abort()",
    "ignoring signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "killing the group": "import os\nos.killpg(0, 9)",
    "writing to null": "import ctypes\nctypes.memset(0, 0, 1)",
    "a bomb of the compiler": "eval('(' * 5000 + ')' * 5000)",
    "a huge power": "10 ** 10 ** 9",
    "a value that is too large": "'x' * (1 << 26)",
    "a repr that never ends": "class R:\n    def __repr__(self):\n        while True: pass\nR()",
    "an exception that cannot be printed": "class E(Exception):\n    def __str__(self): raise self\nraise E()",
    "an exception of another kind": "raise BaseException",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass",
}  # fmt: skip


@pytest.fixture(scope="module", params=(Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    reason = probe(request.param)
    if reason is not None:
        pytest.skip(f"this machine does not hold the rung {request.param.value}: {reason}")
    with Sandbox(rung=request.param, workers=1) as opened:
        yield opened


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_system_calls_that_only_attacks_need_are_denied(sandbox: Sandbox) -> None:
    """One run makes them all: each is denied on its own."""
    calls = list(SYSCALLS.values())
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nout = []\n"
    code += "".join(f"out.append((c.syscall({call}), ctypes.get_errno()))\n" for call in calls) + "out"
    result = sandbox.run(code)
    assert result.ok, result
    allowed = [name for name, got in zip(SYSCALLS, result.value, strict=True) if got[0] != -1 or got[1] not in (1, 38)]
    assert not allowed
    assert sandbox.run("6 * 7").value == 42


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_worker_outlives_it(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(PROGRAMS[name], timeout=1.0, memory_mb=256)
    assert result.status in set(RunStatus)
    after = sandbox.run("import os\n(6 * 7, os.environ.get('HOME') and os.getpid() > 0)")
    assert after.ok and after.value[0] == 42, after
    if sandbox.rung is not Rung.SECCOMP:
        assert sandbox.run("import os; os.listdir()").value == []

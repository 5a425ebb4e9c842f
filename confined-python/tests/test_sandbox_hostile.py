"""Programs that attack the sandbox on each rung; after each, the next honest run works.

HOLDING collect what they got through and must get nothing; ENDURED can end in any way, as long as the worker lives; SYSCALLS are
denied by number. test_sandbox_runs.py has attacks on targets that the test plants outside.
"""

from __future__ import annotations

import os

import pytest

from confined_python import Rung, RunStatus, Sandbox

X32 = 0x40000000
SYSCALLS = {  # x86-64 numbers: each must answer -1 with EPERM, or ENOSYS
    "mount": "165, 0, 0, 0, 0, 0",
    "ptrace": "101, 16, 1, 0, 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "process_vm_writev": "311, 1, 0, 0, 0, 0, 0",
    "unshare a user namespace": "272, 0x10000000",
    "setns": "308, 3, 0",
    "clone a namespace": "56, 0x10000011, 0, 0, 0, 0",
    "clone3": "435, 0, 0",
    "vfork": "58",
    "a thread with descriptors of its own": "56, 0x10900, 0, 0, 0, 0",
    "a larger buffer": "54, 0, 1, 7, 0, 4",
    "a larger pipe": "72, 1, 1031, 1048576",
    "sending descriptors": "46, 0, 0, 0",
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
    "pivot_root": "155, 0, 0",
    "init_module": "175, 0, 0, 0",
    "kexec_load": "246, 0, 0, 0, 0",
    "raising a limit": "302, 0, 7, 1, 0",
    "a seccomp filter of its own": "317, 1, 8, 0",
    "x32 getpid": f"{X32} | 39",
    "x32 open": f"{X32} | 2, 0, 0",
    "x32 execve": f"{X32} | 520, 0, 0, 0",
}
_TRY = "import os, sys\nwon = []\ndef attempt(name, f, *a):\n    try:\n        won.append((str(name), str(f(*a))[:50]))\n    except (OSError, ValueError, PermissionError): pass\n"
HOLDING = {
    "sockets of every kind": "import _socket\nfor family in range(46):\n    for kind in (1, 2, 3, 5):\n        attempt(family, _socket.socket, family, kind)",
    "connecting out": "import _socket\nfor where in (('1.1.1.1', 53), ('127.0.0.1', 22), ('::1', 22)):\n    attempt(where, lambda: _socket.socket(2 if '.' in where[0] else 10).connect(where))",
    "an abstract socket": "import _socket\nattempt('abstract', lambda: _socket.socket(1).bind('\\0confined-hostile'))",
    "datagram pairs": "import _socket\nattempt('pair', _socket.socketpair, 1, 2)\nattempt('seq', _socket.socketpair, 1, 5)",
    "signals to everybody": "for pid in (-1, 1, os.getppid(), *range(2, 3000)):\n    attempt(pid, os.kill, pid, 0)",
    "secrets of other processes": "for pid in (1, os.getppid(), 'self', *range(2, 500)):\n    for name in ('environ', 'mem', 'cmdline', 'maps', 'status'):\n        attempt(pid, open, f'/proc/{pid}/{name}')",
    "a list of the processes": "attempt('proc', os.listdir, '/proc')",
    "files of the machine": "for path in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/root/.bashrc', '/proc/self/environ', '/proc/version', '/sys/kernel/notes', '/dev/mem', '/dev/kmsg', '/dev/tty', '/var/log/dpkg.log'):\n    attempt(path, open, path)",
    "folders of the machine": "for path, name in (('/', 'proc'), ('/etc', 'passwd'), ('/var', 'log'), ('/proc', '1'), ('/sys', 'kernel'), ('/usr', 'bin'), ('/dev', 'tty')):\n    attempt(path, lambda: os.listdir(path).index(name))",
    "writing elsewhere": "for path in ('/var/tmp/h', '/dev/shm/h', '/etc/h', '/h', sys.prefix + '/lib/h', os.__file__, '/tmp/confined-h', '../h'):\n    attempt(path, open, path, 'a')",
    "links": "attempt('sym', os.symlink, '/etc/passwd', 'l')\nattempt('hard', os.link, '/etc/passwd', 'm')\nattempt('hard own', os.link, os.__file__, 'n')\nattempt('fifo', os.mkfifo, 'f')\nattempt('node', os.mknod, 'd')",
    "modes and owners": "try: open('own', 'w').close()\nexcept OSError: pass\nattempt('setuid', os.chmod, 'own', 0o4777)\nattempt('chown', os.chown, 'own', 0, 0)\nattempt('xattr', os.setxattr, 'own', 'user.x', b'1')\nattempt('utime', os.utime, 'own')\nattempt('mkdir', os.mkdir, 'shut', 0)",
    "other programs": "for path in ('/bin/sh', '/usr/bin/env', sys.executable):\n    attempt(path, os.execv, path, ['x'])\n    attempt(path, os.posix_spawn, path, ['x'], {})\nattempt('fork', os.fork)\nattempt('forkpty', os.forkpty)",
    "subprocess and multiprocessing": "import subprocess, multiprocessing\nattempt('run', subprocess.run, ['true'])\nattempt('mp', lambda: multiprocessing.get_context('fork').Process(target=print).start())",
    "an executable of its own": "try:\n    open('own', 'wb').write(b'#!/bin/sh\\n')\nexcept OSError: pass\nattempt('exec', os.execv, './own', ['own'])\nattempt('memfd', os.memfd_create, 'x')",
    "raising its limits": "import resource\nfor kind in range(16):\n    attempt(kind, lambda: resource.setrlimit(kind, (-1, -1)) or 'raised')",
    "descriptors of others": "for fd in range(5, 1024):\n    attempt(fd, os.fstat, fd)",
    "leaving the session": "attempt('setsid', os.setsid)\nattempt('setpgid', os.setpgid, 0, 0)\nattempt('nice', os.nice, -5)\nattempt('affinity', os.sched_setaffinity, 0, {0})",
    "outliving its worker": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor option, value in ((1, 0), (4, 1), (36, 1), (38, 0), (8, 1), (22, 2)):\n    if libc.prctl(option, value, 0, 0, 0) == 0: won.append(option)",
    "becoming another user": "attempt('uid', lambda: os.setuid(0) or 'root')\nattempt('resuid', lambda: os.setresuid(0, 0, 0) or 'root')\nattempt('groups', lambda: os.setgroups([0]) or 'root')",
    "unshare by ctypes": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):\n    if libc.unshare(flag) == 0: won.append(flag)",
    "ptrace and its relatives": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nif libc.ptrace(0, 0, 0, 0) == 0: won.append('traceme')\nif libc.ptrace(16, os.getppid(), 0, 0) == 0: won.append('attach')\nif libc.ptrace(0x4206, os.getppid(), 0, 0) == 0: won.append('seize')",
    "the trainer's environment": "won += [k for k in os.environ if k not in ('HOME', 'TMPDIR', 'PATH', 'LANG')]",
}  # fmt: skip
ENDURED = {
    "fork bomb": "import os\nfor _ in range(400):\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nfor _ in range(100000): threading.Thread(target=time.sleep, args=(60,)).start()",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "a huge mapping": "import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 30))",
    "a loop that catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "loops on many threads": "import threading\ndef f():\n    while True: pass\nfor _ in range(8): threading.Thread(target=f).start()\nf()",
    "output flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "error flood": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "file bomb": "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "a sparse file": "f = open('big', 'wb')\nf.truncate(1 << 40)",
    "many files": "for n in range(100000): open(str(n), 'w').write('x' * 4096)",
    "many empty files": "for n in range(10**6): open(str(n), 'w').close()",
    "names that hurt": "for name in (b'\\xff\\xfe', b'a\\nb', b'-rf', b'x' * 255, b' ', b'*', b'..x'):\n    open(name, 'w').write('x')\n    __import__('os').mkdir(name + b'd' if len(name) < 250 else b'D' * 255)",
    "moving its own folder away": "import os\ntry: os.rename(os.environ['HOME'], '../moved')\nexcept OSError: os.rmdir(os.environ['HOME'])",
    "deep folders": "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "all descriptors": "import os\nwhile True: os.dup(1)",
    "all pipes": "import os\nkept = []\nwhile True: kept.append(os.pipe())",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "threads that outlive the run": "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(60,)).start()",
    "a thread that prints on": "import threading\ndef f():\n    while True: print('x')\nthreading.Thread(target=f, daemon=True).start()",
    "a thread that makes files on": "import threading\ndef f():\n    n = 0\n    while True:\n        n += 1\n        open(f'f{n}', 'w').close()\nfor _ in range(4): threading.Thread(target=f, daemon=True).start()",
    "closing every descriptor": "import os\nos.closerange(0, 1000)",
    "garbage on the pipes": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 4096)\n    except OSError: pass",
    "a frame of nonsense": "import os\nos.write(4, b'\\x00\\x00\\x00\\x02[[')",
    "a frame of deep nonsense": "import os, struct\nbody = b'[' * 100000\nos.write(4, struct.pack('!I', len(body)) + body)",
    "lies in its own frame": "import os, struct\nbody = b'{\"status\": \"ok\", \"exit_code\": \"x\", \"value\": {\"i\": [1]}, \"repr\": 3}'\nos.write(4, struct.pack('!I', len(body)) + body)",
    "eating the requests": "import os\nos.read(3, 1 << 20)",
    "stopping itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "aborting": "import os\nos.abort()",
    "ignoring signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "a storm of timers": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\nwhile True: pass",
    "killing the group": "import os\nos.killpg(0, 9)",
    "writing to null": "import ctypes\nctypes.memset(0, 0, 1)",
    "jumping into data": "import ctypes\nctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.create_string_buffer(b'\\xcc' * 64)))()",
    "a bomb of the compiler": "eval('(' * 5000 + ')' * 5000)",
    "a huge power": "10 ** 10 ** 9",
    "a pattern that never matches": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "a value that is too large": "'x' * (1 << 26)",
    "a repr that never ends": "class R:\n    def __repr__(self):\n        while True: pass\nR()",
    "an exception that cannot be printed": "class E(Exception):\n    def __str__(self): raise self\nraise E()",
    "an exception of another kind": "raise BaseException",
    "a finaliser that never ends": "class D:\n    def __del__(self):\n        while True: pass\nd = D()\ndel d",
    "breaking the reporter": "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('confined_python'):\n        module.__dict__.clear()",
    "breaking the import system": "import sys\nsys.modules.clear(); sys.path.clear(); sys.meta_path.clear()",
    "breaking builtins": "import builtins\nfor name in list(vars(builtins)):\n    delattr(builtins, name)",
    "no streams": "import sys\ndel sys.stdout, sys.stderr, sys.stdin",
    "a stream that lies": "import sys\nclass S:\n    def __getattr__(self, name): raise BaseException(name)\nsys.stdout = sys.stderr = S()\n1 / 0",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass",
}  # fmt: skip


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


@pytest.mark.parametrize("name", HOLDING)
def test_it_gets_through_nowhere(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(f"{_TRY}{HOLDING[name]}\nwon", timeout=60.0)
    if result.status is RunStatus.ERROR and sandbox.rung is Rung.SECCOMP:
        assert "ModuleNotFoundError" in result.stderr or "PermissionError" in result.stderr, result
    else:
        assert result.ok and result.value == [], result
    assert sandbox.run("6 * 7").value == 42


@pytest.mark.parametrize("name", ENDURED)
def test_the_worker_outlives_it(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(ENDURED[name], timeout=0.3, memory_mb=256)
    assert result.status in set(RunStatus)
    after = sandbox.run("import os\n(6 * 7, os.environ.get('HOME') and os.getpid() > 0)")
    assert after.ok and after.value[0] == 42, after
    if sandbox.rung is not Rung.SECCOMP:
        for _ in range(2):  # both folders that the worker alternates between
            assert sandbox.run("import os; os.listdir()").value == []

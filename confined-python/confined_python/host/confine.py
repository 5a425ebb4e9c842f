"""The two confinements behind functions of ours, namespaces, and giving up root.

`confine_files` (Landlock): from then on the process reads the named folders, writes its scratch
folder, and reaches no TCP port, no abstract socket and no process outside. `confine_syscalls`
(seccomp): from then on it makes the allowed system calls only. Both are irreversible and both set
no_new_privs. `probe_rung` tries a rung on itself, in a throw-away process.

The filter is an allow-list, everything else answers EPERM, also system-call numbers of other ABIs
(x32 numbers match no rule; another architecture is killed). What is left out on purpose: creating
processes, exec, sockets other than an AF_UNIX socketpair, signals to others, ptrace and its
relatives, changing modes, owners, times and attributes, links, mounts, namespaces, keys, bpf,
io_uring, userfaultfd, memfd, raising limits; and what would keep memory or files where nothing counts
them: larger buffers of sockets and pipes, sending descriptors.
Not covered: metadata (`stat`) of files outside, which Landlock does not handle; kernel bugs.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import landlockpy
import seccompy
from seccompy.syscalls import syscall_nr

from confined_python.base import NOBODY
from confined_python.processes.linux import prctl

_PR_SET_KEEPCAPS = 8
_CAP_DAC_READ_SEARCH = 2
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWPID = 0x10000000, 0x40000000, 0x08000000, 0x20000000
_PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER = 38, 1
_SYS_LANDLOCK_RESTRICT_SELF, _SYS_SECCOMP = int(syscall_nr("landlock_restrict_self")), int(syscall_nr("seccomp"))
_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_READ = landlockpy.AccessFS.READ_FILE | landlockpy.AccessFS.READ_DIR
_WRITE = (
    _READ
    | landlockpy.AccessFS.WRITE_FILE
    | landlockpy.AccessFS.TRUNCATE
    | landlockpy.AccessFS.MAKE_REG
    | landlockpy.AccessFS.MAKE_DIR
    | landlockpy.AccessFS.REMOVE_FILE
    | landlockpy.AccessFS.REMOVE_DIR
)


def file_rules(readable: Iterable[str], scratch: str) -> landlockpy.Ruleset:
    """Build Landlock rules: read `readable`, read and write `scratch`, nothing else.

    Built once, for many forks.
    """
    scopes = landlockpy.Scope.ABSTRACT_UNIX_SOCKET | landlockpy.Scope.SIGNAL
    rules = landlockpy.Ruleset(scoped=scopes)
    for path in readable:
        rules.allow_path(path, _READ if os.path.isdir(path) else landlockpy.AccessFS.READ_FILE)
    rules.allow_path(scratch, _WRITE)
    return rules


class SyscallRules:
    """A seccomp filter laid out in memory once, so that loading it into a process is one system
    call.
    """

    def __init__(self, rules: seccompy.Filter) -> None:
        program = rules.program
        self._instructions = ctypes.create_string_buffer(program, len(program))
        self._header = _FilterProgram(len(program) // 8, ctypes.addressof(self._instructions))
        self.pointer = ctypes.pointer(self._header)


def confine_files(rules: landlockpy.Ruleset) -> None:
    """Landlock this process; the rules' descriptor can be closed afterwards.

    The two libraries build the rules; what a new process does with them are bare system calls,
    since each page of memory that it touches is a page to copy.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, rules.fileno(), 0) != 0:
        _fail("landlock_restrict_self")


def confine_syscalls(rules: SyscallRules) -> None:
    """Load the allow-list into this process."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, 0, rules.pointer) != 0:
        _fail("seccomp")


def drop_privileges(*, keep_reading: bool) -> None:
    """Give up groups and capabilities; who is root becomes nobody.

    `keep_reading` keeps root's capability to pass folders that nobody may not enter, for an
    interpreter that lives in root's home; only to be used where Landlock says which folders can be
    read at all.
    """
    if os.getuid() != 0:
        _set_capabilities(0)  # an own user namespace gives them
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    if keep_reading:
        prctl(_PR_SET_KEEPCAPS, 1)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if keep_reading:
        _set_capabilities(1 << _CAP_DAC_READ_SEARCH)


def leave_network() -> None:
    """Leave the network and the IPC objects of the machine; OSError where refused.

    For this process and all it forks. Done once, in the host: a network namespace is slow to
    make, and there is nothing in it that runs could share.
    """
    wanted = _CLONE_NEWNET | _CLONE_NEWIPC
    if os.getuid() != 0:
        wanted |= _CLONE_NEWUSER
    uid, gid = os.getuid(), os.getgid()
    _unshare(wanted)
    if wanted & _CLONE_NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def enter_pid_namespace() -> None:
    """Have the next process that this one forks be the first of a process table of its own."""
    _unshare(_CLONE_NEWPID)


def _unshare(what: int) -> None:
    if _libc.unshare(what) != 0:
        _fail("unshare")


def _fail(what: str) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def _set_capabilities(mask: int) -> None:
    """Set the effective and permitted capabilities to `mask`, the inheritable ones to none."""
    if _libc.capset(_CAPABILITY_HEADER, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)) != 0:
        _fail("capset")


_ALWAYS = """
read write readv writev pread64 pwrite64 preadv pwritev lseek close close_range fstat dup dup2 dup3 pipe pipe2 poll ppoll
select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2 flock fsync fdatasync
mmap mprotect munmap mremap madvise brk msync mincore membarrier
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait sigaltstack restart_syscall pause
futex futex_waitv set_robust_list get_robust_list rseq set_tid_address sched_yield sched_getaffinity
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getitimer setitimer alarm
timer_create timer_settime timer_gettime timer_delete timerfd_create timerfd_settime timerfd_gettime
getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid
getrandom getrusage sysinfo uname getcpu getrlimit arch_prctl exit exit_group
sendto recvfrom recvmsg shutdown getsockopt getsockname getpeername
"""

_FILES = """
open openat openat2 creat stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir
getdents getdents64 unlink unlinkat rmdir rename renameat renameat2 truncate ftruncate copy_file_range
sendfile statfs fstatfs fadvise64
"""

_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_CLONE_NEW_ANYTHING = 0x7E020000 | 0x00000080
_AF_UNIX = 1
_SOCK_STREAM = 1
_F_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # dup, descriptor flags, locks, cloexec dup, a pipe's size
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_PR_SET_NAME, _PR_GET_NAME = 15, 16


def syscall_filter(*, files: bool) -> seccompy.Filter:
    """Return a filter ready to load; `files=False` leaves no call that takes a path."""
    seccompy.supported()  # finds libc now: under Landlock it could not
    rules = seccompy.Filter(default=seccompy.Action.ERRNO | errno.EPERM)
    for name in (_ALWAYS + _FILES if files else _ALWAYS).split():
        number = _number(name)
        if number is not None:
            rules.allow(number)
    eq, masked = seccompy.CmpOp.EQ, seccompy.CmpOp.MASKED_EQ

    def only(name: str, *args: Any) -> None:
        number = _number(name)
        if number is not None:
            rules.allow(number, args=list(args))

    # threads alone, and none with descriptors of its own, which no limit and no look would count
    thread = _CLONE_FILES | _CLONE_THREAD
    only("clone", seccompy.ArgCmp(0, masked, thread, thread | _CLONE_NEW_ANYTHING))
    rules.errno("clone3", errno.ENOSYS)  # glibc then asks for clone, whose flags can be read
    rules.errno("fallocate", errno.EOPNOTSUPP)  # no limit on files holds it; glibc then writes by itself
    # stream pairs only: a datagram socket of a pair could still send to any path
    only("socketpair", seccompy.ArgCmp(0, eq, _AF_UNIX), seccompy.ArgCmp(1, masked, _SOCK_STREAM, 0xF))
    only("prlimit64", seccompy.ArgCmp(0, eq, 0), seccompy.ArgCmp(2, eq, 0))  # reading one's own limits
    for command in (_PR_SET_NAME, _PR_GET_NAME):
        only("prctl", seccompy.ArgCmp(0, eq, command))
    for command in _F_COMMANDS:
        only("fcntl", seccompy.ArgCmp(1, eq, command))
    for command in _IOCTLS:
        only("ioctl", seccompy.ArgCmp(1, eq, command))
    if files:  # a folder its owner cannot enter could not be wiped
        only("mkdir", seccompy.ArgCmp(1, masked, 0o700, 0o700))
        only("mkdirat", seccompy.ArgCmp(2, masked, 0o700, 0o700))
    return rules


def _number(name: str) -> int | None:
    """Return a call's number; None where this architecture has none (aarch64: open, stat, ...)."""
    try:
        return int(syscall_nr(name))
    except ValueError:
        return None


def probe_rung() -> None:
    rung, keep_reading = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of an opener that ignores it, no end of a process would be seen
    scratch = tempfile.mkdtemp()
    try:
        if rung == "namespaces":
            leave_network()
            enter_pid_namespace()
        print("" if _tried(lambda: _try(rung, scratch, keep_reading=keep_reading)) else "held")
    finally:
        os.rmdir(scratch)


def _tried(attempt: Callable[[], object]) -> int:
    """Return 0 if a process of its own did this."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _give_up_root(scratch: str, *, keep_reading: bool) -> None:
    """Do what each run of root's does to become nobody: not every root may (a user namespace of one user, dropped capabilities)."""
    if os.getuid() != 0:
        return
    try:
        os.chown(scratch, NOBODY, NOBODY)
        drop_privileges(keep_reading=keep_reading)
    except OSError as error:
        raise OSError(f"this root may not become nobody ({error}); run as an ordinary user") from None


def _try(rung: str, scratch: str, *, keep_reading: bool) -> None:
    if _tried(lambda: _give_up_root(scratch, keep_reading=keep_reading and rung != "seccomp")):
        os._exit(1)  # it has said why
    outside = "/proc/self/environ"
    rules = SyscallRules(syscall_filter(files=rung != "seccomp"))
    if rung != "seccomp":
        confine_files(file_rules([], scratch))
        _must_fail("Landlock let a file outside be read", lambda: open(outside).close())
    confine_syscalls(rules)
    _must_fail("seccomp let a socket be made", lambda: socket.socket().close())
    _must_fail("seccomp let another process be signalled", lambda: os.kill(os.getppid(), 0))
    _must_fail("a file outside could be read", lambda: open(outside).close())


def _must_fail(said: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except OSError:
        return
    raise RuntimeError(said)

"""The system calls that sandboxed code may make: an allow-list, everything else answers EPERM.

Default-deny also answers system-call numbers of other ABIs (x32 numbers match no rule; another
architecture is killed). What is left out on purpose: creating processes, exec, sockets other than
an AF_UNIX socketpair, signals to others, ptrace and its relatives, changing modes, owners, times
and attributes, links, mounts, namespaces, keys, bpf, io_uring, userfaultfd, memfd, raising limits;
and what would keep memory or files where nothing counts them: larger buffers of sockets and pipes,
sending descriptors.
"""

from __future__ import annotations

import errno
from typing import Any

import seccompy
from seccompy.syscalls import syscall_nr


def _names(words: str) -> list[str]:
    return words.split()


_ALWAYS = _names("""
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
""")

_FILES = _names("""
open openat openat2 creat stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir
getdents getdents64 unlink unlinkat rmdir rename renameat renameat2 truncate ftruncate fallocate copy_file_range
sendfile statfs fstatfs fadvise64
""")

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
    allow_all = [*_ALWAYS, *(_FILES if files else ())]
    rules = seccompy.Filter(default=seccompy.Action.ERRNO | errno.EPERM)
    for name in allow_all:
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

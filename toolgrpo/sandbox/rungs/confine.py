"""The two confinements behind functions of ours, namespaces, and giving up root.

`confine_files` (Landlock): from then on the process reads the named folders, writes its scratch
folder, and reaches no TCP port, no abstract socket and no process outside. `confine_syscalls`
(seccomp): from then on it makes the allowed system calls only. Both are irreversible and both set
no_new_privs.
Not covered: metadata (`stat`) of files outside, which Landlock does not handle; kernel bugs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import NoReturn

import landlockpy
import seccompy
from seccompy.syscalls import syscall_nr

from toolgrpo.sandbox.base import NOBODY

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
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, rules.fileno(), 0) != 0:
        _fail("landlock_restrict_self")


def confine_syscalls(rules: SyscallRules) -> None:
    """Load the allow-list into this process."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
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
        _prctl(_PR_SET_KEEPCAPS, 1)
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


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        _fail(f"prctl({option})")


def _fail(what: str) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def _set_capabilities(mask: int) -> None:
    """Set the effective and permitted capabilities to `mask`, the inheritable ones to none."""
    if _libc.capset(_CAPABILITY_HEADER, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)) != 0:
        _fail("capset")

"""Runs a command as a locked-down machine would: `docker_like.py NAME COMMAND...`, NAME being a key of MACHINES.

`docker` refuses what the default seccomp profile of Docker refuses to a container without capabilities. The others take away
Landlock, and seccomp too. Emulated by a filter of our own, since these tests cannot start containers.
"""

from __future__ import annotations

import errno
import os
import sys

import seccompy
from seccompy.syscalls import syscall_nr

DOCKER = """
acct add_key bpf clock_adjtime clock_settime create_module delete_module finit_module init_module get_mempolicy
io_uring_setup io_uring_enter io_uring_register ioperm iopl kcmp kexec_load kexec_file_load keyctl request_key lookup_dcookie
mbind migrate_pages mount move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open
pidfd_getfd pivot_root process_madvise quotactl reboot set_mempolicy setns settimeofday swapon swapoff
umount2 unshare userfaultfd vhangup vm86 fsopen fsconfig fsmount fspick syslog chroot sethostname setdomainname
"""
NO_LANDLOCK = "landlock_create_ruleset landlock_add_rule landlock_restrict_self"
MACHINES = {
    "docker": DOCKER,
    "docker without Landlock": f"{DOCKER} {NO_LANDLOCK}",
    "docker without Landlock and seccomp": f"{DOCKER} {NO_LANDLOCK} seccomp",
}
NEW_NAMESPACES = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
PR_SET_SECCOMP = 22


def lock_down(name: str) -> None:
    rules = seccompy.Filter(default=seccompy.Action.ALLOW)
    for call in MACHINES[name].split():
        try:
            rules.errno(int(syscall_nr(call)), errno.EPERM)
        except ValueError:  # not on this architecture
            continue
    for flag in NEW_NAMESPACES:
        rules.errno("clone", errno.EPERM, args=[seccompy.ArgCmp(0, seccompy.CmpOp.MASKED_EQ, flag, flag)])
    rules.errno("clone3", errno.ENOSYS)
    rules.errno("prctl", errno.EINVAL, args=[seccompy.ArgCmp(0, seccompy.CmpOp.EQ, PR_SET_SECCOMP)])
    rules.load()


if __name__ == "__main__":
    lock_down(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])

"""One worker: takes a request, forks the process that runs it, watches that process, wipes after it, answers.

Invariants: one request, one answer; after an answer no process of the run is alive (a session's process lives, stopped,
until its next run) and the scratch folder is empty; what waits is a process that has run nothing. Trusted code: nothing of the model runs in this process.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.sandbox import child, judge
from toolgrpo.sandbox.confine import (
    NOBODY,
    confine_files,
    confine_syscalls,
    die_with_parent,
    drop_root,
    file_rules,
)
from toolgrpo.sandbox.syscalls import syscall_filter
from toolgrpo.sandbox.wire import pack, read_frame, receive, send

__all__ = ["serve", "warm"]

_FRAME_BYTES = 4 << 20  # of a result
_FLOOD_BYTES = 4 << 20  # of one output stream; more ends the run
_CHECK_S = 0.1  # between looks at the CPU time used and the scratch folder
_MOST_FDS = 1024  # more than a worker ever holds
_filter = None


def warm(*, files: bool) -> None:
    """Build in the mother what every fork would otherwise build again."""
    global _filter
    _filter = syscall_filter(files=files)
    _ = _filter.program
    _ = judge  # grading runs it in a confined process, which on the seccomp rung could import nothing


@dataclass(slots=True)
class _Process:
    """A confined process and our ends of its pipes."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    requests: int
    results: int

    def is_dead(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def close(self) -> None:
        for fd in (self.pidfd, self.stdin, self.stdout, self.stderr, self.requests, self.results):
            if fd >= 0:
                os.close(fd)


@dataclass(slots=True)
class _Watch:
    """What came out of one run so far."""

    outputs: dict[int, bytearray]
    results: bytearray = field(default_factory=bytearray)
    verdict: str | None = None  # set when we end the run


def serve(settings: dict[str, Any], channel: socket.socket) -> None:
    """Answer requests until the client is gone."""
    scratch = os.path.join(settings["scratch"], f"w{os.getpid()}-{channel.fileno()}-{time.monotonic_ns()}")
    process: _Process | None = None
    try:
        _make_scratch(scratch)
        # Built once: opening some fifteen paths costs more than the rest of the confinement together.
        with_files = settings["rung"] in ("namespaces", "landlock")
        rules = file_rules(settings["readable"], scratch) if with_files else None
        fresh: tuple[int, ...] | None = None  # the limits of a process that has run nothing yet
        while (request := receive(channel)) is not None:
            started = time.monotonic()
            if process is not None and fresh is not None and (fresh != _fixed(request) or process.is_dead()):
                _end(process, settings)
                process = None
            if process is None:
                process = _start(settings, rules, scratch, request)
            fresh = None
            answer = _run(process, request, scratch)
            gone = answer.pop("gone")
            if gone or not request["keep"]:
                answer["state_lost"] = request["keep"]
                _end(process, settings)
                process = None
                _empty(scratch)
            answer["duration"] = time.monotonic() - started
            send(channel, answer)
            if process is None and not request["keep"]:  # fork while the client thinks
                process, fresh = _start(settings, rules, scratch, request), _fixed(request)
    except Exception:  # the client sees a lost worker; the reason goes to stderr
        traceback.print_exc()
    finally:
        if process is not None:
            _end(process, settings)
        _wipe(scratch)


def _fixed(request: dict[str, Any]) -> tuple[int, ...]:
    """The limits that a process is born with."""
    return request["memory_mb"], request["file_mb"], request["open_files"]


def _make_scratch(path: str) -> None:
    os.mkdir(path, 0o700)
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)


def _empty(scratch: str) -> None:
    """Remove what a run left in the scratch folder; the folder stays, since the rules of the next run name it."""
    with os.scandir(scratch) as left:
        paths = [entry.path for entry in left]
    for path in paths:
        try:
            os.unlink(path)
        except OSError:  # a folder
            _wipe(path)


def _wipe(path: str) -> None:
    """Remove the scratch folder however deep its contents are."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError:
        try:
            shutil.rmtree(path)
        except (OSError, RecursionError):
            subprocess.run(["rm", "-rf", "--", path], check=False, stderr=subprocess.DEVNULL)


def _start(settings: dict[str, Any], rules: Any, scratch: str, limits: dict[str, Any]) -> _Process:
    stdin, stdout, stderr, requests, results = (os.pipe() for _ in range(5))
    pid = os.fork()
    if pid == 0:
        try:
            for target, source in ((0, stdin[0]), (1, stdout[1]), (2, stderr[1])):
                os.dup2(source, target)
            os.dup2(requests[0], 100)
            os.dup2(results[1], 101)
            _confine(settings, rules, scratch, limits)
            _live(3, 4)
        finally:
            os._exit(125)
    for fd in (stdin[0], stdout[1], stderr[1], requests[0], results[1]):
        os.close(fd)
    for fd in (stdin[1], stdout[0], stderr[0], requests[1], results[0]):
        os.set_blocking(fd, False)
    return _Process(pid, os.pidfd_open(pid), stdin[1], stdout[0], stderr[0], requests[1], results[0])


def _confine(settings: dict[str, Any], rules: Any, scratch: str, limits: dict[str, Any]) -> None:
    """In the new process, before any of the model's code."""
    os.setsid()
    os.umask(0o077)
    os.chdir(scratch)
    os.environ.clear()
    os.environ.update(HOME=scratch, TMPDIR=scratch, PATH="", LANG="C.UTF-8")
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, mapped + (limits["memory_mb"] << 20)),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    rung = settings["rung"]
    if rung == "unsafe":
        die_with_parent()
        _keep_own_descriptors()
        return
    drop_root(keep_reading=rules is not None and not settings["nobody_can_read"])
    die_with_parent()  # after the change of user, which clears it
    if rules is not None:
        confine_files(rules)
    _keep_own_descriptors()
    assert _filter is not None
    confine_syscalls(_filter)


def _keep_own_descriptors() -> None:
    """The two pipes to 3 and 4, where the channel to the client or the rules may lie until now; close the rest."""
    os.dup2(100, 3)
    os.dup2(101, 4)
    os.closerange(5, _MOST_FDS)


def _live(requests: int, results: int) -> None:
    """The confined process: one cell after the other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    namespace = child.fresh_namespace()
    child.open_streams()
    while (request := read_frame(requests)) is not None:
        if "expressions" in request:
            outcome = child.evaluate_all(request["expressions"], namespace)
        else:
            outcome = child.run_cell(request["code"], namespace)
        child.report(results, outcome)
        if not request["keep"]:
            os._exit(outcome["exit_code"])


def _run(process: _Process, request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """One request in a live process, until its result, its end or a limit."""
    job = {key: request[key] for key in ("code", "expressions", "keep") if key in request}
    inputs = {process.requests: memoryview(pack(job))}
    if process.stdin >= 0:  # closed after a session's first run
        inputs[process.stdin] = memoryview(request["stdin"].encode())
    if process.stdin >= 0 and not inputs[process.stdin]:
        os.close(process.stdin)
        process.stdin = -1
    watch = _Watch({process.stdout: bytearray(), process.stderr: bytearray()})
    os.kill(process.pid, signal.SIGCONT)
    ended = _watch(process, inputs, watch, request, scratch)
    if request["keep"] and not ended and watch.verdict is None:
        os.kill(process.pid, signal.SIGSTOP)  # threads of a session rest between runs
    else:
        _kill(process.pid)
    _drain(process, watch)
    return _answer(process, watch, request, ended)


def _watch(
    process: _Process, inputs: dict[int, memoryview], watch: _Watch, request: dict[str, Any], scratch: str
) -> bool:
    """Move bytes until the run is over; whether its process ended by itself."""
    poller = select.poll()
    for fd in (process.stdout, process.stderr, process.results, process.pidfd):
        poller.register(fd, select.POLLIN)
    for fd in [fd for fd, rest in inputs.items() if rest]:
        poller.register(fd, select.POLLOUT)
    now = time.monotonic()
    deadline, next_check = now + request["timeout_s"], now + _CHECK_S
    cpu_deadline_s = _cpu_seconds(process.pid) + request["timeout_s"]
    while watch.verdict is None:
        now = time.monotonic()
        if now >= deadline:
            watch.verdict = "timeout"
            break
        if now >= next_check:
            next_check = now + _CHECK_S
            if _cpu_seconds(process.pid) > cpu_deadline_s:
                watch.verdict = "timeout"
                break
            if _too_much(scratch, request["scratch_mb"] << 20):
                watch.verdict = "disk"
                break
        for fd, event in poller.poll(max(1.0, 1000 * (min(deadline, next_check) - now))):
            if fd == process.pidfd:
                return True
            if fd in inputs:
                _feed(process, poller, inputs, fd)
            elif not _collect(process, watch, fd) or event == select.POLLHUP:
                poller.unregister(fd)
        if _complete(watch.results):
            return False
    return False


def _feed(process: _Process, poller: select.poll, inputs: dict[int, memoryview], fd: int) -> None:
    try:
        inputs[fd] = inputs[fd][os.write(fd, inputs[fd]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        inputs[fd] = inputs[fd][:0]
    if not inputs[fd]:
        poller.unregister(fd)
        if fd == process.stdin:
            os.close(fd)
            process.stdin = -1


def _collect(process: _Process, watch: _Watch, fd: int) -> bool:
    """Read what is there; False when nothing can come any more."""
    try:
        part = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    held = watch.results if fd == process.results else watch.outputs[fd]
    held += part
    if len(held) > (_FRAME_BYTES if held is watch.results else _FLOOD_BYTES):
        watch.verdict = "output"
    return bool(part)


def _drain(process: _Process, watch: _Watch) -> None:
    for fd in (process.stdout, process.stderr, process.results):
        while watch.verdict != "output":
            before = len(watch.results) + sum(map(len, watch.outputs.values()))
            if not _collect(process, watch, fd):
                break
            if before == len(watch.results) + sum(map(len, watch.outputs.values())):
                break


def _complete(frame: bytearray) -> bool:
    return len(frame) >= 4 and len(frame) >= 4 + int.from_bytes(frame[:4], "big")


def _answer(process: _Process, watch: _Watch, request: dict[str, Any], ended: bool) -> dict[str, Any]:
    """The run in the words of the client; the frame is passed on unread, as the stranger's text it is."""
    code: int | None = None
    gone = ended or watch.verdict is not None
    if gone:
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        process.pid = -1
    frame = bytes(watch.results[4 : 4 + int.from_bytes(watch.results[:4], "big")]) if _complete(watch.results) else b""
    shown = [_shown(watch.outputs[fd], request["output_chars"]) for fd in (process.stdout, process.stderr)]
    return {
        "verdict": watch.verdict,
        "code": code,
        "frame": frame.decode("latin-1"),
        "stdout": shown[0],
        "stderr": shown[1],
        "gone": gone,
        "state_lost": False,
    }


def _shown(raw: bytearray, most: int) -> str:
    text = raw.decode("utf-8", "replace")
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[output cut: {len(text) - most} more characters]"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end(process: _Process, settings: dict[str, Any]) -> None:
    """No process of the run is alive after this."""
    if process.pid > 0:
        _kill(process.pid)
        os.waitpid(process.pid, 0)
    if settings["rung"] == "namespaces":
        _kill(-1)  # we are pid 1 of a namespace of our own
    process.close()


def _cpu_seconds(pid: int) -> float:
    """Of all threads of a process, read from its own clock: /proc may belong to another pid namespace."""
    return time.clock_gettime(((~pid) << 3) | 2)


def _too_much(path: str, most: int) -> bool:
    """Whether a folder holds more than it may; one nested too deeply to be looked through counts as too much."""
    try:
        return _usage(path) > most
    except RecursionError:
        return True


def _usage(path: str) -> int:
    """Bytes on disk below a folder; a file that goes away meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total

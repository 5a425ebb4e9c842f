"""`Sandbox`: a pool of warm workers that run model-written Python, for any thread and event loop.

Invariants: a run has exactly one result or raises SandboxError; a run is never confined less than
the rung that was logged at start; closing (or the death of this process) ends every process and
removes every file. Workers that run tests (`judging`) never run anything else, and what comes out
of a run is read here in linear time.
Not covered: see README.md for what each rung does not promise.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import os
import re
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from confined_python.base import Limits, Rung, RunStatus, SandboxResult, limits_of_run
from confined_python.client.host_process import Host, choose_rung
from confined_python.errors import SandboxError, UserError, WorkerLostError
from confined_python.literals import MOST_HASHED, NotPlainError, decode
from confined_python.processes.wire import hang_up, receive, send

logger = logging.getLogger(__name__)
SHARED_WORKERS = max(2, min(8, os.cpu_count() or 2))
T = TypeVar("T")

DEFAULT_PRELOAD = (
    "array", "asyncio", "bisect", "cmath", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "logging", "math", "operator", "pathlib",
    "queue", "random", "re", "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "traceback", "types",
    "typing", "unicodedata", "numpy", "sympy",
)  # fmt: skip
_GRACE_S = 15.0
_ALLOW_UNSAFE = ("CONFINED_PYTHON_ALLOW_UNSAFE", "TOOLGRPO_ALLOW_UNSAFE")  # toolgrpo's users know it as the second


class Sandbox:
    """Runs code in confined processes. Use as a context manager, or call `close`.

    `allow_unsafe` (or CONFINED_PYTHON_ALLOW_UNSAFE=1 in the environment, for programs that open a
    sandbox by themselves) lets code run unconfined where nothing on this machine confines it. `preload` is imported once for all runs; on the rung
    `unsafe` each run is an interpreter of its own and imports by itself.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        rung: Rung | str = "auto",
        allow_unsafe: bool = False,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        limits: Limits | None = None,
    ) -> None:
        if workers < 1:
            raise UserError(f"a sandbox needs at least one worker; got workers={workers}")
        self.limits = limits or Limits()
        allow_unsafe = allow_unsafe or any(os.environ.get(name) == "1" for name in _ALLOW_UNSAFE)
        self.rung, notes = choose_rung(rung, allow_unsafe=allow_unsafe)
        logger.info("%s", notes)
        self._closed = False
        self._opener = os.getpid()
        self._lock = threading.Lock()
        self._host = Host(self.rung, preload=list(preload), limits=asdict(self.limits))
        self._workers = workers
        self._turns = threading.BoundedSemaphore(workers)
        # The worker that rested longest is next: the others still prepare their next process.
        self._resting: deque[_Link] = deque()
        self._resting_judges: deque[_Link] = deque()  # started by the first program that is graded
        self._resting.extend(self._opened(self._resting) for _ in range(workers))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        try:
            self._try_out()
        except BaseException:
            self.close()
            raise

    def run(
        self, code: str, *, stdin: str = "", timeout: float | None = None, memory_mb: int | None = None
    ) -> SandboxResult:
        """Run code once, from a fresh state."""
        limits = limits_of_run(self.limits, timeout, memory_mb)
        request = {"code": code, "stdin": stdin, "keep": False, **asdict(limits)}
        fates = []
        with self._turns:
            for link in (self._rested, self._opened):  # a worker that was lost is replaced once
                asked = link(self._resting)
                answer = asked.ask(request)
                if answer is not None:
                    self._rest(asked)
                    return _result(answer)
                fates.append(asked.fate)
        raise WorkerLostError(
            f"two sandbox workers in a row were lost (one {', the next '.join(fates)}); "
            "look for an out-of-memory kill on this machine, or for more work than its cores can do"
        )

    def _try_out(self) -> None:
        """Run a program of one word: where limits are too low for it, each program would fail and score nothing."""
        for _ in range(2):  # one may have been unlucky on a busy machine
            tried = self.run("None")
            if tried.ok:
                return
        why = ", ".join(filter(None, (tried.status, tried.stderr.strip())))
        raise SandboxError(
            f"the sandbox cannot run the program `None` within {self.limits} and the limits of this process (ulimit -a): {why}; "
            f"raise them"
        )

    async def arun(
        self, code: str, *, stdin: str = "", timeout: float | None = None, memory_mb: int | None = None
    ) -> SandboxResult:
        """Do as `run`, without blocking the event loop it is awaited on, whichever that is."""
        call = functools.partial(self.run, code, stdin=stdin, timeout=timeout, memory_mb=memory_mb)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def session(self) -> AbstractContextManager[Session]:
        """Lend a process of its own that keeps its state between runs."""
        return closing(Session(self, self._resting))

    def judging(self) -> AbstractContextManager[Session]:
        """Lend a session for tests, on a worker that has never run a program and never will."""
        return closing(Session(self, self._resting_judges))

    def close(self) -> None:
        """End every process and remove the scratch folder. Idempotent.

        Does nothing in a process that its opener has forked.
        """
        if os.getpid() != self._opener:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for resting in (self._resting, self._resting_judges):
                while resting:
                    resting.pop().close()
        self._host.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _opened(self, home: deque[_Link]) -> _Link:
        """Open a new worker, to rest in `home`."""
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox is closed; open another one")
            return _Link(self._host.worker(), home)

    def _rested(self, home: deque[_Link]) -> _Link:
        """Take the worker that has rested longest, else a new one."""
        if os.getpid() != self._opener:  # two processes that ask one worker would get each other's answers
            raise SandboxError("this sandbox was opened before this process was forked; open another one here")
        with self._lock:
            if home:
                return home.popleft()
        return self._opened(home)

    def _rest(self, link: _Link) -> None:
        """Keep a worker that has nothing to do, or end it where enough rest already."""
        with self._lock:
            if not self._closed and len(link.home) < self._workers:
                link.home.append(link)
                return
        link.close()


class Session:
    """Runs that share one namespace and one scratch folder.

    A run that is killed takes the state with it.
    """

    def __init__(self, sandbox: Sandbox, workers: deque[_Link]) -> None:
        self._sandbox = sandbox
        self._workers = workers
        self._link: _Link | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str, *, timeout: float | None = None, memory_mb: int | None = None) -> SandboxResult:
        """Run code in the state the earlier runs left. `memory_mb` counts from the first run on."""
        return _result(self._ask({"code": code}, timeout, memory_mb))

    async def arun(self, code: str, *, timeout: float | None = None, memory_mb: int | None = None) -> SandboxResult:
        call = functools.partial(self.run, code, timeout=timeout, memory_mb=memory_mb)
        return await asyncio.get_running_loop().run_in_executor(self._sandbox._threads, call)

    def exchange(self, job: dict[str, Any], *, timeout: float) -> dict[str, Any] | None:
        """Return what the session's process answers to a job of its own kind (inside/cells.py).

        None where it has ended, its state with it. Not decoded any further: whatever stands in it
        is a stranger's.
        """
        answer = self._ask(job, timeout, None)
        if answer["state_lost"]:
            return None
        is_foreign = "call" in job and not _FLAT.fullmatch(answer["frame"])
        return {} if is_foreign else _frame(answer)

    def close(self) -> None:
        """End the session's process; its worker serves others from then on.

        Waits for a run that is under way.
        """
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
            if link is not None and link.end_session():
                self._sandbox._rest(link)

    def _ask(self, job: dict[str, Any], timeout: float | None, memory_mb: int | None) -> dict[str, Any]:
        limits = limits_of_run(self._sandbox.limits, timeout, memory_mb)
        request = {**job, "stdin": "", "keep": True, **asdict(limits)}
        with self._lock:
            if self._closed:
                raise SandboxError("this session is closed; open another one")
            if self._link is None:
                self._link = self._sandbox._rested(self._workers)
            answer = self._link.ask(request)
            if answer is None:
                self._link = None
                raise WorkerLostError("the process of a session was lost, and its state with it")
            return answer


class SharedSandbox:
    """A sandbox that a whole process shares, opened by its first user and anew when it was lost.

    Users at the same time have the same one; one that failed a user is lent to nobody any more, and
    closed when its last user has given it back; the one that is open is closed when the process ends.
    """

    def __init__(self, *, workers: int = SHARED_WORKERS, preload: Sequence[str] = DEFAULT_PRELOAD) -> None:
        self._workers = workers
        self._preload = preload
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._users: Counter[Sandbox] = Counter()

    @contextmanager
    def lent(self) -> Iterator[Sandbox]:
        """Lend the sandbox; a SandboxError in the block says that this one is lost."""
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox(workers=self._workers, preload=self._preload)
                atexit.register(self._sandbox.close)
            sandbox = self._sandbox
            self._users[sandbox] += 1
        try:
            yield sandbox
        except SandboxError:
            with self._lock:
                self._sandbox = None if self._sandbox is sandbox else self._sandbox
            raise
        finally:
            with self._lock:
                self._users[sandbox] -= 1
                is_done = self._sandbox is not sandbox and not self._users[sandbox]
                if is_done:
                    del self._users[sandbox]
            if is_done:
                sandbox.close()
                atexit.unregister(sandbox.close)

    def use(self, function: Callable[[Sandbox], T]) -> T:
        """Return what a function does with the sandbox; it is called again with a new one if this one is lost."""
        with suppress(SandboxError), self.lent() as sandbox:
            return function(sandbox)
        with self.lent() as sandbox:
            return function(sandbox)

    def values(self, programs: Iterable[str], *, timeout: float) -> list[Any]:
        """Return what each program ends with, or None if it failed; as many run at a time as there are workers."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="shared-sandbox") as threads:
            results = list(threads.map(lambda code: self.use(lambda it: it.run(code, timeout=timeout)), programs))
        for name in {name for result in results for name in _MISSING.findall(result.stderr)} & set(self._preload):
            if not self.use(lambda it, code=f"import {name}": it.run(code)).ok:  # type: ignore[misc]
                raise SandboxError(
                    f"the sandbox has no module {name}: it knows those in the folders of {sys.executable} alone, none of "
                    f"PYTHONPATH and none of a user's own site-packages. Install it into that environment"
                )
        return [result.value for result in results]


_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)


class _Link:
    """Our end of one worker's channel; closed as soon as the worker is lost.

    `home`: where it rests. `fate`: what a lost worker did.
    """

    fate = "ended"

    def __init__(self, channel: socket.socket, home: deque[_Link]) -> None:
        self._channel = channel
        self.home = home

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the worker's answer; None when it is lost or silent long after every deadline."""
        answer = None
        try:
            self._channel.settimeout(request["timeout_s"] + _GRACE_S)
            send(self._channel, request)
            answer = receive(self._channel)
        except TimeoutError:
            self.fate = f"gave no answer in {request['timeout_s'] + _GRACE_S:g} s"
        except OSError:
            pass
        finally:  # also when this thread is interrupted: a late answer must not meet the next question
            if not isinstance(answer, dict):
                self.close()
        return answer if isinstance(answer, dict) else None

    def end_session(self) -> bool:
        """Ask for the end of a session's process; False where the worker is lost."""
        try:
            send(self._channel, {"end_session": True})
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        hang_up(self._channel)


# What cells.py says of a call: a few texts and whole numbers. Anything nested is a stranger's, and would take far more memory
# than its length.
_FLAT = re.compile(r'\{(?:"\w+":(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?\d+)[,}]){1,8}+')


def _frame(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what the confined process said about itself; empty unless it is a JSON object.

    It is believed for nothing but its own run.
    """
    try:
        frame = json.loads(answer["frame"])
    except (ValueError, RecursionError):
        return {}
    return frame if type(frame) is dict else {}


def _result(answer: dict[str, Any]) -> SandboxResult:
    frame = _frame(answer)
    code, verdict = answer["code"], answer["verdict"]
    stderr = answer["stderr"]
    if verdict is not None:
        status = RunStatus(verdict)
    elif frame.get("status") in ("ok", "error", "memory"):
        status, code = RunStatus(frame["status"]), frame.get("exit_code") if code is None else code
    elif code is not None and code < 0:
        status = RunStatus.KILLED
    else:
        status = RunStatus.ERROR
        stderr += f"\n[the process ended itself with exit code {code} before it was done]"
    value, has_value, text = None, False, frame.get("repr")
    with suppress(NotPlainError, RecursionError):
        if "value" in frame:
            value, has_value = decode(frame["value"], most_hashed=MOST_HASHED), True
    return SandboxResult(
        status=status,
        stdout=answer["stdout"],
        stderr=stderr,
        exit_code=code if type(code) is int and code >= 0 else None,
        duration=answer["duration"],
        value=value,
        value_repr=text[:4000] if type(text) is str else None,
        value_is_plain=has_value,
        state_lost=answer["state_lost"],
    )

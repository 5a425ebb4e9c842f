"""A sandbox that a whole process shares, opened by its first user and anew when it was lost.

Invariants: users at the same time have the same one; one that failed a user is lent to nobody any
more, and closed when its last user has given it back; the one that is open is closed when the
process ends.
Not covered: what failed is not tried again by itself, but in `run`.
"""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox.base import SandboxResult
from toolgrpo.sandbox.client.pool import DEFAULT_PRELOAD, Sandbox


class SharedSandbox:
    """Lends one sandbox, of so many workers."""

    def __init__(self, *, workers: int, preload: Sequence[str] = DEFAULT_PRELOAD) -> None:
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

    def run(self, code: str, *, timeout: float) -> SandboxResult:
        """Run code once, from a fresh state; once more in a new sandbox if this one is lost."""
        with suppress(SandboxError), self.lent() as sandbox:
            return sandbox.run(code, timeout=timeout)
        with self.lent() as sandbox:
            return sandbox.run(code, timeout=timeout)

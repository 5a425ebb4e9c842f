"""`RemoteSandbox`: runs go to a service that speaks the HTTP interface of SandboxFusion, for those
who need another kernel.

    POST {url}/run_code  {"code", "language": "python", "stdin", "run_timeout", "memory_limit_MB", ...}
    -> {"status": "Success" | "Failed" | "SandboxError", "message", "run_result": {"status", "execution_time", "return_code",
       "stdout", "stderr"}, ...}

Invariants: a run has exactly one result or raises SandboxError; what is the service's fault (no
connection, an HTTP error, an answer that says so or makes no sense) is tried again and then raises:
it is never the result of a run. A run can so be started more than once; its code must not have
effects outside the sandbox, which it cannot have anyway.
Not covered: sessions, grading and the value of a last expression; the service confines the code,
and what it promises is its own.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import logging
import math
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confined_python.base import Limits, RunStatus, SandboxResult, limits_of_run, shown
from confined_python.errors import SandboxError, UserError

logger = logging.getLogger(__name__)
_GRACE_S = 15.0  # for the way there and back, and for queueing at the service
_FIRST_PAUSE_S = 0.2
_ANSWER_BYTES = 64 << 20


class _ServiceFailed(Exception):
    """One attempt failed for a reason that is not the code's."""


class RemoteSandbox:
    """A sandbox service behind a URL; `run` and `arun` as those of `Sandbox`."""

    def __init__(
        self, url: str, *, limits: Limits | None = None, attempts: int = 4, at_once: int = 8, token: str | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"the URL of a sandbox service starts with http:// or https:// and a host; got {url!r}")
        for name, value in (("attempts", attempts), ("at_once", at_once)):
            if value < 1:
                raise UserError(f"{name} must be at least 1; got {value}")
        self.limits = limits or Limits()
        self._parts = parts
        self._attempts = attempts
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="remote-sandbox")

    def run(
        self, code: str, *, stdin: str = "", timeout: float | None = None, memory_mb: int | None = None
    ) -> SandboxResult:
        """Run code once, from a fresh state."""
        limits = limits_of_run(self.limits, timeout, memory_mb)
        job = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": limits.timeout_s,
            "run_timeout": limits.timeout_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        body = json.dumps(job).encode()
        for attempt in range(1, self._attempts + 1):
            try:
                return _result(self._post(body, limits.timeout_s + _GRACE_S), limits)
            except _ServiceFailed as failure:
                reason = str(failure)
                logger.warning("sandbox service, attempt %d of %d: %s", attempt, self._attempts, reason)
            if attempt < self._attempts:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        raise SandboxError(
            f"the sandbox service at {self._parts.geturl()} failed {self._attempts} times, last with: {reason}. Look at its "
            "log, or give it more machines"
        )

    async def arun(
        self, code: str, *, stdin: str = "", timeout: float | None = None, memory_mb: int | None = None
    ) -> SandboxResult:
        """Do as `run`, without blocking the event loop it is awaited on."""
        call = functools.partial(self.run, code, stdin=stdin, timeout=timeout, memory_mb=memory_mb)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Give up runs that have not begun; nothing is kept open between runs. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> RemoteSandbox:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _post(self, body: bytes, timeout_s: float) -> Any:
        assert self._parts.hostname is not None  # checked at construction
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout_s)
        try:
            connection.request("POST", f"{self._parts.path.rstrip('/')}/run_code", body, self._headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _ServiceFailed(f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status in (400, 401, 403, 404, 405, 422):  # asking again would not help
            text = answer[:300].decode("utf-8", "replace")
            raise SandboxError(
                f"the sandbox service at {self._parts.geturl()} refused the request with HTTP {response.status}: {text}. "
                "Check the URL, the token and the version of the service"
            )
        if response.status != 200:
            raise _ServiceFailed(f"HTTP {response.status}: {answer[:300].decode('utf-8', 'replace')}")
        try:
            return json.loads(answer)
        except ValueError:
            raise _ServiceFailed(f"an answer that is no JSON: {answer[:100]!r}") from None


def _result(answer: Any, limits: Limits) -> SandboxResult:
    """Return a service's answer as a result; _ServiceFailed where it is none."""
    ran = answer.get("run_result") if isinstance(answer, dict) else None
    if not isinstance(ran, dict) or answer.get("status") not in ("Success", "Failed"):
        said = answer.get("message") or answer.get("status") if isinstance(answer, dict) else answer
        raise _ServiceFailed(f"the service could not run the code: {str(said)[:300]}")
    code, seconds, stdout, stderr = (ran.get(key) for key in ("return_code", "execution_time", "stdout", "stderr"))
    if ran.get("status") == "TimeLimitExceeded":
        status = RunStatus.TIMEOUT
    elif ran.get("status") != "Finished" or type(code) is not int:
        raise _ServiceFailed(f"a run without an end: status {ran.get('status')!r}, return code {code!r}")
    elif code == 0:
        status = RunStatus.OK
    elif code < 0 or code > 128:
        status = RunStatus.KILLED
    else:
        status = RunStatus.MEMORY if "MemoryError" in str(stderr)[-500:] else RunStatus.ERROR
    return SandboxResult(
        status=status,
        stdout=shown(stdout if isinstance(stdout, str) else "", limits.output_chars),
        stderr=shown(stderr if isinstance(stderr, str) else "", limits.output_chars),
        exit_code=code if type(code) is int and code >= 0 and status is not RunStatus.TIMEOUT else None,
        duration=float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0,
    )

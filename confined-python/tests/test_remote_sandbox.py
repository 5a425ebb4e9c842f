"""The adapter for a sandbox service, against a real HTTP server that answers as such services do, and fails as they do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from confined_python import Limits, RemoteSandbox, RunStatus
from confined_python.errors import SandboxError, UserError

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class Service:
    """A server whose answers are given one after the other, the last one for ever. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.answers: list[Answer] = [really_run]
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append((self.path, job, self.headers.get("Authorization")))
                answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
                status, body = answer(job)
                if status == 0:  # hang up
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/base/"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def really_run(job: dict[str, Any]) -> tuple[int, bytes]:
    """What such a service does, without the confinement: for programs of this file only."""
    command = [sys.executable, "-I", "-c", job["code"]]
    try:
        done = subprocess.run(command, input=job["stdin"], capture_output=True, text=True, timeout=job["run_timeout"])
    except subprocess.TimeoutExpired:
        return finished("Failed", {"status": "TimeLimitExceeded", "execution_time": job["run_timeout"], "stdout": ""})
    ran = {"status": "Finished", "execution_time": 0.1, "return_code": done.returncode}
    ran |= {"stdout": done.stdout, "stderr": done.stderr}
    return finished("Success" if done.returncode == 0 else "Failed", ran)


def finished(status: str, ran: dict[str, Any] | None, message: str = "") -> tuple[int, bytes]:
    return 200, json.dumps({"status": status, "message": message, "run_result": ran, "files": {}}).encode()


def test_runs_have_the_results_that_the_local_sandbox_gives(service: Service) -> None:
    with RemoteSandbox(
        service.url, limits=Limits(timeout_s=20.0, memory_mb=256, output_chars=50), token="t"
    ) as sandbox:
        done = sandbox.run("print(input())", stdin="hello")
        assert (done.status, done.stdout, done.exit_code, done.ok) == (RunStatus.OK, "hello\n", 0, True)
        failed = sandbox.run("1 / 0")
        assert (failed.status, failed.exit_code) == (RunStatus.ERROR, 1)
        assert sandbox.run("import sys; sys.exit(3)").exit_code == 3
        assert sandbox.run("raise MemoryError").status is RunStatus.MEMORY
        assert sandbox.run("import os; os.kill(os.getpid(), 9)").status is RunStatus.KILLED
        late = sandbox.run("import time; time.sleep(60)", timeout=0.5)
        assert (late.status, late.exit_code) == (RunStatus.TIMEOUT, None)
        assert sandbox.run("print('x' * 200)").stdout.endswith("[output cut: 151 more characters]")
    path, job, authorization = service.asked[0]
    assert (path, authorization) == ("/base/run_code", "Bearer t")
    assert (job["language"], job["run_timeout"], job["memory_limit_MB"]) == ("python", 20.0, 256)


def test_runs_at_once_on_an_event_loop(service: Service) -> None:
    async def many(sandbox: RemoteSandbox) -> list[str]:
        return [result.stdout for result in await asyncio.gather(*(sandbox.arun(f"print({n})") for n in range(4)))]

    with RemoteSandbox(service.url) as sandbox:
        assert asyncio.run(many(sandbox)) == ["0\n", "1\n", "2\n", "3\n"]


FAULTS: dict[str, tuple[int, bytes]] = {
    "overloaded": (503, b"busy"),
    "too many requests": (429, b"slow down"),
    "hangs up": (0, b""),
    "no JSON": (200, b"<html>"),
    "another shape": (200, b"[1, 2]"),
    "says so": finished("SandboxError", None, "no pod left"),
    "no result": finished("Success", None),
    "a run without an end": finished("Failed", {"status": "Error", "return_code": None, "stderr": "docker died"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_the_service_is_retried_and_then_raises(service: Service, fault: str) -> None:
    with RemoteSandbox(service.url, attempts=2) as sandbox:
        service.answers = [lambda job: FAULTS[fault], really_run]
        assert sandbox.run("print(1)").stdout == "1\n", "the second attempt was asked for"
        service.answers = [lambda job: FAULTS[fault]]
        with pytest.raises(SandboxError, match="failed 2 times"):
            sandbox.run("print(1)")


def test_a_request_that_is_refused_is_not_repeated(service: Service) -> None:
    service.answers = [lambda job: (422, b"no such field")]
    with RemoteSandbox(service.url) as sandbox, pytest.raises(SandboxError, match="no such field"):
        sandbox.run("print(1)")
    assert len(service.asked) == 1


def test_nobody_listening_is_an_error_of_the_world() -> None:
    with (
        RemoteSandbox("http://127.0.0.1:9", attempts=1) as sandbox,
        pytest.raises(SandboxError, match="failed 1 times"),
    ):
        sandbox.run("1")


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://"])
def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(UserError, match="URL"):
        RemoteSandbox(url)
    with pytest.raises(UserError, match="attempts"):
        RemoteSandbox("http://x", attempts=0)

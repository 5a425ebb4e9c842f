"""A report that follows a run: new when something was recorded, and for this machine only."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import cast

import pytest

from tests.support.recorded_run import record_run
from toolgrpo.errors import ConfigError
from toolgrpo.report.live import LiveReport, live_server

pytestmark = pytest.mark.e2e


@contextmanager
def served(folder: Path) -> Iterator[int]:
    report = LiveReport([folder])
    server = live_server(report)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        report.close()


def get(port: int, path: str, host: str | None = None, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers if host is None else {"Host": host, **headers})
    answer = connection.getresponse()
    return answer, answer.read()


def state_of(port: int) -> str:
    answer, body = get(port, "/state")
    assert answer.status == 200
    return str(json.loads(body)["state"])


def test_it_shows_what_was_recorded_since(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", steps=1)
    with served(run) as port:
        first, page = get(port, "/")
        state = state_of(port)
        assert first.status == 200 and first.getheader("Content-Type") == "text/html; charset=utf-8"
        assert b"connect-src &#x27;self&#x27;" in page
        assert get(port, "/")[1] == page, "nothing was recorded, so nothing is made"
        with (run / "episodes.jsonl").open("a") as file:
            file.write((run / "episodes.jsonl").read_text().splitlines()[0].replace('"step": 0', '"step": 1') + "\n")
        assert state_of(port) != state and get(port, "/")[1] != page
    assert not (run / "report.html").exists(), "the page of a live report lies elsewhere"


def test_nobody_else_is_served(tmp_path: Path) -> None:
    with served(record_run(tmp_path / "run", steps=1)) as port:
        for host in (f"evil.example:{port}", "localhost"):  # more of them: gateway/test_bad_requests.py
            assert get(port, "/", host)[0].status == 403, host
        assert get(port, "/state", Origin="https://evil.example")[0].status == 403
        for path in ("/../episodes.jsonl", "/episodes.jsonl", "/%2e%2e/steps.jsonl"):
            assert get(port, path)[0].status == 404, path
        assert get(port, "/", f"localhost:{port}")[0].status == 200


HANG_UPS = (  # before it asks, in the head, before it reads a refusal, and before it reads the page
    *(b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n",
)


@pytest.mark.parametrize("port", ["taken", 70000])
def test_a_port_that_cannot_be_had_is_one_sentence(port: str | int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="another --port"):
        live_server(cast("LiveReport", None), taken.getsockname()[1] if port == "taken" else int(port))


def test_a_reader_that_hangs_up_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(record_run(tmp_path / "run", steps=1, said=lambda text: text + "x" * 10_000)) as port:
        assert get(port, "/")[0].status == 200
        for asked in HANG_UPS * 3:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as reader:
                reader.sendall(asked.replace(b"PORT", str(port).encode()))
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        assert get(port, "/state")[0].status == 200
    assert capfd.readouterr().err == ""

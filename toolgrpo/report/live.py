"""Serve a report on this machine while its run goes on: `toolgrpo report OUTPUT_DIR --live`.

The loopback interface only, GET only, two answers: the page, made anew when the recordings have
grown, and `state`, which changes with them. A request that a web page made is refused
(`toolgrpo.support.foreign_requests`); a reader that hangs up is no error.

Not covered: many readers; each page is made for all of them, one at a time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.observe.line_file import parts
from toolgrpo.observe.records import episode_files
from toolgrpo.report.build import build_report
from toolgrpo.report.files import run_folder
from toolgrpo.support.foreign_requests import is_foreign

_HOST = "127.0.0.1"
_READ_S = 30.0  # a browser that asks and does not read is let go


class LiveReport:
    """The page of one or two runs, kept as new as the recordings."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._places = [run_folder(folder) for folder in folders]
        self._scratch = tempfile.TemporaryDirectory(prefix="toolgrpo-report-")
        self._making = threading.Lock()
        self._made_for: str | None = None

    def state(self) -> str:
        """Return a text that changes whenever something is recorded."""
        sizes = []
        for place in self._places:
            for file in (*episode_files(place), *episode_files(place, "heldout"), place / "steps.jsonl"):
                with contextlib.suppress(FileNotFoundError):  # it is being set aside
                    sizes.append(sum(part.stat().st_size for part in parts(file)))
        return "-".join(map(str, sizes))

    def page(self) -> bytes:
        """Return the page, made anew if something was recorded since."""
        with self._making:
            path = Path(self._scratch.name) / "report.html"
            state = self.state()
            if state != self._made_for:
                build_report(self._folders, path, live=state)
                self._made_for = state
            return path.read_bytes()

    def close(self) -> None:
        self._scratch.cleanup()


def serve(folders: Sequence[Path], *, port: int = 0, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    report = LiveReport(folders)
    server = live_server(report, port)
    say(f"report    http://{_HOST}:{server.server_address[1]}/ follows the run; Ctrl-C ends it")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        report.close()


def live_server(report: LiveReport, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the report, bound to the loopback interface."""

    class Answers(_Answers):
        source = report

    try:
        return _Server((_HOST, port), Answers)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"nothing can be served on {_HOST}:{port} ({why}); choose another --port, or 0 for a free one"
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print an error, unless the reader has hung up or does not read."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Answers(BaseHTTPRequestHandler):
    source: LiveReport
    timeout = _READ_S
    server_version = "toolgrpo"
    sys_version = ""

    def do_GET(self) -> None:
        if self._is_foreign():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this report is served to this machine only\n")
        elif self.path not in ("/", "/state"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")
        else:
            self._answer(*self._made())

    def _is_foreign(self) -> bool:
        """Return whether the request is not one of this machine's own pages; a header given twice is nobody's."""
        hosts, origins = self.headers.get_all("Host", [None]), self.headers.get_all("Origin", [None])
        port = self.connection.getsockname()[1]
        return len(hosts) + len(origins) > 2 or is_foreign(hosts[0], origins[0], port=int(port))

    def _made(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            if self.path == "/":
                return HTTPStatus.OK, "text/html; charset=utf-8", self.source.page()
            return HTTPStatus.OK, "application/json", json.dumps({"state": self.source.state()}).encode()
        except (ToolGRPOError, OSError) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode()

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing of each request."""

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

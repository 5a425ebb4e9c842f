"""An OpenAI-compatible server on loopback that says what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Says = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]  # status, body and headers


class ScriptedEndpoint(ThreadingHTTPServer):
    """Answers each request with what `says` returns for its body."""

    daemon_threads = True

    def __init__(self, says: Callable[[dict[str, Any]], Says]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.says = says
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions" and isinstance(self.server, ScriptedEndpoint)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["authorization"])
        status, content, *headers = self.server.says(body)
        self.send_response(status)
        for name, value in (headers[0] if headers else {}).items():
            self.send_header(name, value)
        with suppress(OSError):  # whoever asked may have gone
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(says: Callable[[dict[str, Any]], Says]) -> Iterator[ScriptedEndpoint]:
    """Serve until the block ends; `over` is set then, for answers that wait."""
    with ScriptedEndpoint(says) as endpoint:
        threading.Thread(target=endpoint.serve_forever, args=(0.01,), daemon=True).start()
        yield endpoint
        endpoint.over.set()
        endpoint.shutdown()


def answer(content: Any = None, *calls: Any, finish: str = "stop", **usage: Any) -> Says:
    """A reply with a text, calls (a pair of name and arguments, or the call itself), and what was counted."""
    made = [
        one
        if isinstance(one, dict)
        else {"id": f"c{number}", "type": "function", "function": {"name": one[0], "arguments": one[1]}}
        for number, one in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    value = {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage or None}
    return 200, json.dumps(value).encode()


def question_of(body: dict[str, Any]) -> str:
    """The first thing that the user says."""
    return str(next(one["content"] for one in body["messages"] if one["role"] == "user"))

"""A server on loopback with enough of vLLM's HTTP for the engine, that says what a test wants.

What comes back next for a path is put into `next_answers[path]`, one after the other, or into
`answers[path]` for good:

* a function, which gets the honest body and returns the one to send;
* `Body`: a status, headers and bytes of their own;
* `Wire`: bytes as they go over the wire, at a pace;
* `DROP`, which closes the connection, or `HANG`, which answers nothing until `release`.

A paused one answers completions when it is resumed. An update of weights has vLLM's four phases, and
is refused, as by vLLM, where they come in another order.

Not covered: a model. The honest answer to a completion is what `draw` says: by default one token
and the first stop token.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMPLETIONS = "/v1/completions"
DROP, HANG = "drop", "hang"
_HANG_S = 60.0
_PHASES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


@dataclass(frozen=True)
class Body:
    """An answer of its own status, headers and body."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wire:
    """Bytes as they are written, a chunk each `pause_s`; then it hangs up, unless `keep`."""

    chunks: Iterable[bytes]
    pause_s: float = 0.0
    keep: bool = False


What = Callable[[Any], Any] | Body | Wire | str


def honest_completion(body: Mapping[str, Any], request_id: str, drawn: list[int]) -> dict[str, Any]:
    """Return what vLLM answers when `drawn` is what the model says."""
    stopped = drawn[-1] in body["stop_token_ids"]
    choice = {
        "index": 0,
        "text": "",
        "token_ids": drawn,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [-0.25 - token % 7 for token in drawn], "tokens": [], "text_offset": []},
        "finish_reason": "stop" if stopped else "length",
    }
    return {"id": f"cmpl-{request_id}", "object": "text_completion", "model": body["model"], "choices": [choice]}


def one_token(body: Mapping[str, Any]) -> list[int]:
    """Return one token and the first stop token, as far as they were asked for."""
    stops, most = body["stop_token_ids"], body["max_tokens"]
    return [5, stops[0]][:most] if stops else [5] * most


class StandInVLLM:
    """Use as a context manager; `url` is what the engine wants."""

    def __init__(self, *, draw: Callable[[Mapping[str, Any]], list[int]] = one_token, max_model_len: int = 64) -> None:
        self.draw = draw
        self.max_model_len = max_model_len
        self.next_answers: dict[str, list[What]] = defaultdict(list)
        self.answers: dict[str, What] = {}
        self.asked: list[dict[str, Any]] = []  # bodies of completion requests
        self.paths_asked: list[str] = []
        self.posted: list[tuple[str, Any]] = []  # everything else, the query in the path
        self.weight_version = "default"
        self.adapters: list[str] = []
        self.logprobs_mode = "processed_logprobs"
        self.development = True
        self.version = "0.32.0"
        self.weight_transfer: dict[str, str] | None = None
        self.n_workers = 1
        self.is_updating = False
        self.taken: list[Any] = []  # what the update under way, or the last, has announced
        self._running = threading.Event()
        self._running.set()
        self.worker = "vllm.v1.worker.cpu_worker.CPUWorker"
        from toolgrpo.engines.vllm_worker import WORKER_EXTENSION  # imports PyTorch

        self.extension = WORKER_EXTENSION
        self.unhealthy_answers = 0
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def restart(self) -> None:
        """Be as after a restart: with the first weights, and without a transfer under way."""
        self.weight_version, self.is_updating, self.adapters = "default", False, []
        self._running.set()

    def release(self) -> None:
        """Let what hangs be answered."""
        self._released.set()

    def hold(self) -> None:
        """Let what hangs from now on wait for another `release`."""
        self._released.clear()

    def wait_released(self) -> None:
        self._released.wait(_HANG_S)

    def __enter__(self) -> StandInVLLM:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; also twice."""
        self.release()
        self._running.set()
        self._server.shutdown()
        self._server.server_close()

    def what_next(self, path: str) -> What | None:
        """Return what a test wants said to the next request of this path; None: the truth."""
        queue = self.next_answers[path]
        return queue.pop(0) if queue else self.answers.get(path)

    def honest(self, method: str, target: str, body: Any, request_id: str) -> tuple[int, Any]:
        """Return status and body of what a vLLM in good health would say."""
        path, _, query = target.partition("?")
        if path == COMPLETIONS:
            self._running.wait(_HANG_S)
            if body["model"] not in ("base", *self.adapters):
                return 404, {"error": "no such model"}
            return 200, honest_completion(body, request_id, self.draw(body))
        return self._get(path) if method == "GET" else self._post(path, query, body)

    def _get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            self.unhealthy_answers -= 1
            return (200 if self.unhealthy_answers < 0 else 503), None
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/v1/models":
            cards = [{"id": "base", "parent": None, "max_model_len": self.max_model_len}]
            return 200, {"data": cards + [{"id": name, "parent": "base"} for name in self.adapters]}
        if path == "/server_info" and self.development:
            config = {
                "model_config": {"logprobs_mode": self.logprobs_mode},
                "weight_transfer_config": self.weight_transfer,
                "parallel_config": {"worker_cls": self.worker, "worker_extension_cls": self.extension},
            }
            return 200, {"vllm_config": config}
        if path == "/weight_info" and self.development:
            return 200, {"weight_version": self.weight_version}
        if path == "/get_world_size" and self.development:
            return 200, {"world_size": self.n_workers}
        return 404, None

    def _post(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        self.posted.append((f"{path}?{query}" if query else path, body))
        if not self.development:
            return 404, None
        if path in _PHASES:
            return self._phase(path, body)
        if path == "/pause" and query == "mode=keep":
            self._running.clear()
            return 200, {"status": "paused"}
        if path == "/resume":
            self._running.set()
            return 200, {"status": "resumed"}
        if path == "/v1/load_lora_adapter":
            self.adapters.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        elif path == "/update_weight_version":
            self.weight_version = body["new_version"]
            return 200, {"success": True, "new_version": self.weight_version}
        elif path == "/reset_prefix_cache":
            return 200, {"success": True}
        elif path == "/collective_rpc":
            return 200, {"results": [None]}
        return 200, "done"

    def _phase(self, path: str, body: Any) -> tuple[int, Any]:
        if self.weight_transfer is None:
            return 500, {"error": "Weight transfer not configured"}
        if path != "/init_weight_transfer_engine" and self.is_updating == (path == "/start_weight_update"):
            return 500, {"error": f"{path} out of order"}
        if path == "/start_weight_update":
            self.is_updating, self.taken = True, []
        elif path == "/update_weights":
            self.taken.append(body["update_info"])
        elif path == "/finish_weight_update":
            self.is_updating, self.weight_version = False, body["weight_version"]
        return 200, {"message": "done"}


def _handler_of(server: StandInVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", None)

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self._answer("POST", json.loads(self.rfile.read(length) or "null"))

        def _answer(self, method: str, body: Any) -> None:
            path = self.path.partition("?")[0]
            server.paths_asked.append(path)
            if path == COMPLETIONS:
                server.asked.append(body)
            what = server.what_next(path)
            if what == HANG:
                server.wait_released()
                what = None
            status, honest = server.honest(method, self.path, body, self.headers.get("X-Request-Id", ""))
            if what == DROP:
                self.close_connection = True
            elif isinstance(what, Wire):
                self._write(what)
            elif isinstance(what, Body):
                self._send(what.status, what.content, what.headers)
            else:
                said = what(honest) if callable(what) else honest
                self._send(status, json.dumps(said).encode(), {"content-type": "application/json"})

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _write(self, wire: Wire) -> None:
            self.close_connection = not wire.keep
            for piece in wire.chunks:
                self.wfile.write(piece)
                self.wfile.flush()
                if wire.pause_s:
                    time.sleep(wire.pause_s)
                if server.is_released:
                    return

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:
                self.close_connection = True  # the other side has left

        def log_message(self, *_: Any) -> None:
            pass

    return Handler

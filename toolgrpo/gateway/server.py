"""The endpoint: HTTP on the loopback interface, on a thread of its own, by starlette and uvicorn.

It knows keys and the sessions behind them. What a request asks is done on the session's own event
loop; only reading, writing and waiting happen here. So a request costs its engine's loop no more
than a turn of our own episodes does, and an engine that steps on its loop does not hold up HTTP.

Invariants: every request is answered, in OpenAI's form, errors too; one whose client goes away is
cancelled, down to the engine; one that does not arrive, or not to its end, is let go, and first of all where
descriptors run short; what it holds is bounded (`bounds.py`); nobody outside this machine can connect, unless `host`
says so, and no web page (`toolgrpo.support.foreign_requests`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import secrets
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from toolgrpo.errors import ConfigError
from toolgrpo.gateway.bounds import Bounds, off_loop
from toolgrpo.gateway.openai_forms import (
    ChatRequest,
    ModelAnswer,
    Refused,
    TextRequest,
    error_body,
    model_list,
    read_chat,
    read_text,
)
from toolgrpo.gateway.other_forms import error_of_messages, read_messages, read_responses
from toolgrpo.support.foreign_requests import is_foreign

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise ConfigError(
        f"the gateway needs starlette and uvicorn ({error}); install them: pip install 'toolgrpo[gateway]'"
    ) from error


logger = logging.getLogger(__name__)
_REMEMBERED_KEYS = 100_000  # of episodes that have ended
_WAITING = 1024  # connections that are not accepted yet
_ACCEPTED_AT_ONCE = 16
_MOST_CONNECTIONS = 4096
_STOP_S = 10.0
_STILL_HERE_S = 10.0  # a stream says so this often while a turn is sampled
_PATIENCE_S = 60.0  # for a request to arrive
_HEAD_PATIENCE_S = 20.0
_MAX_HEAD_BYTES = 64 * 1024
_RECEIVED_BYTES = 32 * 1024 * 1024  # of a body that is too large: who sends it reads no answer before its end
_MAX_REQUEST_BYTES = 64 * 1024 * 1024  # on the wire


Speaker = Callable[[ChatRequest | TextRequest], Coroutine[Any, Any, ModelAnswer]]
"""Answers the requests of one key: `GatewaySession.answer`, or what makes a session for each request."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    speaker: Speaker
    loop: asyncio.AbstractEventLoop


class Endpoint:
    """Serves the sessions that are admitted to it, whatever model their requests name: there is one.

    `everyone` answers requests without a known key.
    """

    def __init__(
        self,
        models: Sequence[str],
        window: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        everyone: bool = False,
        patience_s: float = _PATIENCE_S,
        connections: int | None = None,
    ) -> None:
        self._models = tuple(models)
        self._window = window
        self._bounds = Bounds(window)
        self._host = host
        self._patience_s = patience_s
        self._everyone = everyone
        self._warned = False  # of another name
        self._admitted: dict[str, _Admitted] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED_KEYS)
        self._ended_keys: set[str] = set()
        self._socket = listening(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/v1"
        app = Starlette(
            routes=[
                self._route("GET", "/health", _healthy),
                self._route("GET", "/v1/models", self._list_models),
                self._route("GET", "/v1/models/{name:path}", self._show_model),
                *(self._route("POST", path, partial(self._asked, read)) for path, read in _READERS.items()),
            ],
            exception_handlers={404: _not_found, 405: _not_found, Exception: _failed},
        )
        app.router.redirect_slashes = False  # it would send a client to whatever host its request names
        most = connections or _most_connections()
        own = {"patience_s": min(patience_s, _HEAD_PATIENCE_S), "most": most, "open": {}}
        config = uvicorn.Config(
            app,
            http=type("Connection", (_Connection,), own),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(_STOP_S) // 2,
            timeout_keep_alive=120,
            backlog=min(_ACCEPTED_AT_ONCE, most),
        )
        gc.freeze()  # else what requests hold makes Python look through all of PyTorch again, which stops every thread
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._serve, name="toolgrpo-gateway", daemon=True)
        self._thread.start()

    def admit(self, speaker: Speaker, loop: asyncio.AbstractEventLoop, key: str | None = None) -> str:
        """Return a key under which this speaker answers, on this loop. The empty key is that of `everyone`."""
        if key == "" and not self._everyone:
            raise ConfigError("an empty key would let everyone in; give one that is not empty, or none")
        key = f"sk-episode-{secrets.token_urlsafe(16)}" if key is None else key
        self._admitted[key] = _Admitted(speaker, loop)
        return key

    def dismiss(self, key: str) -> None:
        """Let a key be good for nothing any more."""
        if self._admitted.pop(key, None) is not None:
            if len(self._ended) == self._ended.maxlen:
                self._ended_keys.discard(self._ended[0])
            self._ended.append(key)
            self._ended_keys.add(key)

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()
        gc.unfreeze()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    # --- requests -------------------------------------------------------------------------------------

    def _route(self, method: str, path: str, handle: Callable[[Request], Coroutine[Any, Any, Response]]) -> Route:
        async def answered(request: Request) -> Response:
            try:
                said = request.headers
                doubled = any(len(said.getlist(name)) > 1 for name in ("host", "origin"))
                port = self._socket.getsockname()[1]
                if doubled or is_foreign(said.get("host"), said.get("origin"), served_on=self._host, port=port):
                    says = "requests from web pages, or for other host names, are refused"
                    raise Refused(403, "foreign_page", says, kind=_AUTH)
                return await handle(request)
            except Refused as refused:
                return _refusal(refused, request.scope["path"])
            except ClientDisconnect:
                return Response(status_code=499)

        return Route(path, answered, methods=[method])

    async def _list_models(self, request: Request) -> Response:
        self._speaker(request)
        return JSONResponse(model_list(self._models, self._window))

    async def _show_model(self, request: Request) -> Response:
        self._speaker(request)
        name = request.path_params["name"]
        if name not in self._models:
            raise Refused(404, "model_not_found", f"the model {name!r} is not served here; {self._named()} is")
        return JSONResponse(model_list([name], self._window)["data"][0])

    async def _asked(self, read: Reader, request: Request) -> Response:
        admitted = self._speaker(request)
        body = await self._body(request)
        asked = await off_loop(lambda: _read(read, self._bounds.read(body)))
        if asked.model not in self._models and not self._warned:
            self._warned = True
            logger.warning(
                "a request names the model %r, and %s answers it, as every request here; give a model that is not "
                "the policy (a judge) a client with its own address",
                asked.model,
                self._named(),
            )
        return await _spoken(request, admitted.loop, admitted.speaker(asked), asked)

    async def _body(self, request: Request) -> bytearray:
        """Return a body, which is counted as it comes; of one that is too large nothing is kept."""
        body, n_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(self._patience_s):
                async for chunk in request.stream():
                    n_bytes += len(chunk)
                    if n_bytes <= self._bounds.n_bytes:
                        body += chunk
                    elif n_bytes > _RECEIVED_BYTES:
                        break
        except TimeoutError as error:
            late = f"the body did not arrive completely within {self._patience_s:g} s"
            raise Refused(408, "request_timeout", late) from error
        self._bounds.check_bytes(n_bytes)
        return body

    def _speaker(self, request: Request) -> _Admitted:
        """Return who answers the key of a request."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        admitted = self._admitted.get(key) or (self._admitted.get("") if self._everyone else None)
        if admitted is not None:
            return admitted
        if key in self._ended_keys:
            raise Refused(
                401, "episode_over", "the episode of this key has ended; each episode has its own key", kind=_AUTH
            )
        what = "no key was given" if not key else "this key is not known"
        raise Refused(401, "invalid_api_key", f"{what}; use the api key that the agent was called with", kind=_AUTH)

    def _named(self) -> str:
        return " or ".join(map(repr, self._models))


class _Server(uvicorn.Server):
    """A server that accepts a few connections at a time, so that those which are too many never use up descriptors."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_WAITING)  # uvicorn has set the length of this queue to what it accepts at once


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """A connection that is closed where nothing, or only a part of a request's head, comes in time.

    `open` holds at most `most` of them. A further one takes the place of one that is not being answered, first of one
    that has sent no request yet.
    """

    patience_s: ClassVar[float]
    most: ClassVar[int]
    open: ClassVar[dict[_Connection, None]]  # oldest first
    _waiting: asyncio.TimerHandle | None = None
    _n_bytes = 0  # of a request that has not ended

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.open[self] = None
        if len(self.open) > self.most:
            self._make_room()
        self._wait()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        arriving = self.cycle is before and not self._answers()
        if self.cycle is not before or (arriving and self._waiting is None):
            self._n_bytes = 0  # a request begins
        self._n_bytes += len(data)
        if self._n_bytes > (_MAX_HEAD_BYTES if arriving else _MAX_REQUEST_BYTES):
            self.transport.abort()
        elif not arriving:
            self._wait_no_more()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.pop(self, None)
        self._wait_no_more()
        super().connection_lost(exc)

    def _answers(self) -> bool:
        """Return whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        others = [one for one in self.open if one is not self and (not one._answers() or one.cycle.more_body)]
        leaving = min(others, key=lambda one: one.cycle is not None, default=self)
        del self.open[leaving]
        if leaving is self:
            says = f"{self.most} requests are open; try again later"
            refused = Refused(503, "too_many_connections", says, kind="server_error")
            body = bytes(_refusal(refused).body)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + body)
            self.transport.close()
        else:
            leaving.transport.abort()

    def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(self.patience_s, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None


def _most_connections() -> int:
    """Return how many connections leave this process descriptors enough for everything else."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(limit // 2, limit - 256))


_AUTH = "authentication_error"
Reader = Callable[[Any, str], ChatRequest | TextRequest]
_READERS: Mapping[str, Reader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
    "/v1/responses": read_responses,
    "/v1/messages": read_messages,
}


def _read(reader: Reader, body: Any) -> ChatRequest | TextRequest:
    """Return what a body asks for; whatever is wrong with it is a refusal of this request."""
    try:
        return reader(body, secrets.token_hex(8))
    except Refused:
        raise
    except Exception as error:
        raise Refused(400, "invalid_value", f"the request cannot be read: {type(error).__name__}: {error}") from error


async def _spoken(
    request: Request,
    loop: asyncio.AbstractEventLoop,
    said: Coroutine[Any, Any, ModelAnswer],
    asked: ChatRequest | TextRequest,
) -> Response:
    """Have a request answered on its loop, and write the answer in the form that was asked for."""
    try:
        speaking = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(said, loop))
    except RuntimeError:  # its loop has ended, and the episode with it
        said.close()
        raise Refused(401, "episode_over", "the episode of this key has ended", kind=_AUTH) from None
    if asked.stream:
        return StreamingResponse(_stream(speaking, asked), media_type="text/event-stream")
    leaving = asyncio.ensure_future(_left(request))
    try:
        both: list[asyncio.Future[Any]] = [speaking, leaving]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not speaking.done():
            raise ClientDisconnect
        return JSONResponse(asked.answer(_result(speaking)))
    finally:
        leaving.cancel()
        speaking.cancel()


async def _stream(speaking: asyncio.Future[ModelAnswer], asked: ChatRequest | TextRequest) -> AsyncIterator[str]:
    """Give an answer as events. A turn comes in one piece, when it is whole; until then the stream is kept alive.

    Where the client goes away, starlette closes this, and the turn is cancelled.
    """
    try:
        while not (await asyncio.wait({speaking}, timeout=_STILL_HERE_S))[0]:
            yield ": sampling\n\n"
        try:
            for chunk in asked.chunks(_result(speaking)):
                yield _event(chunk, asked.named_events)
        except Refused as refused:
            yield _event(asked.error(refused), asked.named_events)
        if not asked.named_events:
            yield "data: [DONE]\n\n"
    finally:
        speaking.cancel()


def _result(speaking: asyncio.Future[ModelAnswer]) -> ModelAnswer:
    if speaking.cancelled():
        raise Refused(401, "episode_over", "the episode of this key ended while the request was open", kind=_AUTH)
    return speaking.result()


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(chunk: dict[str, Any], named: bool) -> str:
    head = f"event: {chunk.get('type', 'error')}\n" if named else ""
    return f"{head}data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _refusal(refused: Refused, path: str = "") -> Response:
    unread = refused.status in (408, 413)  # the rest of such a request is not waited for
    body = error_of_messages(refused) if path == "/v1/messages" else error_body(refused)
    return JSONResponse(body, refused.status, {"connection": "close"} if unread else None)


async def _not_found(request: Request, error: Exception) -> Response:
    served = f"/health, /v1/models, {', '.join(_READERS)}"
    return _refusal(
        Refused(
            404, "not_found", f"{request.method} {request.scope['path'][:200]} is not served here; there are {served}"
        )
    )


async def _failed(request: Request, error: Exception) -> Response:
    return _refusal(Refused(500, "internal_error", f"{type(error).__name__}: {error}", kind="server_error"))


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, for asyncio sends at once only what it knows to be that: else each answer waits 40 ms for an ACK.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(_WAITING)  # who connects before the server has started waits for it
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"nothing can be served on {host}:{port} ({error.strerror}); choose another --port, or 0 for a free one"
        ) from error
    opened.set_inheritable(False)
    return opened

"""A server of OpenEnv as an environment: one session an episode, and one tool, `step`, which takes the server's actions.

`OPENENV_BASE_URL` says where the server is (http://127.0.0.1:8000). It must be up when the tools are
loaded, as the parameters of `step` are the action schema that it publishes. A row's column `openenv`,
if there is one, is what its `reset` is given ({"seed": 3}).

The reward is the sum of what the server gave; `done` ends the episode. Every request has
`OPENENV_TIMEOUT_S` seconds (20; keep it below --tool_timeout). A server that is gone or does not
answer costs the episode, which is dropped; an action that it refuses is an error that the model reads.

This speaks the server's WebSocket protocol itself: OpenEnv's own client cannot be imported without
`fastmcp`, which wants version 1 of `mcp` where we have 2. Not covered: servers whose actions are
calls of MCP tools.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from toolgrpo import DropEpisode
from toolgrpo.tools import tool

__all__ = ["ENVIRONMENT"]

BASE_URL = os.environ.get("OPENENV_BASE_URL", "http://127.0.0.1:8000").rstrip("/")
TIMEOUT_S = float(os.environ.get("OPENENV_TIMEOUT_S", "20"))
_THE_MODELS_FAULT = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_FULL = "CAPACITY_REACHED"


class _Refused(Exception):
    """The server answered with an error; `code` is its own."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        details = [f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in data.get("errors", ())]
        super().__init__("; ".join([str(data.get("message")), *details]))
        self.code = data.get("code")


class _Session:
    """One episode."""

    def reset(self, openenv: Mapping[str, Any] | None = None, **row: Any) -> str:
        self._reward, self._done = 0.0, False
        parameters = {key: value for key, value in (openenv or {}).items() if value is not None}
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            self._connect()
            try:
                return f"\n\n{self._see(self._ask('reset', parameters))}"
            except _Refused as refused:
                if refused.code != _FULL:
                    raise RuntimeError(f"{BASE_URL} refused reset({parameters}): {refused}") from None
                if time.monotonic() > give_up:
                    raise DropEpisode(
                        f"{BASE_URL} had no free session for {TIMEOUT_S:g} s: let its max_concurrent_envs be the number of "
                        f"episodes at once ({refused})"
                    ) from None
            time.sleep(0.2)

    def reward(self) -> float:
        return self._reward

    def episode_over(self) -> bool:
        return self._done

    def close(self) -> None:
        with suppress(OSError, WebSocketException, AttributeError):  # there may never have been a connection
            self._socket.send('{"type": "close"}')
            self._socket.close()

    def _step(self, action: dict[str, Any]) -> str:
        if self._done:
            raise RuntimeError("the episode is over")
        try:
            return self._see(self._ask("step", action))
        except _Refused as refused:
            raise RuntimeError(str(refused)) from None

    def _see(self, data: Mapping[str, Any]) -> str:
        """Keep reward and done; return the observation as text: the one text that it is, or JSON."""
        self._reward += float(data.get("reward") or 0.0)
        self._done = bool(data.get("done"))
        seen = data.get("observation") or {}
        shown = {key: value for key, value in seen.items() if key != "metadata" and value is not None}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)

    def _connect(self) -> None:
        try:
            self._socket: ClientConnection = connect(
                f"ws{BASE_URL.removeprefix('http')}/ws", open_timeout=TIMEOUT_S, close_timeout=2, max_size=2**24
            )
        except (OSError, WebSocketException) as error:
            raise DropEpisode(f"{BASE_URL} cannot be reached: {type(error).__name__}: {error}") from error

    def _ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # a server that hangs up has said why before, and that is read below
                self._socket.send(json.dumps(message))
            reply = json.loads(self._socket.recv(timeout=TIMEOUT_S))
            what, content = reply["type"], dict(reply["data"])
        except (OSError, WebSocketException, ValueError, KeyError, TypeError) as error:  # OSError: TimeoutError too
            raise DropEpisode(
                f"{BASE_URL} did not answer {kind} within {TIMEOUT_S:g} s, or is gone: {type(error).__name__}: {error}"
            ) from error
        if what != "error":
            return content
        refused = _Refused(content)
        if refused.code in (*_THE_MODELS_FAULT, _FULL):
            raise refused
        raise DropEpisode(f"{BASE_URL} failed at {kind}: {refused.code}: {refused}")


def _step() -> Callable[..., str]:
    try:
        with urllib.request.urlopen(f"{BASE_URL}/schema", timeout=TIMEOUT_S) as reply:
            action = json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"{BASE_URL}/schema does not give the actions of an OpenEnv server ({type(error).__name__}: {error}). Start the "
            "server, or say where it is with OPENENV_BASE_URL"
        ) from error
    fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
    parameters = {key: value for key, value in action.items() if key not in ("title", "description")}

    def step(self: _Session, **action: Any) -> str:
        return self._step(action)

    schema = {
        "name": "step",
        "description": action.get("description") or "Act in the environment.",
        "parameters": {**parameters, "properties": fields},
    }
    return tool(schema=schema)(step)


ENVIRONMENT = type("OpenEnv", (_Session,), {"step": _step()})

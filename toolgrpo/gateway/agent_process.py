"""An agent in the process of its episode: what the tool workers hold of it.

To the workers an agent is an environment: loaded once by their supervisor, forked for each episode,
with the deadlines, the group kill and the output log that environments have. `reset` is given the
episode, `play` runs the agent.

Light on purpose: of this package the workers import only this module, `first_requests` and
`toolgrpo.episode.dropped`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolgrpo.errors import PluginError
from toolgrpo.support.plugin_files import import_file
from toolgrpo.tools.plugin.schema import called

_NO_TIMEOUT_S = 24 * 3600.0  # of a client's request: the episode's deadline comes first
_LAST_LINES = 400  # characters of what a command said before it failed


# A client's first requests, made once before the processes of the episodes are forked.
#
# OpenAI's package and what it stands on import much of themselves, and build their models, only when
# a request is made, which each process that was forked before would do again. So some requests are made
# here, over a real connection, to a server that gives the same answer to all.

_REQUESTS = 8  # Python makes code faster where it has run so often, and those pages stay shared
_WAIT_S = 10.0
_CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_MESSAGE = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [_CALL]}
_ANSWER = {
    "id": "0",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "tool_calls", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def make_first_requests(client_at: Callable[[str, str], Any], openai: Any) -> None:
    """Let a client of OpenAI's package, made of a URL and a key, talk to a server that is gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(_WAIT_S)
        answering = threading.Thread(target=_answer, args=(listening,), daemon=True)
        answering.start()
        try:
            client = client_at(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "-").with_options(timeout=_WAIT_S)
            if isinstance(client, openai.AsyncOpenAI):
                asyncio.run(_talk_async(client))
            else:
                _talk(client)
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends an `accept` that nobody came to
            answering.join(_WAIT_S)


async def _talk_async(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": ""}]
    async with client:
        for _ in range(_REQUESTS):
            said = await client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])
            _go_on(messages, said)


def _talk(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": ""}]
    with client:
        for _ in range(_REQUESTS):
            said = client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])
            _go_on(messages, said)


def _go_on(messages: list[Any], said: Any) -> None:
    message = said.choices[0].message
    messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": ""} for call in message.tool_calls)]


def _answer(listening: socket.socket) -> None:
    """Serve one connection until its client closes it."""
    body = json.dumps(_ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with suppress(OSError, ValueError):
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as asked:
            connection.settimeout(_WAIT_S)
            while line := asked.readline():
                length = 0
                while line.strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    line = asked.readline()
                asked.read(length)
                connection.sendall(head.encode() + body)


@dataclass(frozen=True, slots=True)
class PythonAgent:
    """`run(client, row)` of a file. Called, it makes what plays one episode."""

    path: str
    attribute: str = "run"

    @property
    def __name__(self) -> str:
        return f"agent {self.path}"

    def __call__(self) -> AgentProcess:
        return AgentProcess(_function_of(self.path, self.attribute))


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """A command line. The row comes in on its standard input, the reward is its last line of output."""

    arguments: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return f"agent {self.arguments[0]}"

    def __call__(self) -> AgentProcess:
        if shutil.which(self.arguments[0]) is None:
            raise PluginError(
                f"--agent {self.arguments[0]}: there is no such command, and no Python file of that name; give FILE.py with "
                f"`async def run(client, row)`, or a command line whose first word can be run"
            )
        return AgentProcess(self.run)

    def run(self, client: None, row: Mapping[str, Any]) -> Any:
        """Run the command to its end; what it prints beside its last line goes to the log."""
        given = json.dumps(dict(row), default=str)
        done = subprocess.run(self.arguments, input=given, stdout=subprocess.PIPE, text=True, check=False)
        sys.stdout.write(done.stdout)
        sys.stdout.flush()
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0:
            said = " | ".join(lines)[-_LAST_LINES:]
            raise RuntimeError(
                f"the command {self.arguments[0]} ended with exit code {done.returncode}: {said or 'no output'}"
            )
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None


class AgentProcess:
    """One episode of an agent, as an environment."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._row: Mapping[str, Any] = {}
        self._url = self._key = self._model = ""

    def reset(self, **episode: Any) -> None:
        """Take the row, and where the policy answers; libraries look for that in the environment."""
        self._row = episode["row"]
        self._url, self._key, self._model = episode["url"], episode["key"], episode["model"]
        os.environ.update(
            OPENAI_BASE_URL=self._url, OPENAI_API_BASE=self._url, OPENAI_API_KEY=self._key, OPENAI_MODEL=self._model
        )
        os.environ.update(
            ANTHROPIC_BASE_URL=self._url.removesuffix("/v1"), ANTHROPIC_API_KEY=self._key, ANTHROPIC_MODEL=self._model
        )
        here = urlsplit(self._url).hostname
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", here]))

    def play(self) -> str:
        """Run the agent, and return what it returned as JSON."""
        if isinstance(getattr(self._run, "__self__", None), CommandAgent):
            returned = self._run(None, self._row)
        else:
            returned = self._run(_client(_kind_of(self._run), self._url, self._key), self._row)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
        try:
            return json.dumps(outcome_of(returned))
        except PluginError as error:  # the user's mistake, which ends the run; what an agent raises costs its episode
            return json.dumps({"complaint": str(error)})


def _client(kind: str, url: str, key: str) -> Any:
    """Return a client of OpenAI's package for one episode."""
    import openai

    http = openai.DefaultAsyncHttpxClient if kind == "AsyncOpenAI" else openai.DefaultHttpxClient
    return getattr(openai, kind)(
        base_url=url,
        api_key=key,
        max_retries=0,  # nothing on the way is lost, and an engine's failure ends the episode
        timeout=_NO_TIMEOUT_S,
        http_client=http(trust_env=False, verify=False),  # plain HTTP to this machine: no proxy, no certificates
    )


def _kind_of(run: Callable[..., Any]) -> str:
    """Return which client of OpenAI's package a function gets."""
    return "AsyncOpenAI" if inspect.iscoroutinefunction(called(inspect.unwrap(run))) else "OpenAI"


def outcome_of(returned: Any) -> dict[str, Any]:
    """Return a reward (None: it gives none) and named numbers, of what an agent returned."""
    named = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    reward = named.pop("reward", None)
    complaint = "an agent returns a number, None, or a dict of numbers with the reward under `reward`"
    if reward is not None:
        reward = _number(reward, complaint)
    return {"reward": reward, "metrics": {str(name): _number(value, complaint) for name, value in named.items()}}


def _number(value: Any, complaint: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise PluginError(f"{complaint}, each finite; got {value!r:.80}")
    return number


@cache  # once, in the process that the others are forked from
def _function_of(path: str, attribute: str) -> Callable[..., Any]:
    run = getattr(import_file(Path(path)), attribute, None)
    if not callable(run):
        raise PluginError(
            f"No {attribute} found in {path}. Define `async def {attribute}(client, row)`, or `def`, that returns the reward."
        )
    _check_parameters(run, f"{path}:{attribute}", ("client", "row"))
    _import_clients(path, _kind_of(run))
    made: Callable[..., Any] = run
    return made


def _check_parameters(run: Callable[..., Any], where: str, names: Sequence[str]) -> None:
    try:
        inspect.signature(run).bind(*names)
    except TypeError as error:
        raise PluginError(f"{where} is called with {' and '.join(names)}, and does not take them: {error}") from error


def _import_clients(path: str, kind: str) -> None:
    """Import what every episode will want, once, before the processes are forked."""
    try:
        import openai
    except ImportError as error:
        raise PluginError(
            f"the agent {path} gets a client of the package openai, which is not here: pip install 'toolgrpo[gateway]'"
        ) from error
    with suppress(Exception):  # it only saves time
        make_first_requests(partial(_client, kind), openai)

"""An agent in the process of its episode: what the tool workers hold of it.

To the workers an agent is an environment: loaded once by their supervisor, forked for each episode,
with the deadlines, the group kill and the output log that environments have. `reset` is given the
episode, `play` runs the agent.

Light on purpose: of this package the workers import only this module, `first_requests` and
`toolgrpo.drops`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from toolgrpo.errors import PluginError
from toolgrpo.gateway.first_requests import make_first_requests
from toolgrpo.plugin_files import import_file

_NO_TIMEOUT_S = 24 * 3600.0  # of a client's request: the episode's deadline comes first
_LAST_LINES = 400  # characters of what a command said before it failed


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
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))

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
    return "AsyncOpenAI" if inspect.iscoroutinefunction(run) else "OpenAI"


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

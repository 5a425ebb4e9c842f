"""The user's agent as what plays episodes: `AgentPlayer`.

For each episode there is a session behind a key of its own and a process that runs the agent, which
is told the key. When the agent has returned, what the session holds is the trajectory, and what was
returned its reward.

What ends an episode: the agent returns (FINISHED, or the limit that its session met); the deadline
passes (DEADLINE); the engine fails (ENGINE_FAILURE); the agent raises, dies, or raises `DropEpisode`
(DROPPED). Its process is gone and no request is open then, however it ended. An agent that fails
costs its episode and never the run; one that returns what is no reward ends it, as a plugin's error.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolgrpo.chat.bridge_proof import can_hear_users
from toolgrpo.episode.dropped import Drop, DropCause, DropEpisode
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import ConfigError, InfrastructureError, PluginError
from toolgrpo.gateway.agent_process import CommandAgent, PythonAgent
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.scheduler import Episode, EpisodeRunner
from toolgrpo.tools.backends import EnvironmentBackend, EnvironmentSession
from toolgrpo.tools.plugin.plugin_file import PluginSource
from toolgrpo.tools.plugin.tool_source import asked_for, environment_source
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.pool import WorkerPool
from toolgrpo.tools.workers.tool_worker import PoolOptions

if TYPE_CHECKING:
    from toolgrpo.gateway.server import Endpoint


AGENT_TIMEOUT_S = 3600.0  # of an episode without `episode_timeout`
MODEL_NAME = "policy"  # what an agent asks for, whichever model it is
_MEMORY_MB = 16_384  # of address space for a Python agent; commands have no limit, some reserve far more than they use


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Reason why an agent's process ended."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    drop: Drop | None = None
    timed_out: bool = False


def load_agent(agent: str | Path, *, host: str = "127.0.0.1", log_path: Path | None = None) -> AgentPlayer:
    """Load what plays episodes: `FILE.py`, `FILE.py:function`, or a command line.

    `host` is the address of this machine that the agent is told; one that is not local lets other machines in.
    """
    _check_host(host)
    made = agent_of(str(agent))
    source = environment_source(made)
    memory_mb = 0
    if isinstance(made, PythonAgent):
        source = replace(source, secrets=asked_for(PluginSource(path=made.path)))
        memory_mb = _MEMORY_MB
    options = PoolOptions(workers=1, memory_mb=memory_mb)
    pool = WorkerPool({"tools": None, "environment": asdict(source)}, options, OutputLog(log_path))
    return AgentPlayer(pool, made.__name__.removeprefix("agent "), host)


def _check_host(host: str) -> None:
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"agent_host {host!r} stands for all addresses, but an agent needs one; give that one")
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"agent_host {host!r} is not an address of this machine: {error.strerror}") from error


def check_limits(limits: EpisodeLimits) -> None:
    """Raise ConfigError for limits of our own loop, of which an agent's episodes would know nothing."""
    given = [name for name in ("context", "max_tool_calls", "max_user_turns") if getattr(limits, name) is not None]
    if given:
        raise ConfigError(
            f"{given[0]} limits the built-in loop, but an agent plays the episode itself: it writes its own history, runs "
            f"its own tools and plays its own user; leave {given[0]} out"
        )


def agent_of(given: str) -> PythonAgent | CommandAgent:
    """Return what a flag's value names."""
    path = given.partition(":")[0]
    is_file = path.endswith(".py") and (" " not in given.strip() or Path(path).is_file())
    try:
        words = [given] if is_file else shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"--agent {given!r} is not a command line ({error}), and not a Python file") from error
    if not words:
        raise ConfigError("--agent is given without a value; give FILE.py or a command line, or leave the flag out")
    path, _, attribute = words[0].partition(":")
    if len(words) == 1 and path.endswith(".py"):
        return PythonAgent(path, attribute or "run")
    return CommandAgent(tuple(words))


class AgentPlayer:
    """Plays episodes by an agent; a `Player`. One endpoint serves all of them."""

    def __init__(self, pool: WorkerPool, name: str, host: str) -> None:
        spec = pool.spec.environment
        assert spec is not None
        self.name = name
        self._host = host
        self._pool = pool
        self._spec = spec
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()
        self._hears: tuple[object, bool] | None = None  # of this tokenizer: whether a user may speak again

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        """Run one episode to its end."""
        session = GatewaySession(shared, episode, bridges_users=self._bridges_users(shared))
        endpoint = self._serving(shared)
        key = endpoint.admit(session.answer, asyncio.get_running_loop())
        deadline_s = shared.parts.limits.deadline_s or AGENT_TIMEOUT_S
        try:
            outcome = await self._outcome(session, endpoint.url, key, deadline_s)
        except InfrastructureError as error:
            return session.trajectory(StopReason.ENGINE_FAILURE, failure=f"{type(error).__name__}: {error}")
        finally:
            endpoint.dismiss(key)
            await session.end()
        if outcome.timed_out:
            return session.trajectory(StopReason.DEADLINE)
        if outcome.drop is not None:
            return session.trajectory(StopReason.DROPPED, dropped=outcome.drop)
        reason = session.limit or StopReason.FINISHED
        return session.trajectory(reason, reward=outcome.reward, metadata={"agent": dict(outcome.metrics)})

    def close(self) -> None:
        """End every agent and the endpoint. Safe to call twice."""
        try:
            self._pool.close()
        finally:
            if self._endpoint is not None:
                self._endpoint.close()

    def _bridges_users(self, shared: EpisodeRunner) -> bool:
        """Return whether the chat format goes on with what a user says; proven once for a tokenizer."""
        if self._hears is None or self._hears[0] is not shared.parts.tokenizer:
            self._hears = shared.parts.tokenizer, can_hear_users(shared.parts.chat, shared.parts.tokenizer)
        return self._hears[1]

    def _serving(self, shared: EpisodeRunner) -> Endpoint:
        """Return the endpoint, which is opened when the first episode begins."""
        with self._lock:
            if self._endpoint is None:
                from toolgrpo.gateway.server import Endpoint  # starlette takes half a second to import

                self._endpoint = Endpoint([MODEL_NAME], shared.parts.engine.max_model_len, host=self._host)
            return self._endpoint

    async def _outcome(self, session: GatewaySession, url: str, key: str, deadline_s: float) -> _Outcome:
        """Run the agent until it ends or its session fails; its process is gone afterwards."""
        given = {"row": dict(session.episode.row), "url": url, "key": key, "model": MODEL_NAME}
        environment = EnvironmentBackend(self._pool, self._spec, deadline_s).session(given)
        playing = asyncio.ensure_future(_played(environment, self._spec.tools[0], deadline_s))
        try:
            both: list[asyncio.Future[Any]] = [playing, session.failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()  # raises it
            return playing.result()
        finally:
            playing.cancel()
            await asyncio.wait({playing})
            await environment.leave()


async def _played(environment: EnvironmentSession, play: ToolSpec, deadline_s: float) -> _Outcome:
    try:
        async with asyncio.timeout(deadline_s):
            await environment.open()
            reply = await environment.call(play, {})
    except TimeoutError:
        return _Outcome(timed_out=True)
    except DropEpisode as drop:  # its process could not be started
        return _Outcome(drop=Drop(DropCause.AGENT, drop.reason))
    if reply.error is ToolErrorKind.TIMEOUT:
        return _Outcome(timed_out=True)
    if reply.error is ToolErrorKind.DROPPED:
        return _Outcome(drop=Drop(DropCause.AGENT, reply.text))
    if reply.error is not None:
        how = "the agent's process ended" if reply.error is ToolErrorKind.DIED else "the agent failed"
        return _Outcome(drop=Drop(DropCause.AGENT, f"{how}: {reply.text}"))
    returned = json.loads(reply.text)
    if "complaint" in returned:
        raise PluginError(returned["complaint"])
    return _Outcome(returned["reward"], returned["metrics"])

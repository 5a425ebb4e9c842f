"""Scripted episodes: an engine that says what a test tells it to say, a clock whose time costs nothing,
and the real episode loop over both.

Invariants: `ScriptedEngine` keeps the contract of `toolgrpo.engines.base` (the contract suite runs over it as
over the real ones); the same script and the same requests give the same samples; nothing is random
and nothing looks at the wall clock except through the event loop, so `FakeClock` makes delays free.

`FakeClock().run(coroutine)` runs a coroutine on an event loop whose time is the clock's: whenever
nothing is ready, the clock jumps to the next timer. `asyncio.sleep`, `asyncio.timeout` and every
deadline built on them keep their order and their exact lengths, and cost nothing.

Not covered: a model. Log-probabilities are made up (`scripted_logprob`), but differ by token, so
that a test sees it when ids and log-probabilities are shifted against each other. Threads and
subprocesses live in real time: while one of them is waited for with a timeout, a `FakeClock` jumps
to that timeout at once.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.checks import check_request
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import EngineError
from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner, Player, Rollouts, Scheduler
from toolgrpo.rollout.limits import TextTokenizer
from toolgrpo.testing.chat import ByteChat
from toolgrpo.tools.base import ToolProvider

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """One turn, as the fake model would say it.

    Without a stop token at its end, the request's first one is added.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None  # None: `scripted_logprob` of each token
    delay_s: float = 0.0  # besides the engine's `step_s` for each token
    stalls: bool = False  # never answers: only cancellation or `close` ends the request


Reply = Sequence[int] | ScriptedReply | Exception
Script = Callable[[SampleRequest, int], Reply]


def scripted_logprob(token: int) -> float:
    """Return the made-up log-probability of a token, always the same and below zero."""
    return -(1 + token % 97) / 100


class ScriptedEngine:
    """A deterministic engine for tests.

    `script` is a list of replies, one a request, or a function of the request and its number (from
    0). A reply is the ids of the turn, a `ScriptedReply`, or an exception, which is raised. A reply
    is cut after its first stop token and at `max_tokens`, as a real engine would.

    What tests look at: `requests` (each with its ids as they were), `open_requests`,
    `most_open_requests`, `answered`, `failed`, `cancelled`, `weight_loads`, `is_open`,
    `is_shut_down`.
    """

    name = "scripted"
    same_numbers_as_trainer = False
    takes_weights_while_open = True

    def __init__(
        self,
        script: Script | Sequence[Reply],
        *,
        max_model_len: int = 4096,
        step_s: float = 0.0,
        gives_logprobs: bool = True,
    ) -> None:
        self._script = script if callable(script) else _from_list(script)
        self.max_model_len = max_model_len
        self.step_s = step_s
        self.gives_logprobs = gives_logprobs
        self.requests: list[SampleRequest] = []
        self._requests_before = 0
        self.most_open_requests = 0
        self.answered = 0
        self.failed = 0
        self.cancelled = 0
        self.weight_loads = 0
        self.is_open = False
        self.is_shut_down = False
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def open_requests(self) -> int:
        return len(self._waiting)

    async def open(self) -> None:
        if self.is_open:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        if self.is_shut_down:
            raise EngineError("the engine was shut down")
        self.is_open = True

    async def sample(self, request: SampleRequest) -> Sample:
        if not self.is_open:
            raise EngineError("the engine is not open")
        check_request(request, self.max_model_len)
        number = self._requests_before + len(self.requests)
        kept = replace(request, ids=tuple(request.ids))
        self.requests.append(kept)
        reply = self._script(kept, number)
        if isinstance(reply, Exception):
            await self._pass_time(0.0)
            self.failed += 1
            raise reply
        if not isinstance(reply, ScriptedReply):
            reply = ScriptedReply(reply)
        sample = _cut(reply, request, with_logprobs=self.gives_logprobs)
        await self._pass_time(None if reply.stalls else reply.delay_s + self.step_s * len(sample.ids))
        self.answered += 1
        return sample

    async def close(self) -> None:
        self.is_open = False
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(EngineError("the engine was closed while this request was open"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:  # walked to the end, as a real engine does: gathering weights is collective
            pass
        self.weight_loads += 1

    def shutdown(self) -> None:
        self.is_shut_down = True

    def sampling_state(self) -> dict[str, Any]:
        """Return the number of requests so far: a resumed run goes on in the script from there."""
        return {"requests": self._requests_before + len(self.requests)}

    def restore_sampling_state(self, state: dict[str, Any]) -> None:
        self._requests_before = state["requests"] - len(self.requests)

    async def _pass_time(self, seconds: float | None) -> None:
        """Be an open request for so long (None: for good), and count how it ended."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _wake, waiting)
        self._waiting.add(waiting)
        self.most_open_requests = max(self.most_open_requests, len(self._waiting))
        try:
            await waiting
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except EngineError:
            self.failed += 1
            raise
        finally:
            self._waiting.discard(waiting)
            if timer is not None:
                timer.cancel()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _from_list(replies: Sequence[Reply]) -> Script:
    def script(request: SampleRequest, number: int) -> Reply:
        if number >= len(replies):
            raise AssertionError(f"the script has {len(replies)} replies, but request number {number + 1} came")
        return replies[number]

    return script


def _cut(reply: ScriptedReply, request: SampleRequest, *, with_logprobs: bool) -> Sample:
    """Return what is left of a reply after its first stop token and `max_tokens`."""
    ids = [int(token) for token in reply.ids]
    logprobs = [scripted_logprob(token) for token in ids] if reply.logprobs is None else list(reply.logprobs)
    if len(logprobs) != len(ids):
        raise ValueError(f"a scripted reply has {len(ids)} tokens but {len(logprobs)} log-probabilities")
    stop = next((n for n, token in enumerate(ids) if token in request.stop_ids), None)
    if stop is None and len(ids) < request.max_tokens:
        if not request.stop_ids:
            raise ValueError(
                f"a scripted reply of {len(ids)} tokens has no stop token, and the request names none that could be added"
            )
        stop = len(ids)
        ids.append(request.stop_ids[0])
        logprobs.append(scripted_logprob(request.stop_ids[0]))
    length = request.max_tokens if stop is None else min(stop + 1, request.max_tokens)
    stopped = stop is not None and stop < request.max_tokens
    return Sample(
        ids=tuple(ids[:length]),
        logprobs=tuple(logprobs[:length]) if with_logprobs else None,
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
    )


class FakeClock:
    """A clock that stands still until all that is ready has run, and then jumps.

    Call it to read it.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass, e.g. for code that only reads the clock."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards; got {seconds}")
        self._now_s += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `asyncio.run` on this clock."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(main)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._clock()


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that moves the clock to the next timer instead of waiting for it."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        super().__init__()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self._clock.advance(timeout)
        return events


def scripted_runner(
    engine: ScriptedEngine,
    tools: ToolProvider | None = None,
    *,
    chat: ChatFormat | None = None,
    tokenizer: TextTokenizer | None = None,
    engine_retries: int = 0,
    unmarked_calls: str = "answer",
    player: Player | None = None,
    vocabulary: int | None = None,
    clock: FakeClock | None = None,
    **limits: Any,
) -> EpisodeRunner:
    """Return what runs episodes over this engine, with `ByteChat` and 1000 tokens an episode unless told otherwise."""
    parts = Rollouts(
        engine=engine,
        chat=chat or ByteChat(),
        limits=EpisodeLimits(**{"max_completion_length": 1000, **limits}),
        tokenizer=tokenizer or ByteChat(),
        tools=tools,
        engine_retries=engine_retries,
        unmarked_calls=unmarked_calls,
        player=player,
        vocabulary=vocabulary,
        clock=clock or time.monotonic,
    )
    return EpisodeRunner(parts, SamplingOptions())


def run_episode(
    engine: ScriptedEngine,
    tools: ToolProvider | None = None,
    *,
    question: str = "q",
    row: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    clock: FakeClock | None = None,
    **options: Any,
) -> Trajectory:
    """Run one episode to its end and close the engine; `options` are those of `scripted_runner`.

    Without a `clock` time is real, as tools in processes of their own need it.
    """
    runner = scripted_runner(engine, tools, clock=clock, **options)
    episode = Episode(({"role": "user", "content": question},), row=row or {}, enable_thinking=enable_thinking)

    async def main() -> Trajectory:
        async with Scheduler(runner) as scheduler:
            handle = scheduler.submit(episode)
        return handle.result()

    return asyncio.run(main()) if clock is None else clock.run(main())

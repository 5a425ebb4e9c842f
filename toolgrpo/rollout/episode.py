"""One episode: render, sample, parse, call tools, bridge, repeat.

Invariants:

* The ids sent to the engine are exactly the prompt plus everything in the ledger; nothing is
  tokenized twice.
* A trajectory never has more than `max_completion_length` tokens after its prompt, and no request
  asks for more than what is left of it, of the context window and of the turn's own cap.
* Every episode ends with exactly one `StopReason`. A failure of the world is one of them; a bug or
  a plugin error is none, it propagates.

What ends an episode, in the order it is looked at in each turn:

    1. room       nothing left to sample into, which only a prompt can leave: CONTEXT_FULL, and no reward (it is dropped)
    2. sample     the engine fails more than `engine_retries` times in a row, or finally: ENGINE_FAILURE
    3. cut        the turn was cut by the completion length or the window: LENGTH, or CONTEXT_FULL.
                  (A turn cut by its own cap goes on if it holds a call, and else ends with LENGTH.)
    4. no calls   FINISHED; a call without its markers is one, unless `unmarked_calls` is `ignore`
    5. void       calls of which none can be read, where `end_at_void_turn` says so: VOID_TURN. Then:
       last turn  calls, but no turn is left to read their results: MAX_TURNS; the calls are not run
    6. tools      calls beyond `max_tool_calls` are answered with an error; a tool that raised `DropEpisode`: DROPPED;
                  a result that ends the episode: STOP_TOOL
    7. bridge     it would leave no room for another token: LENGTH, or CONTEXT_FULL; it is not added

The deadline is looked at while waiting in 2 and 6: DEADLINE. An environment may drop the episode when it is reset (DROPPED)
or asked for its reward (the episode has ended by then, and keeps its reason).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from toolgrpo.chat.base import ChatFormat, ParsedTurn
from toolgrpo.chat.messages import assistant_message, tool_message
from toolgrpo.chat.unmarked import unmarked_call
from toolgrpo.drops import Drop, DropCause, DropEpisode
from toolgrpo.engines.base import Engine, FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.errors import EngineError, FinalEngineError, WorldError
from toolgrpo.ledger import Ledger
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.rollout.tool_contents import content_spans
from toolgrpo.rollout.truncation import TextTokenizer, TokenCutter
from toolgrpo.rollout.void_turns import is_void
from toolgrpo.tools.base import ToolProvider, ToolSession
from toolgrpo.trajectory import (
    AttemptStatus,
    CallAttempt,
    Message,
    StopReason,
    ToolErrorKind,
    ToolOutput,
    ToolResult,
    Trajectory,
    Turn,
)

__all__ = ["BusyTime", "Episode", "EpisodeRunner", "Player"]

_RETRY_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Episode:
    """What an episode starts from: one row of the dataset, one of its G repetitions.

    A row may name the tools it is offered in `row["tools"]`; without that it is offered all.
    """

    messages: tuple[Message, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    seed: int | None = None
    number: int = 0  # its place in the rollout


class BusyTime:
    """A clock that runs while at least one `with` block over it is open."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._since_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        if self._open == 0:
            self._since_s = self._clock()
        self._open += 1

    def __exit__(self, *failure: object) -> None:
        self._open -= 1
        if self._open == 0:
            self.total_s += self._clock() - self._since_s


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """What the episodes of one rollout share. Calling it runs one episode to its end."""

    engine: Engine
    chat: ChatFormat
    limits: EpisodeLimits
    options: SamplingOptions
    tokenizer: TextTokenizer  # long results are cut in its tokens
    tools: ToolProvider | None = None
    engine_retries: int = 3
    unmarked_calls: str = "answer"  # one of chat.unmarked.POLICIES
    end_at_void_turn: bool = False
    find_outputs: bool = False  # tell where the texts of tool results lie among the tokens
    clock: Callable[[], float] = time.monotonic
    waiting: AbstractContextManager[None] = field(
        default_factory=nullcontext
    )  # entered while an episode waits for the engine
    on_turn: Callable[[Episode, Turn], None] | None = None
    player: Player | None = None  # None: the loop of this module plays

    async def __call__(self, episode: Episode) -> Trajectory:
        if self.player is not None:
            return await self.player.play(episode, self)
        return await _EpisodeRun(self, episode).run()

    async def sample(self, request: SampleRequest) -> Sample:
        """Ask the engine.

        A request that failed is tried again a few times, unless its engine did so itself.
        """
        for retry in range(self.engine_retries + 1):
            try:
                with self.waiting:
                    return await self.engine.sample(request)
            except EngineError as error:
                if isinstance(error, FinalEngineError) or retry == self.engine_retries:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S * 2**retry)
        raise AssertionError("unreachable: the last retry raises")


class Player(Protocol):
    """What plays episodes in place of our own loop, over the same engine, format and limits."""

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        """Play one episode to its end; the invariants are those of this module."""
        ...

    def close(self) -> None: ...


class _TurnBudget(NamedTuple):
    """How many tokens the next turn may have,
    and what the episode ends with when that is all there is.
    """

    tokens: int
    when_full: StopReason
    by_turn_cap: bool


class _EpisodeRun:
    """The state of one running episode."""

    def __init__(self, shared: EpisodeRunner, episode: Episode) -> None:
        self.shared = shared
        self.episode = episode
        self.tools = offered_tools(shared.tools, episode.row)
        self.cutter = TokenCutter(shared.tokenizer, shared.limits.max_tool_response_tokens)
        self.started = shared.clock()
        self.messages = list(episode.messages)  # of the prompt
        self.calls_run = 0
        self.dropped: Drop | None = None
        self.ledger: Ledger | None = None

    async def run(self) -> Trajectory:
        """Run the loop under its deadline, with a tool session around it."""
        reward: float | None = None
        failure: str | None = None
        reason: StopReason | None = None
        deadline = asyncio.timeout(self.shared.limits.deadline_s)
        try:
            async with deadline:
                if self.tools is None:
                    reason = await self._loop(None)
                else:
                    async with self.tools.session(self.episode.row) as session:
                        reason = await self._loop(session)
                        if self.dropped is None:
                            reward = await session.reward()
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = StopReason.DEADLINE
        except DropEpisode as drop:
            reason, self.dropped = reason or StopReason.DROPPED, drop.at(DropCause.ENVIRONMENT)
        except WorldError as error:
            reason, failure = StopReason.ENGINE_FAILURE, f"{type(error).__name__}: {error}"
        ledger = self.ledger or self._open_ledger(None)
        return ledger.finish(
            reason,
            started_s=self.started,
            duration_s=self._now(),
            failure=failure,
            reward=reward,
            dropped=self.dropped,
        )

    async def _loop(self, session: ToolSession | None) -> StopReason:
        ledger = self.ledger = self._open_ledger(session)
        while True:
            # 1. room
            room = self._room(ledger)
            if room.tokens < 1:
                self.dropped = self._without_room(ledger, session)
                return room.when_full
            # 2. sample and parse
            started = self._now()
            sample = await self._sample(ledger, room.tokens)
            start = len(ledger)
            parsed = self._with_unmarked(self.shared.chat.parse(sample.ids, before=ledger.all_ids), ledger)
            ledger.sampled(sample.ids, sample.logprobs)
            ledger.say(assistant_message(parsed))
            cut = sample.finish_reason is FinishReason.LENGTH
            turn = Turn(
                start=start,
                end=len(ledger),
                content=parsed.content,
                reasoning=parsed.reasoning,
                attempts=() if session is None else parsed.attempts,
                closed=not cut,
                duration_s=self._now() - started,
                started_s=started,
                weights=sample.weights,
            )
            # 3., 4. and 5. ends without calls
            reason = self._reason_to_stop(ledger, turn, room)
            if reason is not None or session is None:
                self._record(ledger, turn)
                return reason or StopReason.FINISHED
            # 6. tools
            results = await self._call_tools(ledger, session, turn)
            self.dropped = next((_drop(result) for result in results if result.error is ToolErrorKind.DROPPED), None)
            if self.dropped is not None:
                return StopReason.DROPPED
            if any(result.ends_episode for result in results):
                return StopReason.STOP_TOOL
            # 7. bridge
            answers = [_as_message(*answered) for answered in zip(results, turn.attempts, strict=True)]
            bridge = self._bridge(ledger, answers)
            room = self._room(ledger)
            if len(bridge) >= self._left(ledger):
                return room.when_full
            ledger.context(bridge, self._outputs(ledger, bridge, answers, results))

    def _bridge(self, ledger: Ledger, answers: Sequence[Message]) -> list[int]:
        return self.shared.chat.bridge(
            ledger.all_ids,
            answers,
            messages=self.messages,
            schemas=[] if self.tools is None else self.tools.schemas,
            enable_thinking=self.episode.enable_thinking,
        )

    def _outputs(
        self, ledger: Ledger, bridge: Sequence[int], answers: Sequence[Message], results: Sequence[ToolResult]
    ) -> list[ToolOutput]:
        """Return where the results lie in the bridge, if anybody wants to know."""
        if not self.shared.find_outputs:
            return []
        spans = content_spans(bridge, answers, lambda others: self._bridge(ledger, others))
        return [
            ToolOutput(*span, tool=result.name, ok=result.ok)
            for span, result in zip(spans, results, strict=True)
            if span is not None
        ]

    def _with_unmarked(self, parsed: ParsedTurn, ledger: Ledger) -> ParsedTurn:
        """Return the turn with the call that stands in it without markers, if one does and is looked for."""
        if self.shared.unmarked_calls == "ignore" or self.tools is None or parsed.attempts or not parsed.closed:
            return parsed
        made = [attempt for turn in ledger.turns for attempt in turn.attempts if attempt.status is AttemptStatus.OK]
        form = self.shared.chat.call_text
        found = unmarked_call(parsed.content, self.tools.schemas, form=form, made=made)
        return parsed if found is None else replace(parsed, attempts=(found,))

    def _reason_to_stop(self, ledger: Ledger, turn: Turn, room: _TurnBudget) -> StopReason | None:
        if not turn.closed and not room.by_turn_cap:
            return room.when_full
        if not turn.attempts:
            return StopReason.FINISHED if turn.closed else StopReason.LENGTH
        called = replace(turn, attempts=tuple(map(self._as_called, turn.attempts)))
        if self.shared.end_at_void_turn and is_void(called):
            return StopReason.VOID_TURN
        max_turns = self.shared.limits.max_turns
        if max_turns is not None and len(ledger.turns) + 1 >= max_turns:
            return StopReason.MAX_TURNS
        return None

    async def _sample(self, ledger: Ledger, max_tokens: int) -> Sample:
        """Sample one turn from the engine."""
        request = SampleRequest(
            ids=ledger.all_ids,
            max_tokens=max_tokens,
            stop_ids=self.shared.chat.stop_ids,
            options=self.shared.options,
            seed=None if self.episode.seed is None else self.episode.seed + len(ledger.turns),
        )
        return await self.shared.sample(request)

    async def _call_tools(self, ledger: Ledger, session: ToolSession, turn: Turn) -> tuple[ToolResult, ...]:
        """Answer every attempt of the turn, in order.

        Record the turn even if the deadline passes meanwhile.
        """
        results: tuple[ToolResult, ...] = ()
        started = self._now()
        try:
            budget = self.shared.limits.max_tool_calls
            allowed = len(turn.attempts) if budget is None else max(0, budget - self.calls_run)
            called = [self._as_called(attempt) for attempt in turn.attempts[:allowed]]
            answered = await session.call(called) if allowed else ()
            refused = tuple(_refusal(attempt.name, budget) for attempt in turn.attempts[allowed:])
            self.calls_run += len(answered)
            results = tuple(self._cut(replace(result, started_s=started)) for result in (*answered, *refused))
            if answered and not any(result.error is ToolErrorKind.DROPPED for result in answered):
                said = await session.after_turn()
                turn = replace(turn, reward=said.reward, state=said.state)
            ledger.say(*(_as_message(*answered) for answered in zip(results, turn.attempts, strict=True)))
        finally:
            self._record(ledger, turn.answered(results))
        return results

    def _record(self, ledger: Ledger, turn: Turn) -> None:
        ledger.turn(turn)
        if self.shared.on_turn is not None:
            self.shared.on_turn(self.episode, turn)

    def _as_called(self, attempt: CallAttempt) -> CallAttempt:
        """Return an attempt as the tools get it: an unmarked call runs where that is wanted, and stays one in the record."""
        accepted = attempt.status is AttemptStatus.UNMARKED and self.shared.unmarked_calls == "accept"
        return replace(attempt, status=AttemptStatus.OK, detail="") if accepted else attempt

    def _cut(self, result: ToolResult) -> ToolResult:
        shown = self.cutter(result.content, result.left_out)
        return replace(result, content=shown.text, left_out=shown.left_out)

    def _open_ledger(self, session: ToolSession | None) -> Ledger:
        if session is not None and session.observation:
            self.messages = _with_observation(self.messages, session.observation)
        schemas = [] if self.tools is None else self.tools.schemas
        ids = self.shared.chat.prompt(self.messages, schemas, enable_thinking=self.episode.enable_thinking)
        return Ledger(ids, expects_logprobs=self.shared.engine.gives_logprobs)

    def _left(self, ledger: Ledger) -> int:
        """Return the tokens left of the completion length and of the context window."""
        by_length = self.shared.limits.max_completion_length - len(ledger)
        return min(by_length, self.shared.engine.max_model_len - len(ledger.all_ids))

    def _room(self, ledger: Ledger) -> _TurnBudget:
        by_length = self.shared.limits.max_completion_length - len(ledger)
        left = self._left(ledger)
        cap = self.shared.limits.max_turn_tokens
        return _TurnBudget(
            tokens=left if cap is None else min(left, cap),
            when_full=StopReason.LENGTH if by_length <= left else StopReason.CONTEXT_FULL,
            by_turn_cap=cap is not None and cap < left,
        )

    def _without_room(self, ledger: Ledger, session: ToolSession | None) -> Drop:
        """Return why an episode that cannot say a word is not scored."""
        observed = session is not None and bool(session.observation)
        what = "the prompt with what the environment's reset returned" if observed else "the prompt"
        cure = "let reset return less" if observed else "shorten it"
        return Drop(
            DropCause.NO_ROOM,
            f"{what} has {len(ledger.all_ids)} tokens, and the context window {self.shared.engine.max_model_len}; "
            f"{cure}, or give the engine a larger window (--vllm_max_model_length)",
        )

    def _now(self) -> float:
        return self.shared.clock() - self.started


def _as_message(result: ToolResult, attempt: CallAttempt) -> Message:
    return tool_message(result.name, result.content, attempt.call_id)


def _drop(result: ToolResult) -> Drop:
    return Drop(DropCause.TOOL, result.content.removeprefix("Error: "))


def _refusal(name: str | None, budget: int | None) -> ToolResult:
    return ToolResult(
        content=f"Error: not called. Only {budget} tool calls are allowed, and they are used up. Answer with what you have.",
        name=name,
        error=ToolErrorKind.LIMIT,
    )


def _with_observation(messages: list[Message], observation: str) -> list[Message]:
    """Append the first observation of an environment to the last message of the prompt."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{observation}"}]

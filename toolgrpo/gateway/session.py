"""One episode behind its key: requests come in, exact tokens are kept.

A `GatewaySession` lives on the engine's event loop, and renders and tokenizes on other threads. Its sequences of tokens only grow; an agent that repeats what was
said and adds to it has one. A request

    1. extends   the sequence whose latest turn it goes on from: by the bridge for what follows that turn
                 (results of its calls, or what a user says to an answer), or, where the format has no
                 bridge for it, if the rendered prompt begins with the sequence's tokens;
    2. branches  off a sequence where it goes on from an earlier turn, or while another request is open
                 there: a new sequence, whose prompt is the tokens up to that turn and the bridge;
    3. forks     a sequence with a prompt of its own where it goes on from nothing that was said: the
                 history was rewritten, other tools are offered.

2. and 3. are counted with their reasons (`forks`).

Invariants: what was sampled is never tokenized again; a request that fails, or whose client goes
away, leaves nothing in a sequence; limits are those of an episode. What the model did is never an error
for the agent: where an episode's room or turns are used up, the answer is empty and cut (`length`),
and calls that nobody could answer are not handed out.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.unmarked import calls_made, with_unmarked
from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import RUNNABLE, CallAttempt, ToolResult
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn
from toolgrpo.errors import ChatFormatError, InfrastructureError
from toolgrpo.gateway.bounds import off_loop
from toolgrpo.gateway.conversations import (
    Conversations,
    Found,
    KnownSequence,
    Shown,
    Start,
    TurnEnd,
    answer_to,
    as_repeated,
    joined,
    keys_of,
    results_of,
    shown_of,
    text_before,
)
from toolgrpo.gateway.openai_forms import NOT_SAMPLED, ChatRequest, ModelAnswer, Refused, TextRequest, ToolCall
from toolgrpo.rollout.episode import text_of, turn_said, without_calls
from toolgrpo.rollout.scheduler import Episode, EpisodeRunner

_CUT_ANSWERS = 10  # empty answers of an episode whose room is used up; then requests are refused


@contextmanager
def _content() -> Iterator[None]:
    """Refuse a request whose content cannot be made into tokens, whatever that raises: it ends no episode."""
    try:
        yield
    except Refused:
        raise
    except ChatFormatError as error:
        raise Refused(400, "invalid_value", str(error)) from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Refused(400, "invalid_value", f"the request cannot be converted to tokens: {why}") from error


@dataclass(slots=True)
class GatewaySession:
    """The requests of one episode."""

    shared: EpisodeRunner
    episode: Episode
    bridges_users: bool = False  # whether the chat format was proven to go on with what a user says
    obeys_sampling: bool = False  # whether a request says how tokens are drawn; in a training the run does
    forks: Counter[str] = field(default_factory=Counter, init=False)
    disconnected: int = field(default=0, init=False)
    failure: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), init=False
    )
    limit: StopReason | None = field(default=None, init=False)  # that was met
    _sequences: list[KnownSequence] = field(default_factory=list, init=False)
    _conversations: Conversations = field(default_factory=Conversations, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # requests are rendered in their order
    _open: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _requests: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)
    _calls: int = field(default=0, init=False)
    _ids: set[str] = field(default_factory=set, init=False)  # of calls that were handed out
    _cut_answers: int = field(default=0, init=False)
    _no_room: Drop | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _started_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._started_s = self.shared.parts.clock()

    async def answer(self, request: ChatRequest | TextRequest) -> ModelAnswer:
        """Answer a request of messages, or of tokens."""
        async with self._answering():
            if isinstance(request, TextRequest):
                async with self._starting:
                    with _content():
                        ids = await off_loop(self._prompt_ids, request.prompt)
                        start = self._extension(ids) or Start(KnownSequence(self._ledger(ids)), fork="tokens")
                return (await self._say(start, request))[0]
            thinking = self.episode.enable_thinking if request.enable_thinking is None else request.enable_thinking
            async with self._starting:
                with _content():
                    keys = await off_loop(keys_of, request.messages, request.tools, thinking)
                    found = self._conversations.find(request.messages, keys)
                    start = await self._start(request, thinking, found)
            said, turn_end = await self._say(start, request)
            if turn_end.n_ids == len(said.prompt_ids) + len(said.ids):  # else it is empty, and what led to it unwritten
                self._conversations.remember(found, as_repeated(said), turn_end)
            return said

    async def end(self) -> None:
        """Refuse what comes from now on, and see what is open end."""
        self._ended = True
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        if not self.failure.done():
            self.failure.cancel()

    def trajectory(
        self,
        reason: StopReason,
        *,
        reward: float | None = None,
        dropped: Drop | None = None,
        failure: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return what happened, once it has ended."""
        if not self._sequences:
            ids = self.shared.parts.chat.prompt(self.episode.messages, [], enable_thinking=self.episode.enable_thinking)
            self._sequences.append(KnownSequence(self._ledger(ids)))
        for sequence in self._sequences:
            self._settle(sequence, ())
        counts = {"requests": self._requests, "forks": dict(self.forks), "disconnected": self.disconnected}
        return joined(
            self._sequences,
            reason,
            started_s=self._started_s,
            duration_s=self._now(),
            failure=failure,
            reward=reward,
            metadata={"gateway": counts, **(metadata or {})},
            dropped=dropped if self._turns else dropped or self._no_room,
        )

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Keep track of an open request; what is no refusal ends the episode."""
        if self._ended:
            raise Refused(401, "episode_over", "the episode of this key has ended; a key is valid for one episode")
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._requests += 1
        try:
            yield
        except asyncio.CancelledError:
            self.disconnected += not self._ended
            raise
        except Refused:
            raise
        except Exception as error:  # an infrastructure failure, or a bug: whoever plays the episode raises it
            if not self.failure.done():
                self.failure.set_exception(error)
            kind = "the engine failed" if isinstance(error, InfrastructureError) else "an error inside toolgrpo"
            raise Refused(503, "engine_failure", f"{kind}: {error}", kind="server_error") from error
        finally:
            self._open.discard(task)

    def _prompt_ids(self, prompt: Sequence[int] | str) -> Sequence[int]:
        tokenizer = self.shared.parts.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=False)
        if min(prompt) < 0 or max(prompt) >= len(tokenizer):
            raise Refused(400, "invalid_value", f"the prompt holds ids that are not from 0 to {len(tokenizer) - 1}")
        return prompt

    async def _start(self, request: ChatRequest, thinking: bool | None, found: Found) -> Start:
        """Find out what a request goes on from."""
        end, roles = found.turn_end, [message["role"] for message in found.following]
        # the chat format can go on with results, and with a user where that was proven
        if end is not None and (set(roles) == {"tool"} or (self.bridges_users and roles == ["user"] and not end.calls)):
            return await self._after_turn(end, found.following)
        prompt = self.shared.parts.chat.prompt
        ids = await off_loop(prompt, request.messages, request.tools, enable_thinking=thinking)
        start, answered = self._extension(ids), self._answered(found)
        if start is not None:
            known = found.turn_end is not None and found.turn_end.sequence is start.sequence
            return replace(start, messages=found.following, answered=answered) if known else start
        fork = "user_turn" if found.turn_end is not None else "tools" if found.other_tools else "history"
        sequence = KnownSequence(self._ledger(ids), request.messages, request.tools, thinking)
        return Start(sequence, fork=fork, answered=answered)

    def _answered(self, found: Found) -> tuple[KnownSequence, Turn, tuple[ToolResult, ...]] | None:
        """Return the open turn that a request goes on from with more than its results, and those."""
        end = found.turn_end
        if end is None or end.sequence.open_turn is None or end.n_ids < len(end.sequence.ids):
            return None
        pairs = end.answers([message for message in found.following if message["role"] == "tool"])
        turn = end.sequence.open_turn
        return end.sequence, turn, results_of(turn, [one for one, _ in pairs], [one for _, one in pairs], self._now())

    async def _after_turn(self, turn_end: TurnEnd, following: Sequence[Message]) -> Start:
        """Go on from a turn with what its calls gave, or with what a user says to it."""
        sequence = turn_end.sequence
        before = sequence.ids[: turn_end.n_ids]
        pairs = turn_end.answers(following)
        attempts, answers = [attempt for attempt, _ in pairs], [answer_to(*one) for one in pairs]
        context = await off_loop(
            self.shared.parts.chat.bridge,
            *(before, answers),
            messages=sequence.messages,
            schemas=sequence.schemas,
            enable_thinking=sequence.thinking,
        )
        if sequence.busy or turn_end.n_ids < len(sequence.ids):
            ledger = self._ledger([*before, *context])
            return Start(
                KnownSequence(ledger, sequence.messages, sequence.schemas, sequence.thinking, parent=sequence),
                fork="branch",
            )
        if answers[0]["role"] == "user":
            return Start(sequence, tuple(context), tuple(answers), user=answers[0]["content"])
        results = results_of(sequence.open_turn, attempts, answers, self._now())
        return Start(sequence, tuple(context), tuple(answers), results)

    def _extension(self, ids: Sequence[int]) -> Start | None:
        """Return the longest sequence that these tokens go on from, with the rest of them."""
        fitting = [sequence for sequence in self._sequences if sequence.goes_on_in(ids)]
        sequence = max(fitting, key=lambda sequence: len(sequence.ids), default=None)
        return None if sequence is None else Start(sequence, tuple(ids[len(sequence.ids) :]))

    def _ledger(self, ids: Sequence[int]) -> Ledger:
        return Ledger(ids, expects_logprobs=self.shared.parts.engine.gives_logprobs)

    async def _say(self, start: Start, request: ChatRequest | TextRequest) -> tuple[ModelAnswer, TurnEnd]:
        """Sample a turn and write it down; a request that ends before leaves nothing behind."""
        sequence = start.sequence
        ids = [*sequence.ids, *start.context]
        used = sum(len(sequence.ledger) for sequence in self._sequences) + len(start.context)
        room = self.shared.parts.limits.budget(used, self.shared.parts.engine.max_model_len - len(ids))
        max_turns = self.shared.parts.limits.max_turns
        if max_turns is not None and self._turns >= max_turns:
            return self._cut_short(StopReason.MAX_TURNS, ids), TurnEnd(sequence, len(sequence.ids), {})
        if room.tokens < 1:
            self._check_prompt(len(ids), sequence)
            return self._cut_short(room.when_full, ids), TurnEnd(sequence, len(sequence.ids), {})
        self._turns += 1  # before the wait: branches count together
        number = self._turns
        sequence.busy = True
        started = self._now()
        try:
            sample = await self.shared.sample(
                SampleRequest(
                    ids=ids,
                    max_tokens=min(room.tokens, request.max_tokens or room.tokens),
                    stop_ids=self.shared.parts.chat.stop_ids,
                    options=self._options(request.sampling),
                    seed=self._seed(request.sampling, number),
                )
            )
            shown = await self._shown(sample, request)
        except BaseException:
            self._turns -= 1
            raise
        finally:
            sequence.busy = False
        written = sum(len(sequence.ledger) for sequence in self._sequences) + len(start.context)
        left = self.shared.parts.limits.max_completion_length - written
        if left < len(shown.sample.ids):  # other requests, open meanwhile, have used it up
            self.limit = self.limit or StopReason.LENGTH
            if left < 1:
                self._turns -= 1
                return self._cut_short(StopReason.LENGTH, ids), TurnEnd(sequence, len(sequence.ids), {})
            shown = shown.cut(left)
        sample, stopped = shown.sample, shown.stopped
        if isinstance(request, TextRequest):
            parsed = ParsedTurn(self._text(sample), None, (), True)
        else:
            parsed = self._parsed(sample, ids, sequence)
            parsed = parsed if request.tools else without_calls(parsed, self._text(sample))
        self._write(start, sample, parsed, started, stopped=stopped)
        cut = sample.finish_reason is FinishReason.LENGTH and not stopped
        if not cut and self.limit is StopReason.CONTEXT_FULL:  # a shorter prompt went on
            self.limit = None
        if cut and len(sample.ids) >= room.tokens and not room.by_turn_cap:
            self.limit = self.limit or room.when_full
        calls = self._handed_out(parsed, last=max_turns is not None and number >= max_turns)
        reason: Literal["stop", "tool_calls", "length"] = (
            "tool_calls" if calls else "length" if cut or self.limit is StopReason.MAX_TURNS else "stop"
        )
        content = parsed.content if calls or not parsed.attempts else self._text(sample)
        said = ModelAnswer(
            prompt_ids=tuple(ids),
            ids=sample.ids,
            logprobs=sample.logprobs,
            texts=shown.texts,
            content=text_before(content, request.stop),
            reasoning=parsed.reasoning,
            calls=tuple(calls),
            finish_reason=reason,
        )
        readable = [attempt for attempt in parsed.attempts if attempt.status in RUNNABLE]
        by_id = {call.id: attempt for call, attempt in zip(calls, readable, strict=False)}
        return said, TurnEnd(sequence, len(sequence.ids), by_id, parsed.attempts if calls else ())

    async def _shown(self, sample: Sample, request: ChatRequest | TextRequest) -> Shown:
        """Return a sample up to a stop text, with the text of each token if that is asked for."""
        if not request.stop and not request.logprobs:
            return Shown(sample)
        return await off_loop(shown_of, sample, request.stop, self.shared.parts.tokenizer, each=request.logprobs)

    def _write(self, start: Start, sample: Sample, parsed: ParsedTurn, started: float, *, stopped: bool) -> None:
        """Put a turn, and what came before it, into its sequence; one that a stop text ends was not cut."""
        sequence, ledger = start.sequence, start.sequence.ledger
        if sequence not in self._sequences:
            if self._sequences:
                self.forks[start.fork] += 1
            self._sequences.append(sequence)
        if start.answered is not None and start.answered[0].open_turn is start.answered[1]:
            self._settle(start.answered[0], start.answered[2])
        self._settle(sequence, start.results, start.user)
        ledger.context(start.context)
        ledger.say(*start.messages)
        turn = turn_said(ledger, sample, parsed, started_s=started, duration_s=self._now() - started)
        sequence.open_turn = replace(turn, closed=turn.closed or stopped)

    def _settle(self, sequence: KnownSequence, results: Sequence[ToolResult], user: str | None = None) -> None:
        """Write the open turn down, with what its calls gave or a user said to it."""
        if sequence.open_turn is not None:
            turn = replace(sequence.open_turn.answered(results), user=user)
            sequence.open_turn = None
            sequence.ledger.turn(turn)
            if self.shared.on_turn is not None:
                self.shared.on_turn(self.episode, turn)

    def _parsed(self, sample: Sample, ids: Sequence[int], sequence: KnownSequence) -> ParsedTurn:
        parsed = self.shared.parts.chat.parse(sample.ids, before=ids)
        if self.shared.parts.unmarked_calls != "accept" or not sequence.schemas:
            return parsed
        made: list[CallAttempt] = []  # a call that was made before is quoted
        before: KnownSequence | None = sequence
        while before is not None:
            turns = [*before.ledger.turns, *([before.open_turn] if before.open_turn else [])]
            made += calls_made(turns)
            before = before.parent
        return with_unmarked(parsed, sequence.schemas, form=None, made=made)

    def _handed_out(self, parsed: ParsedTurn, *, last: bool) -> list[ToolCall]:
        """Return the calls that the agent is to answer; none in the last turn, where it could not."""
        readable = [attempt for attempt in parsed.attempts if attempt.status in RUNNABLE]
        if readable and last:
            self.limit = self.limit or StopReason.MAX_TURNS
            return []
        calls = []
        for attempt in readable:
            self._calls += 1
            number = attempt.call_id or f"call{self._calls:05d}"
            while number in self._ids:
                self._calls += 1
                number = f"call{self._calls:05d}"
            self._ids.add(number)
            calls.append(
                ToolCall(
                    id=number,
                    name=str(attempt.name),
                    arguments=json.dumps(dict(attempt.arguments or {}), ensure_ascii=False),
                )
            )
        return calls

    def _check_prompt(self, n_ids: int, sequence: KnownSequence) -> None:
        """Refuse a prompt of the agent's own that leaves no room for a token."""
        window = self.shared.parts.engine.max_model_len
        if sequence in self._sequences or n_ids < window:
            return
        if not self._sequences:
            self._no_room = Drop(
                DropCause.NO_ROOM,
                f"the agent's first prompt has {n_ids} tokens, and the context window {window}; shorten it, or give the "
                f"engine a larger window (--vllm_max_model_length)",
            )
        self.limit = self.limit or StopReason.CONTEXT_FULL
        raise Refused(
            400,
            "context_length_exceeded",
            f"this model's context window is {window} tokens, and the prompt has {n_ids}; shorten the messages",
        )

    def _cut_short(self, reason: StopReason, ids: Sequence[int]) -> ModelAnswer:
        """Return an empty answer: nothing of the episode is left to say it in."""
        self.limit = self.limit or reason
        self._cut_answers += 1
        if self._cut_answers > _CUT_ANSWERS:
            raise Refused(
                400, "episode_over", f"the limit {self.limit} of this episode was reached; nothing is left of it"
            )
        return ModelAnswer(tuple(ids), (), (), (), "", None, (), "length")

    def _text(self, sample: Sample) -> str:
        return text_of(sample, self.shared.parts.tokenizer, self.shared.parts.chat.stop_ids)

    def _options(self, asked: Mapping[str, Any] | None) -> SamplingOptions:
        if not self.obeys_sampling:
            return self.shared.options
        given = {name: value for name, value in (asked or {}).items() if name != "seed"}
        for name in given.keys() & set(NOT_SAMPLED):
            raise Refused(400, "unsupported_value", f"{name} is not supported; leave it out")
        return replace(self.shared.options, **given)

    def _seed(self, asked: Mapping[str, Any] | None, turn: int) -> int | None:
        if self.obeys_sampling:
            return (asked or {}).get("seed")
        return None if self.episode.seed is None else self.episode.seed + turn - 1

    def _now(self) -> float:
        return self.shared.parts.clock() - self._started_s

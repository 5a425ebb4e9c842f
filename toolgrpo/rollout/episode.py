"""One episode: render, sample, parse, call tools, bridge, repeat.

Invariants:

* The ids sent to the engine are exactly the prompt plus everything in the ledger; nothing is
  tokenized twice.
* A trajectory never has more than `max_completion_length` tokens after its prompt (what a new segment
  repeats does not count), and no request asks for more than what is left of it, of the context
  window and of the turn's own cap.
* Every episode ends with exactly one `StopReason`. An infrastructure failure is one of them; a bug or
  a plugin error is none, it propagates.

What ends an episode, in the order it is looked at in each turn:

    1. room       nothing left to sample into, which only a prompt can leave: CONTEXT_FULL, and no reward (it is dropped)
    2. sample     the engine fails more than `engine_retries` times in a row, or finally: ENGINE_FAILURE
    3. cut        the turn was cut by the completion length or the window: LENGTH, or CONTEXT_FULL.
                  (A turn cut by its own cap goes on if it holds a call, and else ends with LENGTH.)
    4. no calls   FINISHED; a call without its markers is one, unless `unmarked_calls` is `ignore`. Where the user has more to
                  say (`row_parts.py`) the episode goes on with that, or ends with MAX_TURNS, MAX_USER_TURNS or as in 7
    5. last turn  calls, but no turn is left to read their results: MAX_TURNS; the calls are not run
    6. tools      calls beyond `max_tool_calls` are answered with an error; a tool that raised `DropEpisode`: DROPPED;
                  a result that ends the episode, or an environment that says it is over: STOP_TOOL
    7. bridge     it would leave no room for another token: LENGTH, or CONTEXT_FULL; it is not added. With a limit of the
                  context (`compaction.py`) a new segment may begin instead; CONTEXT_FULL where no history fits

The deadline is looked at while waiting in 2, 4 and 6: DEADLINE. An environment may drop the episode when it is reset or asked
for the user's next message (DROPPED) or for its reward (the episode has ended by then, and keeps its reason).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolgrpo.chat.base import ParsedTurn, assistant_message, tool_message
from toolgrpo.chat.unmarked import calls_made, with_unmarked
from toolgrpo.engines.base import FinishReason, Sample, SampleRequest
from toolgrpo.episode.dropped import Drop, DropCause, DropEpisode
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn, with_observation
from toolgrpo.errors import InfrastructureError
from toolgrpo.rollout.compaction import History
from toolgrpo.rollout.limits import Room, TextTokenizer, TokenCutter, TurnBudget
from toolgrpo.rollout.row_parts import User, offered_tools, user_of
from toolgrpo.tools.base import ToolSession

if TYPE_CHECKING:
    from toolgrpo.rollout.scheduler import Episode, EpisodeRunner


# What an episode itself says to the model: results as messages, refusals, an environment's first observation.


def answer_message(result: ToolResult, attempt: CallAttempt) -> Message:
    return tool_message(result.name, result.content, attempt.call_id)


def refusal(name: str | None, budget: int | None) -> ToolResult:
    return ToolResult(
        content=f"Error: not called. Only {budget} tool calls are allowed, and they are used up. Answer with what you have.",
        name=name,
        error=ToolErrorKind.LIMIT,
    )


def text_of(sample: Sample, tokenizer: TextTokenizer, stop_ids: Sequence[int]) -> str:
    """Return a turn's text, without the token that ends it."""
    ends = bool(sample.ids) and sample.ids[-1] in stop_ids
    return tokenizer.decode(list(sample.ids[:-1] if ends else sample.ids))


def without_calls(parsed: ParsedTurn, said: str) -> ParsedTurn:
    """Return a turn to which nothing was offered: what looks like a call is text."""
    return replace(parsed, content=said, reasoning=None, attempts=()) if parsed.attempts else parsed


def turn_said(ledger: Ledger, sample: Sample, parsed: ParsedTurn, *, started_s: float, duration_s: float) -> Turn:
    """Write a sampled turn into the ledger, and return it as it is before its calls are answered."""
    start = len(ledger)
    ledger.sampled(sample.ids, sample.logprobs)
    ledger.say(assistant_message(parsed))
    return Turn(
        start=start,
        end=len(ledger),
        content=parsed.content,
        reasoning=parsed.reasoning,
        attempts=parsed.attempts,
        closed=sample.finish_reason is FinishReason.STOP,
        duration_s=duration_s,
        started_s=started_s,
        weights=sample.weights,
    )


class EpisodeRun:
    """One running episode. `play` runs it to its end, once. `rollout/chat_api.py` lets an endpoint say its turns."""

    def __init__(self, shared: EpisodeRunner, episode: Episode) -> None:
        self.shared = shared
        self.parts = parts = shared.parts
        self.episode = episode
        self.tools = offered_tools(parts.tools, episode.row)
        self.schemas = [] if self.tools is None else self.tools.schemas
        self.user = user_of(parts.tools, episode.row, parts.limits.max_user_turns)
        self.room = Room(parts.limits, parts.engine.max_model_len)
        self.cutter = TokenCutter(parts.tokenizer, parts.limits.max_tool_response_tokens)
        self.started = parts.clock()
        self.messages = list(episode.messages)  # of the prompt
        self.calls_run = 0
        self.dropped: Drop | None = None
        self.failure: str | None = None
        self.metadata: dict[str, Any] = {}
        self.ledger: Ledger | None = None
        self.history: History | None = None  # where the context has a limit

    async def play(self) -> Trajectory:
        """Run the loop under its deadline, with a tool session around it."""
        reward: float | None = None
        reason: StopReason | None = None
        deadline = asyncio.timeout(self.parts.limits.deadline_s)
        try:
            async with deadline:
                if self.tools is None:
                    reason = await self._loop(None)
                else:
                    async with self.tools.session(self.episode.row) as session:
                        reason = await self._loop(session)
                        if self.dropped is None:
                            reward = await session.reward()
                        deadline.reschedule(None)  # tidying up has bounds of its own
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = StopReason.DEADLINE
        except DropEpisode as drop:
            reason, self.dropped = reason or StopReason.DROPPED, drop.at(DropCause.ENVIRONMENT)
        except InfrastructureError as error:
            reason, self.failure = StopReason.ENGINE_FAILURE, f"{type(error).__name__}: {error}"
        ledger = self.ledger or self._open_ledger(None)
        return ledger.finish(
            reason,
            started_s=self.started,
            duration_s=self._now(),
            failure=self.failure,
            reward=reward,
            metadata=self.metadata,
            dropped=self.dropped,
        )

    async def _loop(self, session: ToolSession | None) -> StopReason:
        ledger = self.ledger = self._open_ledger(session)
        while True:
            # 1. room
            room = self.room.budget(ledger)
            self.dropped = self.room.refuses(ledger, observed=session is not None and bool(session.observation))
            if self.dropped is not None:
                return room.when_full if room.tokens < 1 else StopReason.CONTEXT_FULL
            # 2. sample and parse
            turn = await self._turn(ledger, room.tokens, reads_calls=session is not None)
            # 3., 4. and 5. ends without calls
            reason = self._reason_to_stop(ledger, turn, room)
            if reason is StopReason.FINISHED and self.user is not None:
                reason = await self._hear_user(self.user, ledger, session, turn)
                if reason is not None:
                    return reason
                continue
            if reason is not None or session is None:
                self._record(ledger, turn)
                return reason or StopReason.FINISHED
            # 6. tools
            results = await self._call_tools(ledger, session, turn)
            for result in results:
                if result.error is ToolErrorKind.DROPPED:
                    self.dropped = Drop(DropCause.TOOL, result.content.removeprefix("Error: "))
                    return StopReason.DROPPED
            if any(result.ends_episode for result in results):
                return StopReason.STOP_TOOL
            # 7. bridge
            answers = [answer_message(*answered) for answered in zip(results, turn.attempts, strict=True)]
            reason = self._go_on(ledger, turn, self._bridge(ledger.all_ids, answers), answers)
            if reason is not None:
                return reason

    async def _turn(self, ledger: Ledger, max_tokens: int, *, reads_calls: bool) -> Turn:
        """Sample a turn and write down what was said."""
        started = self._now()
        request = SampleRequest(
            ids=ledger.all_ids,
            max_tokens=max_tokens,
            stop_ids=self.parts.chat.stop_ids,
            options=self.shared.options,
            seed=None if self.episode.seed is None else self.episode.seed + len(ledger.turns),
        )
        sample = await self.shared.sample(request)
        parsed = self._with_unmarked(self.parts.chat.parse(sample.ids, before=ledger.all_ids), ledger)
        if not reads_calls:
            parsed = without_calls(parsed, text_of(sample, self.parts.tokenizer, self.parts.chat.stop_ids))
        return turn_said(ledger, sample, parsed, started_s=started, duration_s=self._now() - started)

    def _go_on(
        self, ledger: Ledger, said: Turn, bridge: Sequence[int], answers: Sequence[Message]
    ) -> StopReason | None:
        """Add what follows a turn, behind it or in a new segment; return why that cannot be."""
        if self.history is not None:
            self.history.add(ledger.all_ids[len(ledger.all_ids) - (said.end - said.start) :], answers)
            if len(ledger.all_ids) + len(bridge) > self.history.limit.max_tokens:
                return self._rewrite(ledger, self.history)
        if len(bridge) >= self.room.left(ledger):
            return self.room.budget(ledger).when_full
        ledger.context(bridge)
        return None

    def _rewrite(self, ledger: Ledger, history: History) -> StopReason | None:
        """Begin a new segment without old results."""
        prompt = history.without_results()
        if ledger.n_added >= self.parts.limits.max_completion_length:
            return StopReason.LENGTH
        if len(prompt) > history.limit.max_tokens:
            self.failure = (
                f"the history has {len(prompt)} tokens when it is compacted, and context allows {history.limit.max_tokens} "
                f"(max_tokens); raise it, keep fewer turns (keep_last_turns), or cut results (max_tool_response_tokens)"
            )
            return StopReason.CONTEXT_FULL
        ledger.rewrite(prompt)
        return None

    async def _hear_user(
        self, user: User, ledger: Ledger, session: ToolSession | None, turn: Turn
    ) -> StopReason | None:
        """Let the user reply to an answer; return why the episode ends, if it does. Record the turn in any case."""
        text: str | StopReason = StopReason.FINISHED
        try:
            text = await user.reply(session, turn.content, last_turn=self._is_last_turn(ledger))
        finally:
            if isinstance(text, StopReason):
                self._record(ledger, turn)
        if isinstance(text, StopReason):
            return text
        message: Message = {"role": "user", "content": text}
        reason = self._go_on(ledger, turn, self._bridge(ledger.all_ids, [message]), [message])
        if reason is not None:
            self._record(ledger, turn)  # what the model cannot read is not said
            return reason
        self._record(ledger, replace(turn, user=text))
        ledger.say(message)
        user.said += 1
        return None

    def _with_unmarked(self, parsed: ParsedTurn, ledger: Ledger) -> ParsedTurn:
        """Return the turn with the call that stands in it without markers, if one does and is looked for."""
        if self.parts.unmarked_calls == "ignore" or self.tools is None:
            return parsed
        # A model that writes a call with its markers and then without quotes it; one that never has markers calls again.
        form = None if self.parts.unmarked_calls == "accept" else self.parts.chat.call_text
        return with_unmarked(parsed, self.schemas, form=form, made=calls_made(ledger.turns))

    def _reason_to_stop(self, ledger: Ledger, turn: Turn, room: TurnBudget) -> StopReason | None:
        if not turn.closed and not room.by_turn_cap:
            return room.when_full
        if not turn.attempts:
            return StopReason.FINISHED if turn.closed else StopReason.LENGTH
        return StopReason.MAX_TURNS if self._is_last_turn(ledger) else None

    def _is_last_turn(self, ledger: Ledger) -> bool:
        max_turns = self.parts.limits.max_turns
        return max_turns is not None and len(ledger.turns) + 1 >= max_turns

    async def _call_tools(self, ledger: Ledger, session: ToolSession, turn: Turn) -> tuple[ToolResult, ...]:
        """Answer every attempt of the turn, in order.

        Record the turn even if the deadline passes meanwhile.
        """
        results: tuple[ToolResult, ...] = ()
        started = self._now()
        try:
            budget = self.parts.limits.max_tool_calls
            allowed = len(turn.attempts) if budget is None else max(0, budget - self.calls_run)
            answered = await session.call(turn.attempts[:allowed]) if allowed else ()
            refused = tuple(refusal(attempt.name, budget) for attempt in turn.attempts[allowed:])
            self.calls_run += len(answered)
            shown = [(result, self.cutter(result.content, result.left_out)) for result in (*answered, *refused)]
            results = tuple(
                replace(result, content=text.text, left_out=text.left_out, started_s=started) for result, text in shown
            )
            if answered and not any(result.error is ToolErrorKind.DROPPED for result in answered):
                said = await session.after_turn()
                if said.reward is not None:
                    turn = replace(turn, reward=said.reward)
                if said.over:
                    results = (*results[:-1], replace(results[-1], ends_episode=True))
            ledger.say(*(answer_message(*answered) for answered in zip(results, turn.attempts, strict=True)))
        finally:
            self._record(ledger, turn.answered(results))
        return results

    def _record(self, ledger: Ledger, turn: Turn) -> None:
        ledger.turn(turn)
        if self.shared.on_turn is not None:
            self.shared.on_turn(self.episode, turn)

    def _open_ledger(self, session: ToolSession | None) -> Ledger:
        if session is not None and session.observation:
            self.messages = with_observation(self.messages, session.observation)
            self.metadata["observation"] = session.observation
        chat, thinking = self.parts.chat, self.episode.enable_thinking
        prompt = chat.prompt(self.messages, self.schemas, enable_thinking=thinking)
        # A bridge is rendered behind the same prompt: a template may write a result otherwise after another one.
        self._bridge = partial(chat.bridge, messages=self.messages, schemas=self.schemas, enable_thinking=thinking)
        limit = self.parts.limits.context
        if limit is not None:
            self.history = History(limit, prompt, self._bridge)
        return Ledger(prompt, expects_logprobs=self.parts.engine.gives_logprobs)

    def _now(self) -> float:
        return self.parts.clock() - self.started

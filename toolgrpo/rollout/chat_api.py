"""A chat endpoint in place of an engine: messages and tools in, one turn out (`--engine chat_api`).

The episode is that of `episode.py`, with its numbered ends, tools, environment, users, limits and deadline. Only a turn
differs: the endpoint says it.

Invariants:

* There are no token ids: a trajectory holds a 0 for each token, so that lengths and limits are those of other episodes.
  Sampled tokens are counted by the endpoint (`usage`); all others, and those of a reply without `usage`, are estimated by
  their characters. `metadata["usage"]` has what the endpoint counted. There are no log-probabilities.
* A reply is data: bounded, checked, and never more than the request asked for. A call of it that cannot be read is answered
  as any other model's. An endpoint that fails after retries drops its episode (`DropCause.ENDPOINT`).
* A conversation goes back to the endpoint in a form that strict ones take: each call has an id and a JSON object for
  arguments, each result names its call.

Not covered: streams, images, thinking that an endpoint wants back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from toolgrpo.chat.attempts import attempt_from, malformed
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.unmarked import calls_made, with_unmarked
from toolgrpo.engines.base import (
    CHAT_API,
    KEY_VARIABLE,
    NO_TOKENS,
    FinishReason,
    Sample,
    SampleRequest,
    SamplingOptions,
)
from toolgrpo.episode.dropped import EndpointLost
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn
from toolgrpo.errors import ConfigError, EngineError
from toolgrpo.rollout.episode import EpisodeRun, turn_said
from toolgrpo.rollout.limits import TurnBudget
from toolgrpo.rollout.scheduler import Episode, EpisodeRunner, run_blocking
from toolgrpo.support.chat_endpoint import ChatEndpoint, EndpointFailed
from toolgrpo.tools.bounds import read_json

AT_ONCE = 16  # episodes, where nobody says otherwise
_CHARACTERS = 4  # of a token, about
_MOST_CALLS = 128  # of a turn, as OpenAI's API has it
_FIRST_TOKENS, _FIRST_LOOK_S = 256, 60.0  # of the request before the first question
_TOO_LONG = re.compile(r"context.?(?:length|window|size)|maximum context|too long", re.IGNORECASE)


class CountedText:
    """Stands for the tokenizer and the chat format of a model behind an endpoint: four characters are a token.

    The ids of a prompt and of a bridge are zeros, as many as tokens are estimated.
    """

    name, stop_ids, call_text = "chat_api", (), ""

    def __len__(self) -> int:
        return 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [_number(text[place : place + _CHARACTERS]) for place in range(0, len(text), _CHARACTERS)]

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(map(_characters, ids))

    def prompt(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], *, enable_thinking: bool | None = None
    ) -> list[int]:
        return _estimated([*messages, *schemas])

    def bridge(self, ids: Sequence[int], tool_messages: Sequence[Message], **_: Any) -> list[int]:
        return _estimated(tool_messages)

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        return ParsedTurn("", None, (), True)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn as the endpoint said it, its calls as they go back to it, and what it counted."""

    parsed: ParsedTurn
    calls: tuple[dict[str, Any], ...]
    usage: Mapping[str, float]


@dataclass(slots=True)
class ChatAPI:
    """An endpoint and the model that it is asked for, in the place of an `Engine`: it is opened around a rollout."""

    base_url: str
    model: str
    timeout_s: float  # of a request with all its tries
    limit_name: str = "max_tokens"  # of a reply; OpenAI's newer models know another name only
    flag: str = "--base_url"  # that named it
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the endpoint's chat template
    name: str = CHAT_API
    max_model_len: int = 1 << 30  # its window is not known
    gives_logprobs: bool = False
    same_numbers_as_trainer: bool = False
    takes_weights_while_open: bool = False
    _client: aiohttp.ClientSession | None = field(default=None, init=False)

    async def open(self) -> None:
        self._client = self._endpoint(self.timeout_s).client()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def sample(self, request: SampleRequest) -> Sample:
        raise EngineError(NO_TOKENS)

    def load_weights(self, weights: Iterable[Any]) -> None:
        raise EngineError(NO_TOKENS)

    def shutdown(self) -> None: ...

    async def say(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        max_tokens: int,
        options: SamplingOptions,
        *,
        enable_thinking: bool | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Return the next turn of a conversation; raise `EndpointFailed`."""
        assert self._client is not None, "it is opened around a rollout"
        body = {"model": self.model, "messages": list(messages), self.limit_name: max_tokens, **_sampling(options)}
        if schemas:
            body["tools"] = list(schemas)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if asked := {**self.template_arguments, **thinking}:
            body["chat_template_kwargs"] = asked
        return await self._endpoint(timeout_s or self.timeout_s).ask(self._client, lambda: (body, read_reply))

    def look(self, schemas: Sequence[Mapping[str, Any]], options: SamplingOptions) -> str:
        """Ask once before the first question; return what is said of the endpoint, or raise what is wrong."""
        return run_blocking(self._look(schemas, options))

    async def _look(self, schemas: Sequence[Mapping[str, Any]], options: SamplingOptions) -> str:
        greeting = [{"role": "user", "content": "Say OK."}]
        await self.open()
        try:
            for _ in range(2):
                try:
                    await self.say(
                        greeting, schemas, _FIRST_TOKENS, options, timeout_s=min(self.timeout_s, _FIRST_LOOK_S)
                    )
                    return f"{self.name}: {self.model} at {self.base_url} answers"
                except EndpointFailed as failed:
                    if (
                        failed.status != 400
                        or "max_completion_tokens" not in str(failed)
                        or self.limit_name != "max_tokens"
                    ):
                        raise
                    self.limit_name = "max_completion_tokens"
            raise AssertionError("unreachable: the second try raises or returns")
        except EndpointFailed as failed:
            raise self._explained(failed, tools=bool(schemas)) from failed
        finally:
            await self.close()

    def _explained(self, failed: EndpointFailed, *, tools: bool) -> ConfigError | EngineError:
        """Return the error that ends a run before its first question."""
        where, status = f"the endpoint {self.base_url}", failed.status
        if status in (401, 403):
            sent = "the key in" if self._endpoint(0).has_key else "a request without a key; put one into"
            return ConfigError(f"{where} refuses {sent} {KEY_VARIABLE}: {failed}")
        if status in (404, 405) or (status is not None and 300 <= status < 400):
            return ConfigError(
                f"{where} does not know the model {self.model!r}, or {self.flag} is not its address up to /v1: {failed}"
            )
        if status is not None:
            cause = " with these tools and sampling options" if tools else ""
            return ConfigError(f"{where} refuses requests for {self.model!r}{cause}: {failed}")
        if str(failed).startswith("no turn in its reply"):
            return ConfigError(
                f"{where} is not an OpenAI-compatible endpoint, or {self.flag} is not its address up to /v1: {failed}"
            )
        return EngineError(f"{where} sends no reply: {failed}; start it, correct {self.flag}, or try again later")

    def _endpoint(self, timeout_s: float) -> ChatEndpoint:
        return ChatEndpoint(self.base_url, KEY_VARIABLE, timeout_s)


class ChatPlayer:
    """Plays episodes through an endpoint; a `Player`."""

    def __init__(self, api: ChatAPI) -> None:
        self.name = f"{api.model} at {api.base_url}"
        self._api = api

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        return await _ChatRun(shared, episode, self._api).play()

    def close(self) -> None: ...


class _ChatRun(EpisodeRun):
    """One episode whose turns an endpoint says."""

    def __init__(self, shared: EpisodeRunner, episode: Episode, api: ChatAPI) -> None:
        super().__init__(shared, episode)
        self.api = api
        self.said: list[Message] = []  # after the prompt, as the endpoint is sent it
        self.ids: set[str] = set()  # of calls
        self.window_full = False
        self.metadata = {"usage": {"requests": 0}}

    async def _turn(self, ledger: Ledger, max_tokens: int, *, reads_calls: bool) -> Turn:
        started, options = self._now(), self.shared.options
        thinking = self.episode.enable_thinking
        conversation = [*as_sent(self.messages), *self.said]
        try:
            with self.shared.waiting:
                reply = await self.api.say(conversation, self.schemas, max_tokens, options, enable_thinking=thinking)
        except EndpointFailed as failed:
            if failed.status not in (400, 413, 422) or not _TOO_LONG.search(str(failed)) or not ledger.turns:
                raise EndpointLost(f"the endpoint {self.api.base_url} failed: {failed}") from failed
            self.window_full = True
            reply = Reply(ParsedTurn("", None, (), closed=False), (), {})
        parsed = self._with_ids(reply.parsed if reads_calls else replace(reply.parsed, attempts=()), ledger)
        counted = reply.usage.get("completion_tokens")
        said = [parsed.content, parsed.reasoning, *(attempt.raw for attempt in parsed.attempts)]
        n_tokens = min(max_tokens, max(1, len(_estimated(said)) if counted is None else int(counted)))
        if not parsed.closed and counted is not None and n_tokens < max_tokens:
            self.window_full = True  # it was cut by a limit of the endpoint's own
        self._count(reply.usage)
        self._remember(parsed, reply.calls)
        reason = FinishReason.STOP if parsed.closed else FinishReason.LENGTH
        sample = Sample((0,) * n_tokens, None, reason)
        return turn_said(ledger, sample, parsed, started_s=started, duration_s=self._now() - started)

    def _reason_to_stop(self, ledger: Ledger, turn: Turn, room: TurnBudget) -> StopReason | None:
        return StopReason.CONTEXT_FULL if self.window_full else super()._reason_to_stop(ledger, turn, room)

    def _go_on(
        self, ledger: Ledger, said: Turn, bridge: Sequence[int], answers: Sequence[Message]
    ) -> StopReason | None:
        self.said += as_sent(answers)
        return super()._go_on(ledger, said, bridge, answers)

    def _with_ids(self, parsed: ParsedTurn, ledger: Ledger) -> ParsedTurn:
        """Return the turn with an id for each call that no other call of the episode has."""
        if self.parts.unmarked_calls == "accept" and self.schemas:
            parsed = with_unmarked(parsed, self.schemas, form=None, made=calls_made(ledger.turns))
        attempts = []
        for attempt in parsed.attempts:
            given = attempt.call_id
            if given is None or given in self.ids:
                given = f"call{len(self.ids) + 1:05d}"
            self.ids.add(given)
            attempts.append(replace(attempt, call_id=given))
        return replace(parsed, attempts=tuple(attempts))

    def _remember(self, parsed: ParsedTurn, given: Sequence[Mapping[str, Any]]) -> None:
        """Keep the turn as it goes back; what an endpoint adds to a call (a signature) goes back with it."""
        message: Message = {"role": "assistant", "content": parsed.content}
        added = [*given, *({} for _ in parsed.attempts[len(given) :])]
        if parsed.attempts:
            message["tool_calls"] = [
                {**more, **_call(attempt.call_id, attempt.name, attempt.arguments)}
                for attempt, more in zip(parsed.attempts, added, strict=False)
            ]
        self.said.append(message)

    def _count(self, usage: Mapping[str, float]) -> None:
        counts = self.metadata["usage"]
        counts["requests"] += 1
        for name, number in usage.items():
            counts[name] = counts.get(name, 0) + number


def read_reply(reply: bytes) -> Reply:
    """Return the turn in a reply; raise ValueError for one that has none."""
    try:
        value = read_json(reply.decode("utf-8"))
        choice = value["choices"][0]
        if choice.get("error") or choice.get("finish_reason") in ("error", "abort"):  # with status 200
            raise ValueError(f"it was cut off: {choice.get('error') or choice['finish_reason']}")
        message = choice["message"]
        calls = [_read_call(one) for one in (message.get("tool_calls") or ())[:_MOST_CALLS]]
        thought = message.get("reasoning_content") or message.get("reasoning")
        parsed = ParsedTurn(
            content=_text(message.get("content")),
            reasoning=thought if isinstance(thought, str) else None,
            attempts=tuple(attempt for attempt, _ in calls),
            closed=choice.get("finish_reason") != "length",
        )
        return Reply(parsed, tuple(added for _, added in calls), _usage(value.get("usage")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no turn in its reply ({str(error) or type(error).__name__:.80}): {reply[:200]!r}") from error


def _text(content: Any) -> str:
    """Return the text of a content, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _read_call(call: Any) -> tuple[CallAttempt, dict[str, Any]]:
    """Return a call as an attempt, and what else stands in it."""
    function = call["function"]
    name, arguments = function.get("name"), function.get("arguments")
    raw = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if not isinstance(name, str) or not name:
        attempt = malformed(AttemptStatus.MISSING_NAME, raw, "the call has no name")
    else:
        attempt = attempt_from(raw, name, arguments if arguments not in (None, "") else {})
    given = call.get("id")
    good = isinstance(given, str) and re.fullmatch(r"[\w.:-]{1,128}", given)
    added = {key: value for key, value in call.items() if key not in ("id", "type", "index", "function")}
    return replace(attempt, call_id=given if good else None), added


def _usage(given: Any) -> dict[str, float]:
    """Return the numbers of `usage` that can be believed: tokens, and a cost if the endpoint knows one."""
    found = {} if not isinstance(given, Mapping) else given
    names = ("prompt_tokens", "completion_tokens", "cost")
    return {
        name: found[name]
        for name in names
        if isinstance(found.get(name), int | float) and not isinstance(found[name], bool)
        if math.isfinite(found[name]) and 0 <= found[name] < 2**40
    }


def _sampling(options: SamplingOptions) -> dict[str, float]:
    """Return the sampling parameters; those at their defaults stay out, because strict endpoints know few of them."""
    default = SamplingOptions()
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}
    return {"temperature": options.temperature, **given}


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return messages as an endpoint takes them: a call without an id gets one, and its result names it."""
    sent: list[Message] = []
    waiting: dict[str, Any] = {}  # names of calls without a result, by their ids
    for number, message in enumerate(messages):
        shown = {key: message[key] for key in ("role", "content") if message.get(key) is not None}
        shown.setdefault("content", "")
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = [
                (call.get("id") or f"prompt{number:03d}_{place}", call.get("function", call))
                for place, call in enumerate(message["tool_calls"])
            ]
            shown["tool_calls"] = [_call(one, made.get("name"), made.get("arguments")) for one, made in calls]
            waiting = {one: made.get("name") for one, made in calls}
        elif message["role"] == "tool":
            named = [one for one, name in waiting.items() if name == message.get("name")]
            shown["tool_call_id"] = message.get("tool_call_id") or next(iter((*named, *waiting)), "unknown")
            waiting.pop(shown["tool_call_id"], None)
        sent.append(shown)
    return sent


def _call(call_id: str | None, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call in the form that strict endpoints take; what could not be read is left out of it."""
    known = re.sub(r"[^\w.-]", "_", str(name or "unknown"), flags=re.ASCII)[:64]
    if isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(dict(arguments) if isinstance(arguments, Mapping) else {}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": known, "arguments": text}}


def _estimated(texts: Iterable[Any]) -> list[int]:
    """Return a 0 for each token that these texts or messages may have."""
    size = sum(
        len(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, default=str)) for one in texts if one
    )
    return [0] * max(1, -(-size // _CHARACTERS))


def _number(characters: str) -> int:
    return int.from_bytes(b"\1" + characters.encode("utf-32-be", "surrogatepass"), "big")


def _characters(number: int) -> str:
    return number.to_bytes(_CHARACTERS * 4 + 1, "big").lstrip(b"\0")[1:].decode("utf-32-be", "surrogatepass")

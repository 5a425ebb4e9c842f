"""What a request becomes: an extension, a branch or a fork; and that a trainer trains on all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory
from toolgrpo.gateway.conversations import as_repeated
from toolgrpo.gateway.openai_forms import ChatRequest, ModelAnswer, Refused, TextRequest
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout import Episode, EpisodeRunner
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, scripted_runner, tiny_trainer

CALL = 'call add {"a": 1, "b": 2}'
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
QUESTION: Message = {"role": "user", "content": "q"}
Act = Callable[[GatewaySession], Awaitable[None]]


def asked(*messages: Message, tools: Sequence[Any] = (ADD,), **more: Any) -> ChatRequest:
    return ChatRequest(messages, tuple(tools), **more)


def result(said: ModelAnswer, content: str = "3") -> Message:
    return {"role": "tool", "tool_call_id": said.calls[0].id, "content": content}


def session_of(script: Any, act: Act, *, bridges: bool = False, **limits: Any) -> tuple[Trajectory, ScriptedEngine]:
    """Let `act` ask a session on its own loop, and return what came of it."""
    engine = ScriptedEngine(script)

    async def main() -> Trajectory:
        await engine.open()
        session = GatewaySession(scripted_runner(engine, **limits), Episode((QUESTION,)), bridges_users=bridges)
        await act(session)
        await session.end()
        await engine.close()
        return session.trajectory(session.limit or StopReason.FINISHED)

    return asyncio.run(main()), engine


def texts(trajectory: Trajectory) -> list[str]:
    return [ByteChat.text(segment.ids) for segment in trajectory.segments]


def test_a_call_without_its_markers_is_handed_out_where_that_is_wanted() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        assert [(call.name, call.arguments) for call in first.calls] == [("add", '{"a": 1, "b": 2}')]
        await session.answer(asked(QUESTION, as_repeated(first), result(first)))

    bare = ByteChat.say('{"name": "add", "arguments": {"a": 1, "b": 2}}')
    done, _ = session_of([bare, ByteChat.say("3")], act, unmarked_calls="accept")
    assert [(call.status, call.ok) for call in done.calls] == [(AttemptStatus.ACCEPTED, True)]
    assert len(done.segments) == 1


def test_requests_that_are_open_together_share_the_room_that_is_left() -> None:
    async def act(session: GatewaySession) -> None:
        said = await asyncio.gather(*(session.answer(asked(QUESTION, tools=())) for _ in range(4)))
        assert sorted(one.finish_reason for one in said) == ["length", "length", "stop", "stop"]

    done, _ = session_of(
        lambda _, number: ScriptedReply(ByteChat.say("x" * 24), delay_s=0.01 * number), act, max_completion_length=60
    )
    assert sum(map(sum, (segment.mask for segment in done.segments))) == 60 and done.stop_reason is StopReason.LENGTH


def test_arguments_that_come_back_with_another_kind_of_number_are_the_same() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        said = as_repeated(first)
        said["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": 2}
        await session.answer(asked(QUESTION, said, result(first)))
        assert not session.forks

    done, _ = session_of([ByteChat.say('call add {"a": 1.0, "b": 2.0}'), ByteChat.say("3")], act)
    assert done.calls[0].result == "3"


def told(said: ModelAnswer) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call.id, "content": f"of {call.arguments}"} for call in said.calls]


@pytest.mark.parametrize("turned", [False, True])
def test_results_stand_in_the_order_of_the_calls_and_a_broken_one_is_answered(turned: bool) -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        assert len(first.calls) == 2
        await session.answer(asked(QUESTION, as_repeated(first), *told(first)[:: -1 if turned else 1]))

    done, _ = session_of([ByteChat.say('call add {"a": 1}\ncall add {\ncall add {"a": 3}'), ByteChat.say("ok")], act)
    places = [texts(done)[0].index(words) for words in ('>tool:of {"a": 1}', ">tool:Error: ", '>tool:of {"a": 3}')]
    assert places == sorted(places) and [call.ok for call in done.calls] == [True, False, True]
    assert done.calls[2].result == 'of {"a": 3}'


class OneId(ByteChat):
    """A model that gives all of its calls one id."""

    def parse(self, ids: Any, *, before: Any = ()) -> Any:
        turn = super().parse(ids, before=before)
        return replace(turn, attempts=tuple(replace(one, call_id="abcdefgh1") for one in turn.attempts))


def test_each_call_has_an_id_of_its_own() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        assert len({call.id for call in first.calls}) == 2
        await session.answer(asked(QUESTION, as_repeated(first), *told(first)))

    done, _ = session_of([ByteChat.say('call add {"a": 1}\ncall add {"a": 2}'), ByteChat.say("ok")], act, chat=OneId())
    assert [call.result for call in done.calls] == ['of {"a": 1}', 'of {"a": 2}']


def test_a_request_without_tools_is_answered_in_text() -> None:
    async def act(session: GatewaySession) -> None:
        said = await session.answer(asked(QUESTION, tools=()))
        assert (said.calls, said.content, said.finish_reason) == ((), CALL, "stop")

    done, _ = session_of([ByteChat.say(CALL)], act)
    assert not done.calls


def test_results_beside_a_users_words_are_results() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        more = {"role": "user", "content": "hm"}
        await session.answer(asked(QUESTION, as_repeated(first), result(first), more))

    done, _ = session_of([ByteChat.say(CALL), ByteChat.say("ok")], act)
    assert [call.result for call in done.calls] == ["3"]


def test_a_result_before_an_empty_answer_is_not_left_out_later() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        shown = (QUESTION, as_repeated(first), result(first, "x" * 50))
        cut = await session.answer(asked(*shown))
        assert cut.content == ""
        with suppress(Refused):
            await session.answer(asked(*shown, as_repeated(cut), {"role": "user", "content": "go on"}))

    script = [ByteChat.say(CALL), ByteChat.say("hi")]
    _, engine = session_of(script, act, bridges=True, max_completion_length=60)
    assert all("x" * 50 in ByteChat.text(request.ids) for request in engine.requests[1:])


def test_a_call_that_is_quoted_is_not_made_again() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        last = await session.answer(asked(QUESTION, as_repeated(first), result(first)))
        assert last.calls == () and last.finish_reason == "stop"

    quoted = ByteChat.say('I used:\n{"name": "add", "arguments": {"a": 1, "b": 2}}')
    session_of([ByteChat.say(CALL), quoted], act, unmarked_calls="accept")


class HeldChat(ByteChat):
    """A format that renders only when the loop has gone on meanwhile."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def _held(self, rendered: list[int]) -> list[int]:
        self.begun.release()
        assert self.go_on.acquire(timeout=10), "the loop waits for a rendering"
        return rendered

    def prompt(self, *given: Any, **more: Any) -> list[int]:
        return self._held(super().prompt(*given, **more))

    def bridge(self, *given: Any, **more: Any) -> list[int]:
        return self._held(super().bridge(*given, **more))

    def encode(self, *given: Any, **more: Any) -> list[int]:
        return self._held(super().encode(*given, **more))


def test_the_loop_goes_on_while_requests_are_rendered_in_their_order() -> None:
    chat = HeldChat()

    async def answered(session: GatewaySession, *requests: ChatRequest | TextRequest) -> list[ModelAnswer]:
        asking = [asyncio.create_task(session.answer(request)) for request in requests]
        for _ in requests:
            while not chat.begun.acquire(blocking=False):
                await asyncio.sleep(0.001)
            assert not chat.begun.acquire(blocking=False)  # those of one episode come one after another
            chat.go_on.release()
        return await asyncio.gather(*asking)

    async def act(session: GatewaySession) -> None:
        (first,) = await answered(session, asked(QUESTION))
        told = (QUESTION, as_repeated(first))
        await answered(session, *(asked(*told, result(first, text)) for text in "34"))
        await answered(session, TextRequest(prompt="text"))

    done, _ = session_of([ByteChat.say(text) for text in (CALL, "3", "4", "5")], act, chat=chat, tokenizer=chat)
    assert [segment.parent for segment in done.segments] == [None, 0, None] and len(done.turns) == 4


@pytest.mark.parametrize(
    ("told", "more", "why"),
    [
        ({"content": "  so \n", "reasoning_content": "made up"}, {}, None),
        ({"content": "other words"}, {}, "history"),
        ({}, {"tools": ()}, "tools"),
    ],
)
def test_what_rewrites_a_turn_forks_and_its_spaces_and_thinking_do_not(
    told: Message, more: Any, why: str | None
) -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        await session.answer(asked(QUESTION, {**as_repeated(first), **told}, result(first), **more))

    done, engine = session_of([ByteChat.say(f"so\n{CALL}"), ByteChat.say("3")], act)
    if why is None:
        assert done.metadata["gateway"]["forks"] == {} and len(done.segments) == 1
        assert tuple(engine.requests[1].ids) == (*done.prompt_ids, *done.ids[:-2])
    else:
        assert done.metadata["gateway"]["forks"] == {why: 1}
        assert texts(done) == [f"so\n{CALL}|", "3|"]
        assert [segment.prompt_ids for segment in done.segments] == [tuple(one.ids) for one in engine.requests]
        assert [message["content"] for message in done.messages] == ["so", "3"]


def test_two_requests_that_go_on_from_one_turn_branch_with_its_very_tokens() -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        told = (QUESTION, as_repeated(first))
        await asyncio.gather(*(session.answer(asked(*told, result(first, content))) for content in ("3", "4")))

    def script(request: SampleRequest, number: int) -> Any:
        return ScriptedReply(ByteChat.say(CALL if number == 0 else str(number)), delay_s=0.01)

    done, engine = session_of(script, act)
    assert done.metadata["gateway"]["forks"] == {"branch": 1}
    assert [segment.parent for segment in done.segments] == [None, 0]
    one, other = done.segments
    shared = len(one.prompt_ids) + len(ByteChat.say(CALL))
    assert (*one.prompt_ids, *one.ids)[:shared] == other.prompt_ids[:shared]
    assert engine.most_open_requests == 2


@pytest.mark.parametrize("bridges", [True, False])
def test_what_a_user_says_to_an_answer_extends_by_a_bridge_that_is_proven(bridges: bool) -> None:
    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        called = [QUESTION, as_repeated(first), result(first)]
        second = await session.answer(asked(*called))
        await session.answer(asked(*called, as_repeated(second), {"role": "user", "content": "and?"}))

    said = [ByteChat.say(CALL), ByteChat.say("3"), ByteChat.say("ho")]
    done, _ = session_of(said, act, bridges=bridges)
    if bridges:
        assert texts(done) == [f"{CALL}|>tool:3|>3|>user:and?|>ho|"] and done.metadata["gateway"]["forks"] == {}
        assert [turn.user for turn in done.turns] == [None, "and?", None]
        assert [message["role"] for message in done.messages] == ["assistant", "tool", "assistant", "user", "assistant"]
    else:
        assert done.metadata["gateway"]["forks"] == {"user_turn": 1} and len(done.segments) == 2


def test_an_episode_without_room_is_answered_with_nothing_and_then_refused() -> None:
    answers: list[ModelAnswer] = []

    async def act(session: GatewaySession) -> None:
        answers.append(await session.answer(asked(QUESTION)))
        for _ in range(2):
            answers.append(await session.answer(asked(QUESTION, as_repeated(answers[0]), result(answers[0], "x" * 50))))

    done, _ = session_of([ByteChat.say(CALL)], act, max_completion_length=60)
    assert [(one.finish_reason, len(one.ids)) for one in answers[1:]] == [("length", 0)] * 2
    assert done.stop_reason is StopReason.LENGTH and texts(done) == [f"{CALL}|"]


@pytest.mark.parametrize(("end", "said", "is_cut"), [({"max_tokens": 3}, "abc", True), ({"stop": ["c"]}, "ab", False)])
def test_a_turn_that_is_cut_says_so_and_one_that_a_stop_text_ends_was_not(end: Any, said: str, is_cut: bool) -> None:
    async def act(session: GatewaySession) -> None:
        cut = await session.answer(asked(QUESTION, **end))
        assert (cut.content, cut.finish_reason) == (said, "length" if is_cut else "stop")

    done, _ = session_of([ByteChat.say("abcdef")], act)
    assert texts(done) == ["abc"] and done.stop_reason is StopReason.FINISHED
    assert done.turns[0].closed is not is_cut
    assert done.ended_itself is not is_cut, "an agent's own limit is one"


@pytest.mark.parametrize(("of_expert", "of_last", "itself"), [(3, None, True), (None, 3, False)])
def test_what_was_said_last_ends_an_episode(of_expert: int | None, of_last: int | None, itself: bool) -> None:
    """A sub-agent's conversation begins later and ends before; its end is not the episode's, nor is what it said."""

    async def act(session: GatewaySession) -> None:
        first = await session.answer(asked(QUESTION))
        await session.answer(asked({"role": "user", "content": "expert?"}, tools=(), max_tokens=of_expert))
        await session.answer(asked(QUESTION, as_repeated(first), result(first, "7"), max_tokens=of_last))

    done, _ = session_of([ByteChat.say(one) for one in (CALL, "seven it is", "forty-two")], act)
    assert len(done.segments) == 2 and done.ended_itself is itself
    assert done.completion()[-1]["content"] == ("forty-two" if itself else "for")


def test_an_agent_whose_prompt_did_not_fit_and_that_shortens_it_has_met_no_limit() -> None:
    async def act(session: GatewaySession) -> None:
        await session.answer(asked(QUESTION))
        with pytest.raises(Refused, match="context window"):
            await session.answer(asked({"role": "user", "content": "q" * 9000}, tools=()))
        assert session.limit is StopReason.CONTEXT_FULL
        await session.answer(asked({"role": "user", "content": "r"}, tools=()))

    done, _ = session_of([ByteChat.say("a"), ByteChat.say("b")], act)
    assert done.stop_reason is StopReason.FINISHED


class Rewriting:
    """A player whose agent asks twice, and says its first answer again in other words."""

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        session = GatewaySession(shared, episode)
        question: Message = {"role": "user", "content": str(episode.row["prompt"])}
        first = await session.answer(asked(question, tools=()))
        told: Message = {"role": "assistant", "content": f"I said {first.content}"}
        last = await session.answer(asked(question, told, {"role": "user", "content": "sure?"}, tools=()))
        await session.end()
        return session.trajectory(StopReason.FINISHED, reward=float(len(last.content) % 2))

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.e2e
def test_a_trainer_trains_on_every_segment_of_an_agents_episodes(tmp_path: Path) -> None:
    seen: list[Trajectory] = []

    def reward(trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
        seen.extend(trajectories)
        return [one.reward for one in trajectories]

    def script(request: SampleRequest, number: int) -> list[int]:
        return ByteChat.say("y" * (1 + number % 5))

    with tiny_trainer(tmp_path, reward, script, parts={"agent": Rewriting()}, max_steps=1) as trainer:
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        trainer.train()
        moved = any(bool((one != other).any()) for one, other in zip(before, trainer.model.parameters(), strict=True))
    assert moved and {len(one.segments) for one in seen} == {2}
    logged = {key: value for line in trainer.state.log_history for key, value in line.items()}
    assert logged["gateway/segments"] == 2 and logged["gateway/forks/history"] == len(seen)

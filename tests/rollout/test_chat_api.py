"""A model behind a chat endpoint plays episodes: over real HTTP, with an endpoint that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_server import Says, ScriptedEndpoint, answer, question_of, serving
from tests.support.gateway import visit
from toolgrpo.engines.base import KEY_VARIABLE, SampleRequest, SamplingOptions
from toolgrpo.episode.dropped import DropCause
from toolgrpo.episode.tool_calls import AttemptStatus, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import ConfigError, EngineError
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import EpisodeLimits, RolloutBatch, Rollouts, Scored
from toolgrpo.rollout.batch import Grade
from toolgrpo.rollout.chat_api import ChatAPI, ChatPlayer, CountedText, as_sent
from toolgrpo.rollout.limits import TokenCutter
from toolgrpo.rollout.scheduler import run_blocking
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools

KEY = "sk-test-0123456789"
GREEDY = SamplingOptions(temperature=0.0)
TOOLS: dict[str, Callable[..., str]] = {"add": lambda a, b: str(a + b), "long": lambda: "x" * 10_000}


def play(
    url: str,
    *rows: str | dict[str, Any],
    tools: ScriptedTools | None = None,
    model: str = "big-1",
    timeout_s: float = 20.0,
    options: SamplingOptions = GREEDY,
    unmarked_calls: str = "answer",
    **limits: Any,
) -> list[Trajectory]:
    """Return the episodes of these rows; a text is a row of a question."""
    api, text = ChatAPI(url, model, timeout_s), CountedText()
    rollouts = Rollouts(
        engine=api,
        chat=text,
        limits=EpisodeLimits(**{"max_completion_length": 1000, **limits}),
        tokenizer=text,
        tools=tools,
        unmarked_calls=unmarked_calls,
        max_concurrent=16,
        player=ChatPlayer(api),
    )
    asked = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    return list(rollouts.run(asked, options, mode="eval").trajectories)


def test_calls_results_and_the_answer_are_an_episode_as_any_other(tmp_path: Path) -> None:
    calls = ("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')
    turns = [
        answer("Adding.", *calls, prompt_tokens=50, completion_tokens=20),
        answer("10", prompt_tokens=90, completion_tokens=3, cost=0.25),
    ]
    with serving(lambda body: turns[len(body["messages"]) > 2]) as endpoint:
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2+3+4?"}]
        (done,) = play(endpoint.url, {"prompt": system}, tools=ScriptedTools(TOOLS))
    assert done.stop_reason is StopReason.FINISHED and [call.result for call in done.calls] == ["3", "7"]
    assert [message["role"] for message in done.messages] == ["assistant", "tool", "tool", "assistant"]
    assert done.completion()[-1]["content"] == "10" and not done.has_logprobs
    assert done.n_sampled == 23 and set(done.ids) == {0} and [turn.end - turn.start for turn in done.turns] == [20, 3]
    assert done.metadata["usage"] == {"requests": 2, "prompt_tokens": 140, "completion_tokens": 23, "cost": 0.25}
    first, second = endpoint.asked
    assert first["messages"] == system and first["temperature"] == 0 and first["max_tokens"] == 1000
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "long"] and "top_p" not in first
    said, *results = second["messages"][2:]
    assert [call["id"] for call in said["tool_calls"]] == [one["tool_call_id"] for one in results] == ["c0", "c1"]
    assert json.loads(said["tool_calls"][1]["function"]["arguments"]) == {"a": 3, "b": 4}
    assert second["max_tokens"] < 1000 - 20, "what the results take is left out of the next turn's room"

    recorder = EpisodeRecorder(tmp_path / "episodes.jsonl")
    batch = RolloutBatch(episodes=(Scored({"prompt": system}, done),), mode="eval")
    recorder.batch_done(batch.graded([Grade({"r": 1.0}, 1.0)], lambda one: True))
    recorder.close()
    (record,) = read_episodes(tmp_path)
    assert Trajectory.from_record(record) == done


def test_our_own_gateway_is_such_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are counted as they are, and it goes on from each turn: nothing of the conversation is told otherwise."""

    def visitor(url: str, key: str) -> Trajectory:
        monkeypatch.setenv(KEY_VARIABLE, key)
        return play(url, "q", tools=ScriptedTools(TOOLS), model="policy")[0]

    calls = ByteChat.say('call add {"a": 1, "b": 2}\ncall add {"a": 3, "b": 4}')
    found = visit(ScriptedEngine([calls, ByteChat.say("10")]), visitor)
    assert [call.result for call in found.returned.calls] == ["3", "7"]
    assert found.returned.completion()[-1]["content"] == "10" == found.trajectory.completion()[-1]["content"]
    assert found.returned.n_sampled == found.trajectory.n_sampled and not found.session.forks


def test_calls_that_cannot_be_read_are_answered_and_go_back_in_a_form_that_strict_endpoints_take() -> None:
    signed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}, "extra_content": {"s": 1}}
    same_id = {"id": "c0", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    pairs = ("add", '{"a": 1,'), ("", "{}"), ("no such tool", "{}"), ("add", "[1, 2]"), ("add", {"a": 1, "b": 2})
    calls = [*pairs, ("add", '{"a": NaN}'), same_id, {"id": 7, "function": {"name": 7}}, signed]
    with serving(lambda body: answer(None, *calls) if len(body["messages"]) == 1 else answer("done")) as endpoint:
        tools = ScriptedTools({"add": lambda a=0, b=0: str(a + b)})
        (done,) = play(endpoint.url, "q", tools=tools)
    bad, none = AttemptStatus.INVALID_JSON, AttemptStatus.MISSING_NAME
    unknown, arguments, ok = AttemptStatus.UNKNOWN_TOOL, AttemptStatus.BAD_ARGUMENTS, AttemptStatus.OK
    assert [one.status for one in done.attempts] == [bad, none, unknown, arguments, ok, bad, ok, none, ok]
    assert len(done.results) == 9 and done.stop_reason is StopReason.FINISHED
    said, *results = endpoint.asked[1]["messages"][1:]
    ids = [call["id"] for call in said["tool_calls"]]
    assert len({*ids}) == 9 and ids == [one["tool_call_id"] for one in results], "each its own, in order"
    for call in said["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert " " not in call["function"]["name"] != "" and call["function"]["name"].isprintable()
    assert said["tool_calls"][8]["extra_content"] == {"s": 1}, "a signature goes back with its call"


def test_limits_are_those_of_other_episodes() -> None:
    says = {
        "talks": answer("word " * 10, finish="length", completion_tokens=10**9),
        "cut there": answer("wor", finish="length", completion_tokens=1),
        "reads": answer("", ("long", "{}"), completion_tokens=5),
        "calls": answer("", ("add", "{}"), completion_tokens=5),
    }
    tools = ScriptedTools({"add": lambda: "1", "long": TOOLS["long"]})

    def ends(question: str, **limits: Any) -> Trajectory:
        with serving(lambda body: says[question]) as endpoint:
            return play(endpoint.url, question, tools=tools, **limits)[0]

    assert ends("calls", max_turns=3).stop_reason is StopReason.MAX_TURNS
    done = ends("calls", max_turns=4, max_tool_calls=1)
    assert [result.error for result in done.results] == [None, ToolErrorKind.LIMIT, ToolErrorKind.LIMIT]
    done = ends("calls", max_turns=None, max_completion_length=60)
    assert done.stop_reason is StopReason.LENGTH and len(done.ids) <= 60, "also where nothing else ends it"
    done = ends("talks", max_completion_length=40)
    assert (done.stop_reason, done.n_sampled) == (StopReason.LENGTH, 40), "no count is believed beyond what was asked"
    done = ends("talks", max_turn_tokens=7)
    assert (done.stop_reason, done.n_sampled) == (StopReason.LENGTH, 7)
    assert ends("cut there").stop_reason is StopReason.CONTEXT_FULL, "the endpoint's own window"
    done = ends("reads", max_turns=2, max_tool_response_tokens=50)
    assert len(done.results[0].content) < 400 and done.results[0].truncated


def test_a_user_speaks_again_and_a_call_in_the_text_is_run_where_that_is_asked_for() -> None:
    with serving(lambda body: answer(str(len(body["messages"])))) as endpoint:
        (done,) = play(endpoint.url, {"prompt": "q", "user_turns": ["and then?"]}, tools=ScriptedTools({}))
        assert [turn.user for turn in done.turns] == ["and then?", None] and done.completion()[-1]["content"] == "3"
        written, tools = '{"name": "now", "arguments": {}}', {"now": lambda: "3"}
        endpoint.says = lambda body: answer(written if len(body["messages"]) == 1 else "3")
        (asis,) = play(endpoint.url, "q", tools=ScriptedTools(tools))
        (run,) = play(endpoint.url, "q", tools=ScriptedTools(tools), unmarked_calls="accept")
        (bare,) = play(endpoint.url, "q")
    assert asis.completion()[-1]["content"] == written and [call.result for call in run.calls] == ["3"]
    assert endpoint.asked[-2]["messages"][1]["tool_calls"][0]["function"]["name"] == "now"
    assert bare.n_sampled == -(-len(written) // 4), "without `usage` tokens are estimated"


def test_whatever_an_endpoint_does_drops_its_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`busy` and `broken once` are answered at the second try; `gone` and `slow` are tried until their deadline."""
    says: dict[str, tuple[Callable[[ScriptedEndpoint, int], Says], str]] = {
        "fine": (lambda e, n: answer("ok"), ""),
        "busy": (lambda e, n: (429, b"later", {"Retry-After": "0.7"}) if n == 1 else answer("ok"), ""),
        "broken once": (lambda e, n: (503, b"") if n == 1 else answer("ok"), ""),
        "page": (lambda e, n: (200, b"<html>"), "no turn in its reply"),
        "empty": (lambda e, n: (200, b'{"choices": []}'), "no turn in its reply"),
        "null": (lambda e, n: (200, b'{"choices": [{"message": null}]}'), "no turn in its reply"),
        "deep": (lambda e, n: (200, b"[" * 50_000), "no turn in its reply"),
        "half": (lambda e, n: (200, b'{"choices": [{"message": {"content": "\\ud800"}}]}'), "half a character"),
        "huge": (lambda e, n: answer("x" * (1 << 20)), "no turn in its reply"),
        "calls": (lambda e, n: (200, b'{"choices": [{"message": {"tool_calls": {"a": 1}}}]}'), "no turn in its reply"),
        "cut off": (lambda e, n: answer("The ans", finish="error"), "it was cut off: error"),
        "gone": (lambda e, n: (0, b""), ""),
        "refused": (lambda e, n: (400, f"bad {KEY}".encode()), "HTTP 400, b'bad ***'"),
        "poor": (lambda e, n: (429, b'{"error": {"message": "pay", "code": "insufficient_quota"}}'), "HTTP 429, pay"),
        "full": (lambda e, n: (429, b"", {"Retry-After": "3600"}), "HTTP 429"),
        "moved": (lambda e, n: (307, b"", {"Location": "http://127.0.0.1:9/v1"}), "HTTP 307"),
        "slow": (lambda e, n: (int(e.over.wait(60)), b""), "no answer within 2 s"),
    }
    late = ("gone", "slow")
    others = [name for name in says if name not in late]

    def answers(body: dict[str, Any]) -> Says:
        name = question_of(body)
        return says[name][0](endpoint, sum(question_of(one) == name for one in endpoint.asked))

    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    with serving(answers) as endpoint:
        ended = [*play(endpoint.url, *others, timeout_s=60.0), *play(endpoint.url, *late, timeout_s=2.0)]
    done = dict(zip([*others, *late], ended, strict=True))
    assert [done.pop(name).stop_reason for name in ("fine", "busy", "broken once")] == [StopReason.FINISHED] * 3
    for name, one in done.items():
        assert one.stop_reason is StopReason.DROPPED and one.dropped is not None, name
        assert one.dropped.cause is DropCause.ENDPOINT and says[name][1] in one.dropped.reason, (name, one.dropped)
        assert KEY not in str(one)
    tries = [question_of(body) for body in endpoint.asked]
    assert [tries.count(name) for name in ("busy", "page", "refused", "poor", "full", "moved")] == [2, 4, 1, 1, 1, 1]
    assert {*endpoint.keys} == {f"Bearer {KEY}"}


def test_the_deadline_of_an_episode_ends_a_request_too() -> None:
    with serving(lambda body: (int(endpoint.over.wait(60)), b"")) as endpoint:
        (done,) = play(endpoint.url, "q", deadline_s=0.2)
    assert done.stop_reason is StopReason.DEADLINE and done.dropped is None


def test_a_conversation_beyond_the_endpoints_window_ends_as_it_is() -> None:
    full = (400, b'{"error": {"message": "maximum context length is 8 tokens", "code": "context_length_exceeded"}}')
    calls = answer("", ("add", '{"a": 1, "b": 1}'))
    with serving(lambda body: full if len(body["messages"]) > 1 else calls) as endpoint:
        (done,) = play(endpoint.url, "q", tools=ScriptedTools(TOOLS))
        endpoint.says = lambda body: full
        (at_once,) = play(endpoint.url, "q")
    assert done.stop_reason is StopReason.CONTEXT_FULL and done.dropped is None and len(done.turns) == 2
    assert at_once.dropped is not None and "maximum context length" in at_once.dropped.reason


LOOKS: list[tuple[Says, str]] = [
    ((401, b'{"error": {"message": "no"}}'), f"without a key; put one into {KEY_VARIABLE}"),
    ((404, b"nothing"), "'big-1', or --base_url is not its address up to /v1"),
    ((301, b""), "--base_url is not its address up to /v1"),
    ((400, b"no tools here"), "'big-1' with these tools"),
    ((200, b"<html>"), "is not an OpenAI-compatible endpoint"),
]


@pytest.mark.parametrize(("says", "said"), LOOKS, ids=[said[:30] for _, said in LOOKS])
def test_what_is_wrong_with_an_endpoint_is_one_error_before_the_first_question(
    says: Says, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with serving(lambda body: says) as endpoint, pytest.raises(ConfigError) as raised:
        ChatAPI(endpoint.url, "big-1", 9.0).look(ScriptedTools(TOOLS).schemas, GREEDY)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    renamed = b'{"error": {"message": "Use \'max_completion_tokens\' instead."}}'
    with serving(lambda body: (400, renamed) if "max_tokens" in body else answer("OK.")) as endpoint:
        api = ChatAPI(endpoint.url, "big-1", 9.0)
        assert f"chat_api: big-1 at {endpoint.url} answers" in api.look([], SamplingOptions(top_p=0.9))
        assert [body["top_p"] for body in endpoint.asked] == [0.9, 0.9] and "tools" not in endpoint.asked[0]
        endpoint.says = lambda body: (401, f"bad key {KEY}".encode())
        with pytest.raises(ConfigError, match=rf"refuses the key in {KEY_VARIABLE}: HTTP 401, b'bad key \*\*\*'"):
            api.look([], GREEDY)
    with pytest.raises(EngineError, match=r"sends no reply: .*--base_url"):
        ChatAPI(endpoint.url, "big-1", 0.2).look([], GREEDY)
    with pytest.raises(EngineError, match="no log-probabilities"):
        run_blocking(api.sample(SampleRequest((0,), 1, (), GREEDY)))


def test_text_is_counted_and_cut_without_a_tokenizer() -> None:
    text = CountedText()
    for words in ("", "abc", "a\0b", "\0\0\0\0", "grüße 🙂 und mehr", "\ud800x"):
        assert text.decode(text.encode(words)) == words
    cut = TokenCutter(text, 20)("0123456789" * 100)
    assert cut.text.startswith("01234") and cut.text.endswith("6789") and cut.left_out > 800


def test_examples_in_a_prompt_are_sent_with_ids() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked, first, second, said = as_sent(
        [
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "name": "add", "content": "1"},
            {"role": "tool", "name": "add", "content": "2"},
            {"role": "assistant", "content": "3", "reasoning_content": "kept back"},
        ]
    )
    assert [one["id"] for one in asked["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert said == {"role": "assistant", "content": "3"}


def test_results_in_a_prompt_go_to_the_calls_that_they_name() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    results = [{"role": "tool", "name": name, "content": f"of {name}"} for name in "gf"]
    asked, *sent = as_sent([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    assert [one["id"] for one in asked["tool_calls"]] == [one["tool_call_id"] for one in reversed(sent)]


def test_arguments_of_the_chat_template_are_sent() -> None:
    with serving(lambda body: answer("OK.")) as endpoint:
        ChatAPI(endpoint.url, "big-1", 9.0, template_arguments={"reasoning_effort": "high"}).look([], GREEDY)
        assert endpoint.asked[-1]["chat_template_kwargs"] == {"reasoning_effort": "high"}

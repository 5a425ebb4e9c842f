"""`toolgrpo chat`: a conversation is one episode in which the person at the terminal is the user."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.commands.chat import ChatTools, ShowingRunner, chat_arguments, converse
from toolgrpo.commands.main import mistakes, read
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.errors import ConfigError
from toolgrpo.sft.encoder import read_conversations
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, ScriptedTools
from toolgrpo.testing.engine import scripted_runner
from toolgrpo.tools.render import RenderedText


class Typed:
    """A terminal's input: these lines, of which `^C` is a Ctrl-C at the prompt."""

    def __init__(self, text: str) -> None:
        self._lines = io.StringIO(text)

    def readline(self) -> str:
        line = self._lines.readline()
        if line == "^C\n":
            signal.raise_signal(signal.SIGINT)
        return line


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *says: str) -> tuple[list[SampleRequest], ChatTools, str]:
    """Type these lines to a model that says this, or stands still until a Ctrl-C comes (`^C`).

    Return what it was asked, the chat, and what stood on the terminal.
    """
    monkeypatch.setattr("sys.stdin", Typed(typed))
    shown = io.StringIO()
    chat = ChatTools(ScriptedTools({"add": lambda a, b: str(a + b)}), Terminal(None, shown, quiet=False), "Be short.")
    said = iter(says)

    def reply(request: SampleRequest, number: int) -> ScriptedReply:
        text = next(said)
        if text == "^C":
            signal.raise_signal(signal.SIGINT)
        return ScriptedReply(ByteChat.say(text), stalls=text == "^C")

    engine = ScriptedEngine(reply)
    parts = scripted_runner(engine, chat)
    given = {one.name: getattr(parts, one.name) for one in dataclasses.fields(parts)}
    asyncio.run(converse(ShowingRunner(**given, show_turn=chat.said), chat, None))
    assert not engine.is_open
    return engine.requests, chat, shown.getvalue()


def asked(request: SampleRequest) -> str:
    return bytes(one for one in request.ids if one < 256).decode()


def test_a_chat_is_one_episode_and_becomes_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    typed = f"one and two?\n\n/tools\n/what\nthanks\n/save {file}\n"
    requests, chat, shown = talk(monkeypatch, typed, 'call add {"a": 1, "b": 2}\ncall sub {}', "Three.", "Bye.")
    assert len(requests) == 3 and chat.ended and "has ended" not in shown
    assert all(after.ids[: len(before.ids)] == before.ids for before, after in pairwise(requests)), "one episode"
    order = ["calls: add(a=1, b=2)", "result: 3", "result: Error", "model: Three.", "you: you: add()", "/reset starts"]
    order += ["model: Bye.", "8 messages are now a row"]
    places = [shown.find(text) for text in order]
    assert -1 not in places and places == sorted(places), shown
    (row,) = read_conversations(file)
    roles = "system user assistant tool tool assistant user assistant"
    assert row["messages"] == chat.messages and " ".join(one["role"] for one in row["messages"]) == roles


def test_a_conversation_that_has_ended_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    _, _, shown = talk(monkeypatch, f"/save {file}\nhello\n/reset\n/save {file}\n/quit\nno\n", "Hi.")
    assert shown.count("the conversation is empty") == 1
    (row,) = read_conversations(file)
    assert [one["content"] for one in row["messages"]] == ["Be short.", "hello", "Hi."]


def test_what_is_saved_is_what_the_model_read(tmp_path: Path) -> None:
    """A result as it was cut, and a call that was found in the text after that was shown."""
    chat = ChatTools(ScriptedTools({"page": lambda: "word " * 2000}), Terminal(None, io.StringIO(), quiet=False))
    chat.cutter = lambda text, left_out: RenderedText(text[:5], left_out)
    chat.said(ParsedTurn('{"name": "page"}', None, (), True))
    asyncio.run(chat.session({}).call([CallAttempt(AttemptStatus.ACCEPTED, "", "page", {})]))
    called, answered = chat.messages
    assert called["tool_calls"] and answered["content"] == "word "


@pytest.mark.parametrize("typed", ["/reset\n", "\n \n", "", "/quit\nno\n", "^C\n^C\n"])
def test_who_says_nothing_begins_nothing(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    requests, chat, _ = talk(monkeypatch, typed)
    assert requests == [] and chat.ended and chat.messages == []


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "one\n^C\ntwo\nthree\n/reset\nfour\nfive\n"
    says = ("One.", 'call add {"a": 1, "b": 2}', "^C", "Three.", "^C", "Five.")
    before = signal.getsignal(signal.SIGINT)
    requests, chat, shown = talk(monkeypatch, typed, *says)
    assert signal.getsignal(signal.SIGINT) is before
    goes_on, anew = "last message is removed, the rest goes on\n", "last message is removed\n"
    order = ("model: One.", "you: \nyou: ", goes_on, "model: Three.", anew, "model: Five.")
    places = [shown.find(text) for text in order]
    assert -1 not in places and places == sorted(places), shown
    said = asked(requests[3])
    assert "One." in said and "three" in said and "two" not in said and "add" not in said.partition("One.")[2]
    assert "four" in asked(requests[4]) and "four" not in asked(requests[5]) and "Three." not in asked(requests[5])
    assert [one["content"] for one in chat.messages] == ["Be short.", "five", "Five."]


def test_a_folder_brings_what_its_run_was_given_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model_name_or_path: nano\nsystem_prompt: Be short.\nmax_steps: 3\nbatch_size: 8\n"
    (tmp_path / "run.yaml").write_text(text)
    script, config, model = chat_arguments(read("chat", [str(tmp_path), "--temperature", "0", "--use_cpu"]))
    assert (script.system_prompt, config.temperature, model.model_name_or_path) == ("Be short.", 0.0, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("agent: agent.py\nreward_fn: [/gone/my_reward.py]\nsystem_prompt: Be short.\n")
    given = read("chat", [str(tmp_path), "--use_cpu"])
    assert chat_arguments(given)[0].agent is None and not mistakes(given), "what a chat does not use"
    with pytest.raises(ConfigError, match="without --agent"):
        chat_arguments(read("chat", ["nano", "--agent", "a.py", "--use_cpu"]))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert read("chat", [f"--model_name_or_path=~/{tmp_path.name}"]).values["system_prompt"] == "Be short."
    (tmp_path / "run.yaml").write_text("batch_sizes: 8\n")
    with pytest.raises(ConfigError, match="unknown key 'batch_sizes'"):
        chat_arguments(read("chat", [str(tmp_path)]))
    (tmp_path / "other.yaml").write_text("system_prompt: Be long.\n")
    assert read("chat", [str(tmp_path), "--config", str(tmp_path / "other.yaml")]).values["system_prompt"] == "Be long."
    with pytest.raises(ConfigError, match="toolgrpo chat nano"):
        chat_arguments(read("chat", []))

"""`toolgrpo chat`: a conversation is one episode in which the person at the terminal is the user."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from pathlib import Path

import pytest

from toolgrpo.commands.chat import ChatTools, ShowingRunner, parse_chat_arguments
from toolgrpo.commands.run_config import as_flags
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError
from toolgrpo.rollout import Episode
from toolgrpo.sft.encoder import read_conversations
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools
from toolgrpo.testing.engine import scripted_runner
from toolgrpo.trajectory import StopReason, Trajectory


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *says: str) -> tuple[Trajectory | None, ChatTools, str]:
    """Type these lines to a model that says this; return the conversation, the chat, and what stood on the terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    shown = io.StringIO()
    chat = ChatTools(ScriptedTools({"add": lambda a, b: str(a + b)}), Terminal(None, shown, quiet=False), "Be short.")
    engine = ScriptedEngine([ByteChat.say(turn) for turn in says])
    parts = scripted_runner(engine, chat)
    given = {one.name: getattr(parts, one.name) for one in dataclasses.fields(parts)}
    runner = ShowingRunner(**given, show_turn=chat.said)

    async def main() -> Trajectory | None:
        await engine.open()
        try:
            opening = chat.opening()
            return None if opening is None else await runner(Episode(opening))
        finally:
            await engine.close()

    return asyncio.run(main()), chat, shown.getvalue()


def test_a_chat_is_one_episode_and_becomes_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    typed = f"one and two?\n/tools\n/what\nthanks\n/save {file}\n\n"
    conversation, chat, shown = talk(monkeypatch, typed, 'call add {"a": 1, "b": 2}\ncall sub {}', "Three.", "Bye.")
    assert conversation is not None and conversation.stop_reason is StopReason.FINISHED and chat.ended
    assert [turn.user for turn in conversation.turns] == [None, "thanks", None]
    order = ["calls: add(a=1, b=2)", "result: 3", "result: Error", "model: Three.", "you: add()", "the commands are"]
    order += ["model: Bye.", "8 messages are now a row"]
    places = [shown.find(text) for text in order]
    assert -1 not in places and places == sorted(places), shown
    (row,) = read_conversations(file)
    opening = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "one and two?"}]
    assert row["messages"] == [*opening, *conversation.messages]


def test_a_conversation_that_has_ended_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    _, chat, shown = talk(monkeypatch, f"/save {file}\nhello\n/reset\n/save {file}\n\n", "Hi.")
    assert "nothing was said yet" in shown and not file.exists()
    assert chat.opening() is None
    (row,) = read_conversations(file)
    assert [one["content"] for one in row["messages"]] == ["Be short.", "hello", "Hi."]


@pytest.mark.parametrize(("typed", "ended"), [("/reset\n", False), ("\n", True), ("", True)])
def test_who_says_nothing_begins_nothing(monkeypatch: pytest.MonkeyPatch, typed: str, ended: bool) -> None:
    conversation, chat, _ = talk(monkeypatch, typed)
    assert conversation is None and chat.ended is ended


def test_a_folder_brings_what_its_run_was_given_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: nano\nsystem_prompt: Be short.\nmax_steps: 3\nbatch_size: 8\n"
    )
    script, config, model = parse_chat_arguments([str(tmp_path), "--temperature", "0", "--use_cpu"])
    assert (script.system_prompt, config.temperature, model.model_name_or_path) == ("Be short.", 0.0, str(tmp_path))
    (tmp_path / "run.yaml").write_text("batch_sizes: 8\n")
    with pytest.raises(ConfigError, match="unknown key 'batch_sizes'"):
        parse_chat_arguments([str(tmp_path)])
    assert as_flags("chat", ["nano", "--config", "x.yaml"]) == ["--model_name_or_path", "nano", "--config", "x.yaml"]
    with pytest.raises(ConfigError, match="is missing; for a first look: toolgrpo chat nano"):
        parse_chat_arguments([])

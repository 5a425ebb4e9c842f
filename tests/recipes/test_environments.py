"""Environments of others play episodes: servers of OpenEnv, started here, and games of TextArena.

OpenEnv's package wants other versions than ours, so that it is rarely there. What the recipe does with a server is tested
twice, over the real package where it is and over a stand-in that repeats the messages recorded from it (openenv_stand_in.py).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from process_tree import wait_for
from websockets.sync.client import connect

from toolgrpo.episode.dropped import DropCause
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import PluginError
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import Toolbox, load_tools

RECIPES = Path(__file__).parents[2] / "recipes" / "environments"
PYTHON = os.environ.get("TOOLGRPO_PYTHON_OPENENV")
pytestmark = pytest.mark.e2e
OPENENV = (
    "NOT PROVEN HERE: openenv wants version 1 of mcp, so give it a folder of its own (python -m venv V; "
    "V/bin/pip install openenv==0.10.0) and set TOOLGRPO_PYTHON_OPENENV=V/bin/python"
)
TEXTARENA = "NOT PROVEN HERE: pip install --no-deps -r recipes/environments/requirements.txt"
needs_openenv = pytest.mark.skipif(PYTHON is None, reason=OPENENV)
needs_textarena = pytest.mark.skipif(find_spec("textarena") is None, reason=TEXTARENA)

GUESS = '''
import os, time
from pydantic import Field
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    """Guess the number."""
    number: int = Field(description="The guess.")

class Seen(Observation):
    hint: str

class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number = seed or 0
        return Seen(hint=f"Between 0 and {self.number + 10}.")

    def step(self, action, **_):
        if action.number == 97:
            raise ValueError("97 is not allowed")
        if action.number == 98:
            time.sleep(10**6)
        if action.number == 99:
            os._exit(1)
        right = action.number == self.number
        return Seen(hint="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State(episode_id="x", step_count=1, number=self.number)

app = create_app(Numbers, Guess, Seen, env_name="numbers", max_concurrent_envs=2)
'''
LAUNCH = """
import socket, sys, uvicorn
from uvicorn.importer import import_from_string
sys.path.insert(0, "")
app = import_from_string(sys.argv[1])
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app)).run(sockets=[listening])
"""
STAND_IN = Path(__file__).with_name("openenv_stand_in.py")


@pytest.fixture(params=["stand-in", pytest.param("openenv", marks=needs_openenv)])
def numbers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server, at which the environment points. Either prints its port."""
    (tmp_path / "guess_server.py").write_text(GUESS)
    command = [str(PYTHON), "-c", LAUNCH, "guess_server:app"]
    if request.param == "stand-in":
        command = [sys.executable, str(STAND_IN)]
    said = tmp_path / "said"
    with said.open("wb") as out, (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: said.read_bytes().endswith(b"\n") or server.poll() is not None)
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        url = f"http://127.0.0.1:{int(said.read_text())}"
        monkeypatch.setenv("OPENENV_BASE_URL", url)
        yield url
    finally:
        server.kill()
        server.wait(30)


def openenv() -> Toolbox:
    return load_tools(RECIPES / "openenv_environment.py", workers=2)


def play(box: Toolbox, *turns: str, row: Any = None, **options: Any) -> Trajectory:
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns], max_model_len=50_000)
    row = row or {"openenv": {"seed": 7}}
    return run_episode(engine, box, row=row, max_completion_length=20_000, **options)


def guess(number: int) -> str:
    return f'call step {{"number": {number}}}'


def test_a_server_is_played_until_it_says_that_all_is_done(numbers: str) -> None:
    with openenv() as box:
        (schema,) = box.schemas
        assert schema["function"]["name"] == "step" and schema["function"]["description"] == "Guess the number."
        assert list(schema["function"]["parameters"]["properties"]) == ["number"]
        done = play(box, guess(3), 'call step {"number": "x"}', guess(97), guess(7), "never said")
        assert (done.stop_reason, done.reward, done.dropped) == (StopReason.STOP_TOOL, 0.75, None)
        assert [result.content for result in done.results] == [
            "wrong",
            "Error: step: parameter 'number' must be an integer like 3, got \"x\". Usage: step(number: integer)",
            "Error: step: RuntimeError: 97 is not allowed",
            "right",
        ]
        cut = play(box, f"{guess(7)}\n{guess(3)}")
        assert [result.ok for result in cut.results] == [True, False] and cut.reward == 1.0
        assert "the episode is over" in cut.results[1].content
        assert play(box, "I do not know.").reward == 0.0  # it has not acted: the server gave nothing
        with box.session({"openenv": {"seed": 5, "episode_id": None}}) as session:
            assert session.observation == "\n\nBetween 0 and 15."


def is_gone(url: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == errno.ECONNREFUSED


def test_a_server_that_hangs_or_dies_costs_episodes_and_gives_no_reward(
    numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_TIMEOUT_S", "3")
    with openenv() as box:
        with box.session({}), box.session({}):  # as many as it takes
            full = play(box, guess(7))
        hung = play(box, guess(3), guess(98), "never said")
        died = play(box, guess(3), guess(99), "never said")
        wait_for(lambda: is_gone(numbers))  # its connections close first
        gone = play(box, guess(3))
    for done, cause, words in (
        (full, DropCause.ENVIRONMENT, "max_concurrent_envs"),
        (hung, DropCause.TOOL, "TimeoutError"),
        (died, DropCause.TOOL, "ConnectionClosedError"),
        (gone, DropCause.ENVIRONMENT, "ConnectionRefusedError"),
    ):
        assert (done.stop_reason, done.reward) == (StopReason.DROPPED, None)
        assert done.dropped is not None and done.dropped.cause is cause
        assert numbers in done.dropped.reason and words in done.dropped.reason
    assert [result.error for result in died.results] == [None, ToolErrorKind.DROPPED]


@needs_openenv
@pytest.mark.parametrize("numbers", ["openenv"], indirect=True)
def test_the_stand_in_says_what_openenv_says(numbers: str) -> None:
    recorded = json.loads(STAND_IN.with_name("openenv_recorded.json").read_text())
    with urllib.request.urlopen(f"{numbers}/schema", timeout=20) as reply:
        assert json.load(reply)["action"] == recorded["action"]
    url = f"ws{numbers.removeprefix('http')}/ws"
    for session in recorded["sessions"]:
        with connect(url) as connection:
            for asked, said in session["exchanges"]:
                connection.send(json.dumps(asked))
                assert json.loads(connection.recv(timeout=20)) == said
    with connect(url), connect(url), connect(url) as one_too_many:
        assert json.loads(one_too_many.recv(timeout=20)) == recorded["full"]


def test_a_server_that_is_not_there_is_told_when_tools_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(PluginError, match=r"http://127\.0\.0\.1:9.*OPENENV_BASE_URL"):
        openenv()


def game(box: Toolbox, name: str, *turns: str) -> Trajectory:
    return play(box, *turns, row={"textarena": name, "seed": 3}, question="Play.", max_turns=None)


@needs_textarena
def test_a_game_of_textarena_is_a_conversation_with_its_own_reward() -> None:
    with load_tools(RECIPES / "textarena_environment.py", workers=1) as box:
        assert box.names == []
        wrong = game(box, "GuessTheNumber-v0", "[5]", "Perhaps eight?", "Nine!", "never said")
        users = [message["content"] for message in wrong.messages if message["role"] == "user"]
        assert users[0] == "The target number is higher." and users[1].startswith("You attempted an invalid move.")
        assert len(users) == 2 and wrong.stop_reason is StopReason.FINISHED
        assert wrong.reward is not None and 0 < wrong.reward < 1  # the game gives something for being near
        guesses = [f"I say [{number}]." for number in range(1, 10)]
        right, again = (game(box, "GuessTheNumber-v0", *guesses) for _ in range(2))
        assert right.reward == 1.0 and right.messages == again.messages
        with box.session({"textarena": "TowerOfHanoi-v0"}) as session:
            assert session.observation is not None and session.observation.startswith("\n\nYou are")
        for name, words in (("QuantumTicTacToe-v0", "several players"), ("No-v0", "No-v0-raw not found")):
            with pytest.raises(PluginError, match=words):
                game(box, name, "x")

"""The user's agent in its process: what it returns, and every way in which it can fail to."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from process_tree import all_end

from tests.support.rollouts import run_together
from toolgrpo.episode.dropped import DropCause
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import ConfigError, EngineError, PluginError
from toolgrpo.gateway.agent_process import AgentProcess, CommandAgent, PythonAgent, _kind_of
from toolgrpo.gateway.agents import AgentPlayer, agent_of, check_limits, load_agent
from toolgrpo.rollout import Episode, EpisodeLimits
from toolgrpo.rollout.compaction import ContextLimit
from toolgrpo.testing import ByteChat, ScriptedEngine, scripted_runner

pytestmark = pytest.mark.e2e


def test_an_agent_that_waits_gets_such_a_client_and_no_proxy_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(client: Any, row: Any) -> None: ...

    @functools.wraps(run)
    def wrapped(*given: Any) -> Any:
        return run(*given)

    assert [_kind_of(one) for one in (run, wrapped, functools.partial(run), len)] == ["AsyncOpenAI"] * 3 + ["OpenAI"]
    monkeypatch.setattr(os, "environ", dict(os.environ))
    AgentProcess(run).reset(row={}, url="http://10.0.0.5:1/v1", key="k", model="m")
    assert "10.0.0.5" in os.environ["no_proxy"].split(",")


AGENT = """
import asyncio, os, subprocess
from toolgrpo.episode.dropped import DropEpisode

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def run(client, row):
    print("playing", row["do"])
    messages = [{"role": "user", "content": "q"}]
    answer = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[ADD])
    match row["do"]:
        case "return":
            return float(answer.choices[0].message.content)
        case "dict" | "nothing" | "text" as what:
            return {"dict": {"reward": 0.5, "steps": 3}, "nothing": None, "text": "well done"}[what]
        case "raise":
            raise RuntimeError("the agent is at a loss")
        case "drop":
            raise DropEpisode("the site was down")
        case "die":
            os._exit(3)
        case "hang":
            started = subprocess.Popen(["sleep", "987"], start_new_session=True)
            with open(__file__ + ".started", "w") as file:
                file.write(str(started.pid))
            await asyncio.sleep(60)
        case "call":
            message = answer.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            last = await client.chat.completions.create(model="policy", messages=[*messages, message, result], tools=[ADD])
            return {"reward": 1.0, "ended": last.choices[0].finish_reason == "length"}
"""


COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": row["do"]}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
print("asking")
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
if row["do"] == "fail":
    sys.exit("no use")
print(json.dumps({"reward": float(answer["choices"][0]["message"]["content"])}))
"""


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentPlayer]:
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    made = load_agent(file, log_path=file.with_name("agent.log"))
    yield made
    made.close()
    assert "playing return" in file.with_name("agent.log").read_text()


def play(player: AgentPlayer, *do: str, script: Any = None, **limits: Any) -> tuple[Trajectory, ...]:
    """Play an episode for each of these, all at once, and see that nothing is left of them."""
    engine = ScriptedEngine(script or (lambda request, number: ByteChat.say("1")))
    runner = scripted_runner(engine, player=player, **limits)
    episodes = [Episode(({"role": "user", "content": "q"},), row={"do": one}) for one in do]
    done = run_together(episodes, runner).trajectories
    assert engine.open_requests == 0
    return done


def test_what_an_agent_returns_is_its_episodes_reward(player: AgentPlayer) -> None:
    returned, named, nothing = play(player, "return", "dict", "nothing")
    assert [one.reward for one in (returned, named, nothing)] == [1.0, 0.5, None]
    assert named.metadata["agent"] == {"steps": 3.0}
    assert {one.stop_reason for one in (returned, named, nothing)} == {StopReason.FINISHED}
    assert ByteChat.text(returned.ids) == "1|" and returned.mask == (1, 1)


def test_an_agent_that_fails_costs_its_episode_and_no_other(player: AgentPlayer) -> None:
    raised, dropped, died, good = play(player, "raise", "drop", "die", "return")
    for one, why in ((raised, "the agent is at a loss"), (dropped, "the site was down"), (died, "exit code 3")):
        assert one.stop_reason is StopReason.DROPPED and one.dropped is not None
        assert one.dropped.cause is DropCause.AGENT and why in str(one.dropped) and len(one.turns) == 1
    assert good.reward == 1.0 and good.dropped is None


def test_what_is_no_reward_is_the_plugins_error(player: AgentPlayer) -> None:
    with pytest.raises(PluginError, match=r"an agent returns a number, None, or a dict.*'well done'"):
        play(player, "text")


def test_a_deadline_ends_an_agent_and_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    player, deadline_s = load_agent(tmp_path / "agent.py", log_path=tmp_path / "agent.log"), 3.0
    with closing(player):
        while not (started := tmp_path / "agent.py.started").exists():  # a busy machine may need longer to get there
            (late,) = play(player, "hang", deadline_s=deadline_s)
            deadline_s *= 2
    assert late.stop_reason is StopReason.DEADLINE and late.reward is None
    assert all_end(int(started.read_text()))


def test_an_engine_that_fails_ends_the_episode_at_once(player: AgentPlayer) -> None:
    with pytest.raises(EngineError, match=r"could not be completed.*out of order"):
        play(player, "hang", script=lambda request, number: EngineError("out of order"))


def test_the_calls_of_the_last_turn_are_not_handed_out(player: AgentPlayer) -> None:
    script = [ByteChat.say('call add {"a": 1, "b": 2}')] * 2
    (done,) = play(player, "call", script=script, max_turns=2)
    assert (done.reward, done.metadata["agent"]) == (1.0, {"ended": 1.0})
    assert done.stop_reason is StopReason.MAX_TURNS
    assert [len(turn.attempts) for turn in done.turns] == [1, 1]


def test_a_command_is_an_agent_too(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(COMMAND)
    with closing(load_agent(f"{sys.executable} {program}")) as player:
        assert player.name == sys.executable, "the terminal says the word agent before it"
        good, bad = play(player, "go", "fail")
    assert (good.reward, good.stop_reason) == (1.0, StopReason.FINISHED)
    assert "ended with exit code 1" in str(bad.dropped)


def test_a_file_or_a_command_line_is_told_by_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ag ent").mkdir()
    Path("ag ent/mine.py").write_text("")
    for given in ("ag ent/mine.py:play", "'ag ent/mine.py:play'", "ag\\ ent/mine.py:play"):
        assert agent_of(given) == PythonAgent("ag ent/mine.py", "play")
    assert agent_of("mine.py") == PythonAgent("mine.py")
    assert agent_of("python mine.py") == CommandAgent(("python", "mine.py")) and agent_of("'a b'") == CommandAgent(
        ("a b",)
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("play = print", "No run found in"), ("def run(row): ...", "client and row"), ("import odd_one", "odd_one")],
)
def test_a_file_that_is_no_agent_is_refused_when_it_is_loaded(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "agent.py").write_text(text)
    with pytest.raises(PluginError, match=complaint):
        load_agent(tmp_path / "agent.py")


@pytest.mark.parametrize(
    "limit", [{"max_tool_calls": 3}, {"max_user_turns": 1}, {"context": ContextLimit(max_tokens=99)}]
)
def test_limits_of_our_own_loop_are_refused(limit: dict[str, Any]) -> None:
    check_limits(EpisodeLimits(max_completion_length=100, max_turns=3, max_turn_tokens=20, deadline_s=5.0))
    (name,) = limit
    with pytest.raises(ConfigError, match=rf"^{name}.*{name}"):
        check_limits(EpisodeLimits(max_completion_length=100, **limit))


# What is done once before the processes of agents are forked leaves nothing that a fork could not take along.
CHILD = """
import sys, threading, time
from functools import partial
import openai
from toolgrpo.gateway.agent_process import _client
from toolgrpo.gateway.agent_process import make_first_requests
from confined_python.processes.linux import forkable, open_descriptors

before = open_descriptors()
for kind in ("AsyncOpenAI", "OpenAI"):
    make_first_requests(partial(_client, kind), openai)
assert {"anyio._backends._asyncio", "h11"} <= sys.modules.keys()  # what only a request imports
assert forkable(before)
threading.Thread(target=time.sleep, args=(0.05,)).start()
assert forkable(before)  # it is about to end
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
assert not forkable(before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_client_that_has_talked_leaves_neither_thread_nor_descriptor() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# An agent that does not run on the trainer's machine: here it runs in a network namespace of its own.


ELSEWHERE = """
import json, os, sys, urllib.error, urllib.request

row = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "q"}]}).encode()


def ask(**headers):
    headers["content-type"] = "application/json"
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as refused:
        return refused.code, ""
    except OSError as error:
        sys.exit(print(error) or 1)


key = "Bearer " + os.environ["OPENAI_API_KEY"]
tries = {
    "none": ask(), "other": ask(authorization="Bearer sk-episode-0"), "named": ask(authorization=key, host="trainer:1"),
    "page": ask(authorization=key, origin="http://example.org"),
}
status, content = ask(authorization=key)
network = os.stat("/proc/self/ns/net").st_ino
print(json.dumps({"reward": float(content), "network": network, **{name: said[0] for name, said in tries.items()}}))
"""


class OtherMachine(NamedTuple):
    ours: str  # the address at which it reaches us
    run: tuple[str, ...]


@pytest.fixture
def other_machine() -> Iterator[OtherMachine]:
    number = os.getpid()
    name, here, there = f"toolgrpo-{number}", f"tg{number % 10**8}a", f"tg{number % 10**8}b"
    net = f"10.213.{number // 64 % 256}.{number % 64 * 4}"
    ours, theirs = (f"{net.rpartition('.')[0]}.{int(net.rpartition('.')[2]) + end}" for end in (1, 2))
    try:
        for words in (
            f"netns add {name}",
            f"link add {here} type veth peer name {there} netns {name}",
            f"address add {ours}/30 dev {here}",
            f"link set {here} up",
            f"-n {name} address add {theirs}/30 dev {there}",
            f"-n {name} link set {there} up",
            f"-n {name} link set lo up",
        ):
            try:
                subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip("a second network needs the program `ip` (iproute2)")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine allows no second network: ip {words}: {error.stderr.strip()}")
        yield OtherMachine(ours, ("ip", "netns", "exec", name))
    finally:
        for words in (f"netns del {name}", f"link del {here}"):
            subprocess.run(["ip", *words.split()], check=False, capture_output=True)


def test_an_agent_on_another_machine_plays_with_its_key_alone(other_machine: OtherMachine, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(ELSEWHERE)
    agent = " ".join([*other_machine.run, sys.executable, "-I", str(program)])
    with closing(load_agent(agent, host=other_machine.ours)) as player:
        (done,) = play(player, "")
    assert (done.reward, done.stop_reason) == (1.0, StopReason.FINISHED), done.dropped
    said = dict(done.metadata["agent"])
    assert said.pop("network") != os.stat("/proc/self/ns/net").st_ino
    assert said == {"none": 401, "other": 401, "named": 200, "page": 403}
    assert len(done.turns) == 2, "the model was asked for those two alone"
    with closing(load_agent(agent, host="127.0.0.1")) as player:
        (unreached,) = play(player, "")
    assert "Connection refused" in str(unreached.dropped) and not unreached.turns

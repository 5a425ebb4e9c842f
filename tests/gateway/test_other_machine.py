"""An agent that does not run on the trainer's machine: here it runs in a network namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.rollouts import run_together
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.gateway.agents import load_agent
from toolgrpo.rollout import Episode
from toolgrpo.testing import ByteChat, ScriptedEngine, scripted_runner

pytestmark = pytest.mark.e2e

AGENT = """
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


def play(agent: str, host: str) -> Trajectory:
    with closing(load_agent(agent, host=host)) as player:
        runner = scripted_runner(ScriptedEngine(lambda request, number: ByteChat.say("1")), player=player)
        return run_together([Episode(({"role": "user", "content": "q"},), row={})], runner).trajectories[0]


def test_an_agent_on_another_machine_plays_with_its_key_alone(other_machine: OtherMachine, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    agent = " ".join([*other_machine.run, sys.executable, "-I", str(program)])
    done = play(agent, other_machine.ours)
    assert (done.reward, done.stop_reason) == (1.0, StopReason.FINISHED), done.dropped
    said = dict(done.metadata["agent"])
    assert said.pop("network") != os.stat("/proc/self/ns/net").st_ino
    assert said == {"none": 401, "other": 401, "named": 200, "page": 403}
    assert len(done.turns) == 2, "the model was asked for those two alone"
    unreached = play(agent, "127.0.0.1")
    assert "Connection refused" in str(unreached.dropped) and not unreached.turns

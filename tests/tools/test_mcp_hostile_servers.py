"""MCP servers that lie, flood, linger and die: each costs one sentence, and no process stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from process_tree import all_end

from tests.support.ports import free_port
from tests.support.tool_calls import attempt
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import PluginError
from toolgrpo.tools import Toolbox, load_tools, run_tool

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
SERVER = str(Path(__file__).parents[1] / "fixtures" / "tools" / "hostile_mcp_server.py")
CALL = {"name": "echo", "arguments": {"x": 1}}


def hostile(case: str, argument: str = "", **more: Any) -> dict[str, Any]:
    return {"mcpServers": {"bad": {"command": sys.executable, "args": ["-S", SERVER, case, argument], **more}}}


def refusal(case: str, argument: str = "", *, load_timeout_s: float = 60.0, **more: Any) -> str:
    """What is said when the tools of such a server are loaded."""
    with pytest.raises(PluginError) as caught:
        load_tools(mcp_config=hostile(case, argument, **more), load_timeout_s=load_timeout_s).close()
    text = str(caught.value)
    assert "server 'bad'" in text and len(text) < 1500
    return text


def one_tool(schema: dict[str, Any], name: str = "t") -> str:
    return json.dumps([{"name": name, "inputSchema": {"type": "object", **schema}}])


@pytest.mark.parametrize(
    ("case", "argument", "says"),
    [
        ("tools", one_tool({"properties": {"a": {"$ref": "#/$defs/none"}}}), "which is not in the schema"),
        ("tools", one_tool({"type": "string"}), "its tools cannot be listed (tools.0.inputSchema.type: "),
        ("tools", one_tool({}, name="<|im_end|>"), "A model must be able to write a name"),
        ("tools", one_tool({}, name="a tool"), "A model must be able to write a name"),
        ("tools", one_tool({}, name="x" * 200), "A model must be able to write a name"),
        ("tools", json.dumps(json.loads(one_tool({})) * 2), "it is listed twice"),
        ("tools", "5", "its tools cannot be listed"),
        ("tools", "[]", "gives no tools: it lists none"),
        ("endless", "", "lists more than 1000 tools"),
        ("list-error", "", "there is no such method here"),
        ("deep-schema", "", "the server's answer cannot be read"),
        ("long-description", "", "its description has 1,000,000 characters"),
        ("ends-at-once", "", "ImportError: no module named nothing"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_when_they_are_loaded(case: str, argument: str, says: str) -> None:
    assert says in refusal(case, argument)


def test_a_tool_that_is_not_wanted_may_be_as_it_likes() -> None:
    good = {"name": "echo", "inputSchema": {"type": "object", "additionalProperties": True}}
    tools = json.dumps([good, {"name": "a b", "inputSchema": {"type": "object", "$ref": "#"}}])
    with load_tools(mcp_config=hostile("tools", tools, tools=["echo"])) as box:
        assert run_tool(box, CALL).content == '{"x": 1}'


def test_a_server_of_which_no_tool_is_wanted_is_refused() -> None:
    assert "gives no tools" in refusal("tools", one_tool({}), tools=[])


def test_a_tool_that_says_it_takes_nothing_takes_nothing() -> None:
    """That schema is the one that MCP recommends for a tool without parameters."""
    nothing = {"name": "echo", "inputSchema": {"type": "object", "additionalProperties": False}}
    with load_tools(mcp_config=hostile("tools", json.dumps([nothing]))) as box:
        assert box.schemas[0]["function"]["parameters"]["additionalProperties"] is False
        assert run_tool(box, {"name": "echo"}).content == "{}"
        assert run_tool(box, CALL).error is ToolErrorKind.BAD_ARGUMENTS


def test_the_schema_of_a_result_is_not_looked_at() -> None:
    with load_tools(mcp_config=hostile("evil-result-schema"), tool_timeout_s=30) as box:
        result = run_tool(box, CALL)
    assert result.ok and "aaa!" in result.content


def test_a_listing_without_an_end_is_given_up() -> None:
    """Both at once, since each takes as long as its limit; a busy machine needs some of it to start the server."""
    cases = {
        "endless-empty": (4.0, "did not finish listing its tools within 4 s; there were 0 by then"),
        "never-answers": (3.0, "no answer within 3 s"),
    }
    with ThreadPoolExecutor(len(cases)) as threads:
        said = {case: threads.submit(refusal, case, load_timeout_s=limit_s) for case, (limit_s, _) in cases.items()}
    for case, (_, says) in cases.items():
        assert says in said[case].result()


def test_what_a_server_says_beside_its_messages_goes_into_the_log_and_is_quoted_when_it_dies(tmp_path: Path) -> None:
    log = tmp_path / "tools.log"
    with load_tools(mcp_config=hostile("talks"), log_path=log) as box:
        assert run_tool(box, CALL).content == '{"x": 1}'
    assert "Starting up ..." in log.read_text() and "{not json" in log.read_text()
    with load_tools(mcp_config=hostile("dies"), log_path=log) as box:
        lost = run_tool(box, CALL)
    assert lost.error is ToolErrorKind.DIED and "it is started again. The last it printed: line before" in lost.content
    assert lost.content.endswith("Fatal: the database is gone") and "Fatal: the database is gone" in log.read_text()


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("big", "bytes; at most 16,777,216 are read"),
        ("deep", "the server's answer cannot be read: it is nested too deeply"),
        ("not-a-result", "answered with no valid result (content: "),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_of_its_call(case: str, says: str) -> None:
    with load_tools(mcp_config=hostile(case), tool_timeout_s=60) as box:
        answer = run_tool(box, CALL)
        assert answer.error in (ToolErrorKind.RAISED, ToolErrorKind.BAD_RESULT) and says in answer.content
        assert len(answer.content) <= 1100
        assert run_tool(box, CALL).error is answer.error  # the connection lives


@pytest.mark.parametrize(
    ("case", "says"), [("http-big", "more than 16,777,216 bytes"), ("http-packed", "compresses its answers")]
)
def test_an_answer_over_http_has_the_same_bound(case: str, says: str) -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-S", SERVER, case, str(port)])
    try:
        with opened({"mcpServers": {"bad": {"url": f"http://127.0.0.1:{port}/mcp"}}}) as box:
            answer = run_tool(box, CALL)
            assert answer.error is not None and says in answer.content
    finally:
        server.kill()
        server.wait()


def opened(config: dict[str, Any]) -> Toolbox:
    """The toolbox of a server that may only just be starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return load_tools(mcp_config=config)
        except PluginError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def written(pids: Path) -> list[int]:
    """The ids of the server and of what it started."""
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 4
    return found


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Where a server writes them; nothing of it stays behind when the test is over."""
    yield tmp_path / "pids"
    assert all_end(*written(tmp_path / "pids"))


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes that left their group are found on Linux only")


@linux
@pytest.mark.parametrize("case", ["children", "stubborn"])
def test_no_process_stays_behind_after_close(pids: Path, case: str) -> None:
    with load_tools(mcp_config=hostile(case, str(pids))) as box:
        assert run_tool(box, CALL).ok


@linux
def test_no_process_stays_behind_after_a_load_that_failed(pids: Path) -> None:
    assert "has no tool 'other'; it has echo" in refusal("stubborn", str(pids), tools=["other"])


@linux
def test_no_process_stays_behind_when_another_server_cannot_be_reached(pids: Path) -> None:
    config = hostile("stubborn", str(pids))
    until_they_run = f"until [ -s {pids} ]; do sleep 0.05; done; exit 1"
    config["mcpServers"]["gone"] = {"command": "sh", "args": ["-c", until_they_run]}
    with pytest.raises(PluginError, match="'gone'"):
        load_tools(mcp_config=config)


@linux
def test_no_process_of_an_episode_that_is_under_way_stays_behind(pids: Path) -> None:
    async def close_too_early(box: Toolbox) -> None:
        async with box.session({}) as session:
            assert (await session.call([attempt("echo", x=1)]))[0].ok
            box.close()

    asyncio.run(close_too_early(load_tools(mcp_config=hostile("stubborn", str(pids), session="trajectory"))))


@linux
def test_no_process_stays_behind_when_the_server_dies(tmp_path: Path) -> None:
    with load_tools(mcp_config=hostile("children", str(tmp_path / "pids"))):
        server = written(tmp_path / "pids")  # another is started, which writes there too
        os.kill(server[0], signal.SIGKILL)
        assert all_end(*server)


TRAINER = """
import json, sys, time
from toolgrpo.tools import load_tools
box = load_tools(mcp_config=json.loads(sys.argv[1]))
print("ready", flush=True)
time.sleep(1000)
"""


@linux
def test_no_process_stays_behind_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """Two trainers at once, one for each signal."""
    with ExitStack() as running:
        trainers = {}
        for number in (signal.SIGKILL, signal.SIGTERM):
            command = [sys.executable, "-c", TRAINER, json.dumps(hostile("stubborn", str(tmp_path / number.name)))]
            trainers[number] = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            running.callback(trainers[number].send_signal, number)
        for number, trainer in trainers.items():
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            written(tmp_path / number.name)
    for number in trainers:
        assert all_end(*written(tmp_path / number.name)), number

"""MCP servers over both transports: one from PyPI, one of our own, dying and freezing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mcp_types
import pytest
from process_tree import all_end

from tests.support.ports import free_port
from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import ConfigError, PluginError
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.mcp.config_file import read_mcp_config
from toolgrpo.tools.mcp.connection import content_text

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
SERVER = str(Path(__file__).parents[1] / "fixtures" / "tools" / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


def answered_again(toolbox: Toolbox, timeout_s: float = 240.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if run_tool(toolbox, {"name": "add", "arguments": {"a": 1, "b": 1}}).content == "2":
            return True
    return False


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def http_server(port: int) -> Iterator[None]:
    server = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not answers(port):
            assert server.poll() is None and time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    """One at a URL; `test_tool_backends.py` asks one over pipes."""
    port = free_port()
    config = {"mcpServers": {"fixture": {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-A": "b"}}}}
    with http_server(port), load_tools(mcp_config=config, tool_timeout_s=120, max_result_chars=50) as box:
        yield box


def test_calls_of_several_loops_share_a_session(toolbox: Toolbox) -> None:
    assert toolbox.names[:3] == ["add", "note", "fail"]
    for i in range(3):
        results = call_all(
            toolbox, attempt("add", a=i, b="1"), attempt("add", a="x", b=1), attempt("fail", reason="so")
        )
        assert results[0].content == str(i + 1)
        assert results[1].error is ToolErrorKind.BAD_ARGUMENTS
        assert results[2].error is ToolErrorKind.RAISED and "so" in results[2].content


def test_a_server_that_dies_is_started_again() -> None:
    with load_tools(mcp_config={"mcpServers": {"fixture": STDIO}}, tool_timeout_s=120) as box:
        before = run_tool(box, {"name": "process_id"}).content
        lost = run_tool(box, {"name": "die"})
        assert lost.error is ToolErrorKind.DIED and "started again" in lost.content
        assert answered_again(box)
        assert run_tool(box, {"name": "process_id"}).content != before


def test_a_server_at_a_url_that_went_away_is_found_again() -> None:
    port = free_port()
    entry = {"url": f"http://127.0.0.1:{port}/mcp"}
    with ExitStack() as stack:
        with http_server(port):
            box = stack.enter_context(load_tools(mcp_config={"mcpServers": {"fixture": entry}}, tool_timeout_s=20))
            assert run_tool(box, {"name": "add", "arguments": {"a": 1, "b": 1}}).content == "2"
        gone = run_tool(box, {"name": "add", "arguments": {"a": 1, "b": 1}})
        assert gone.error in (ToolErrorKind.DIED, ToolErrorKind.TIMEOUT)
        with http_server(port):
            assert answered_again(box)


def test_a_server_that_freezes_is_replaced() -> None:
    with load_tools(mcp_config={"mcpServers": {"fixture": STDIO}}, tool_timeout_s=4) as box:
        before = run_tool(box, {"name": "process_id"}).content
        assert run_tool(box, {"name": "freeze_loop"}).error is ToolErrorKind.TIMEOUT
        assert answered_again(box)
        assert run_tool(box, {"name": "process_id"}).content != before
    assert all_end(int(before))


def test_one_session_per_trajectory_by_choice() -> None:
    async def two(box: Toolbox) -> list[str]:
        async with box.session({}) as one, box.session({}) as other:
            await one.call([attempt("note", text="a")])
            results = await one.call([attempt("note", text="b")]) + await other.call([attempt("note", text="c")])
            return [result.content for result in results]

    with load_tools(mcp_config={"mcpServers": {"fixture": {**STDIO, "session": "trajectory"}}}) as box:
        assert asyncio.run(two(box)) == ["a, b", "c"]


def test_parts_of_a_result_become_text() -> None:
    file = mcp_types.TextResourceContents(uri="file:///a", text="hello body")
    picture = mcp_types.ImageContent(type="image", data="", mime_type="image/png")
    shown = [content_text(one) for one in (mcp_types.EmbeddedResource(type="resource", resource=file), picture)]
    assert shown == ["hello body", "[image left out: only text can be shown]"]


def test_two_servers_with_one_tool_need_a_prefix() -> None:
    with pytest.raises(PluginError, match=r"MCP.*'add'.*\"prefix\""):
        load_tools(mcp_config={"mcpServers": {"one": STDIO, "two": STDIO}})
    with pytest.raises(PluginError, match=r"'nope'.*add"):
        load_tools(mcp_config={"mcpServers": {"one": {**STDIO, "tools": ["nope"]}}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "must have the form"),
        ('{"mcpServers": {"a": {}}}', "server 'a' needs either a \"command\""),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "needs either"),
        ('{"mcpServers": {"a": {"url": "y", "type": "sse"}}}', "only stdio and streamable HTTP"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "\"args\": Input should be a valid list, got 'y'"),
        (
            '{"mcpServers": {"a": {"command": "x", "session": "day"}}}',
            "Input should be 'run' or 'trajectory', got 'day'",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_mcp_config(path)
    assert says in str(caught.value) and "mcp.json" in str(caught.value)


def test_variables_of_the_environment_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_A_TEST", "here")
    monkeypatch.delenv("OF_NO_TEST", raising=False)
    entry = {"url": "http://${OF_NO_TEST:-127.0.0.1}:80/mcp", "headers": {"Authorization": "Bearer ${OF_A_TEST}"}}
    (server,) = read_mcp_config({"mcpServers": {"one": entry}})
    assert (server.url, server.headers) == ("http://127.0.0.1:80/mcp", {"Authorization": "Bearer here"})
    with pytest.raises(ConfigError, match=r"'one'.*OF_NO_TEST"):
        read_mcp_config({"mcpServers": {"one": {"command": "x", "args": ["$OF_A_TEST", "${OF_NO_TEST}"]}}})


def test_without_the_package_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"'toolgrpo\[mcp\]'"):
        load_tools(mcp_config={"mcpServers": {"one": STDIO}})


def test_the_server_of_the_docs_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "tools.md").read_text()
    (source,) = [block for block in page.split("```python\n") if block.startswith("# prices_server.py")]
    (tmp_path / "prices_server.py").write_text(source.partition("```")[0])
    config = {"mcpServers": {"prices": {"command": sys.executable, "args": [str(tmp_path / "prices_server.py")]}}}
    with load_tools(mcp_config=config) as box:
        assert run_tool(box, {"name": "get_price", "arguments": {"product": "tea"}}).content == "4.5"

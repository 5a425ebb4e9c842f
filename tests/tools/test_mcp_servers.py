"""MCP servers over both transports: one from PyPI, one of our own, dying and freezing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import mcp_types
import pytest
from process_tree import all_end, wait_for

from tests.support.ports import free_port
from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import ConfigError, PluginError
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.mcp.config_file import read_mcp_config
from toolgrpo.tools.mcp.connection import content_text, result_text

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
SERVER = str(Path(__file__).parents[1] / "fixtures" / "tools" / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


ADD = {"name": "add", "arguments": {"a": 1, "b": 1}}


@contextmanager
def http_server(port: int) -> Iterator[None]:
    server = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        with ExitStack() as probes:
            while probes.enter_context(socket.socket()).connect_ex(("127.0.0.1", port)) != 0:
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
    for i in range(3):
        added, failed = call_all(toolbox, attempt("add", a=i, b="1"), attempt("fail", reason="so"))
        assert added.content == str(i + 1)
        assert failed.error is ToolErrorKind.RAISED and "so" in failed.content


@pytest.mark.parametrize(
    ("name", "timeout_s", "error"), [("die", 120, ToolErrorKind.DIED), ("freeze_loop", 4, ToolErrorKind.TIMEOUT)]
)
def test_a_server_that_dies_or_freezes_is_replaced(name: str, timeout_s: float, error: ToolErrorKind) -> None:
    with load_tools(mcp_config={"mcpServers": {"fixture": STDIO}}, tool_timeout_s=timeout_s) as box:
        before = run_tool(box, {"name": "process_id"}).content
        assert run_tool(box, {"name": name}).error is error
        wait_for(lambda: run_tool(box, ADD).content == "2", timeout_s=240)
        assert run_tool(box, {"name": "process_id"}).content != before
    assert all_end(int(before))


def test_a_server_at_a_url_that_went_away_is_found_again() -> None:
    port = free_port()
    entry = {"url": f"http://127.0.0.1:{port}/mcp"}
    with ExitStack() as stack:
        with http_server(port):
            box = stack.enter_context(load_tools(mcp_config={"mcpServers": {"fixture": entry}}, tool_timeout_s=20))
            assert run_tool(box, ADD).content == "2"
        assert run_tool(box, ADD).error in (ToolErrorKind.DIED, ToolErrorKind.TIMEOUT)
        with http_server(port):
            wait_for(lambda: run_tool(box, ADD).content == "2", timeout_s=240)


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(401)


def test_a_server_at_a_url_that_refuses_is_quoted_with_its_status() -> None:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(PluginError, match=r"'web'.*HTTP 401 Unauthorized.*headers"):
            load_tools(mcp_config={"mcpServers": {"web": {"url": f"http://127.0.0.1:{server.server_port}/mcp"}}})
        server.shutdown()


def test_one_session_per_trajectory_by_choice() -> None:
    a, b, c = ({"name": "note", "arguments": {"text": text}} for text in "abc")
    config = {"mcpServers": {"fixture": {**STDIO, "session": "trajectory"}}}
    with load_tools(mcp_config=config) as box, box.session({}) as one, box.session({}) as other:
        assert [session.run(call).content for session, call in ((one, a), (one, b), (other, c))] == [
            "a",
            "a, b",
            "c",
        ]


def test_parts_of_a_result_become_text() -> None:
    file = mcp_types.TextResourceContents(uri="file:///a", text="hello body")
    assert content_text(mcp_types.EmbeddedResource(type="resource", resource=file)) == "hello body"
    assert content_text(mcp_types.ImageContent(type="image", data="", mime_type="image/png")) is None


def test_a_link_and_what_stands_beside_an_image_are_told() -> None:
    link = mcp_types.ResourceLink(type="resource_link", uri="file:///a", name="a", description="the first")
    assert content_text(link) == "file:///a a the first"
    image = mcp_types.ImageContent(type="image", data="", mime_type="image/png")
    blob = mcp_types.BlobResourceContents(uri="file:///a", blob="AAAA")
    some: list[list[Any]] = [
        [image],
        [mcp_types.EmbeddedResource(type="resource", resource=blob)],
        [mcp_types.TextContent(type="text", text="")],
        [],
    ]
    for blocks in some:
        result = mcp_types.CallToolResult(content=blocks, structured_content={"price": 4.5})
        text = result_text(result)
        assert '{"price":4.5}' in text and ("image left out" in text) == (image in blocks)


def test_starting_a_server_is_not_part_of_the_first_call() -> None:
    slow = {
        "command": sys.executable,
        "args": [
            "-c",
            f"import runpy, sys, time; time.sleep(2.5); sys.argv = [{SERVER!r}, 'stdio']; runpy.run_path({SERVER!r}, run_name='__main__')",
        ],
    }
    config = {"mcpServers": {"fixture": {**slow, "session": "trajectory"}}}
    with load_tools(mcp_config=config, tool_timeout_s=2.0) as box, box.session({}) as one:
        assert one.run({"name": "note", "arguments": {"text": "a"}}).content == "a"


def add() -> str:
    """Add."""
    return ""


def test_a_tool_of_two_sources_needs_a_prefix() -> None:
    with pytest.raises(PluginError, match=r"MCP.*'add'.*\"prefix\""):
        load_tools(mcp_config={"mcpServers": {"one": STDIO, "two": STDIO}})
    with pytest.raises(PluginError, match=r"'add'.*\"prefix\""):
        load_tools([add], mcp_config={"mcpServers": {"one": STDIO}}, workers=1)
    with pytest.raises(PluginError, match=r"'nope'.*add"):
        load_tools(mcp_config={"mcpServers": {"one": {**STDIO, "tools": ["nope"]}}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "must have the form"),
        ('{"mcpServers": {"a": {}}}', "server 'a' needs either a \"command\""),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "server 'a' needs either a \"command\""),
        ('{"mcpServers": {"a": {"url": "y", "type": "sse"}}}', "only stdio and streamable HTTP"),
        (
            '{"mcpServers": {"a": {"command": "x", "disabled": true}, "b": {"command": "x", "enabled": false}}}',
            "disables all its servers (a, b)",
        ),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "\"args\": Input should be a valid list, got 'y'"),
        ('{"mcpServers": {"a": {"command": "x", "session": "day"}}}', "'run' or 'trajectory', got 'day'"),
        ('{"mcpServers": {"a": {"command": "x", "excludeTools": ["y"]}}}', '"excludeTools", which is not known'),
        ('{"mcpServers": {"a": {"command": "x", "sesion": "trajectory"}}}', 'the nearest is "session"'),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_mcp_config(path)
    assert says in str(caught.value) and "mcp.json" in str(caught.value)


def test_keys_of_desktop_clients_are_passed_over() -> None:
    keys = (
        "type disabled timeout autoApprove alwaysAllow description transport envFile trust icon version tags auth dev"
    )
    entry = {"command": "x", **dict.fromkeys(keys.split())}
    assert read_mcp_config({"mcpServers": {"one": entry}})[0].command == "x"


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

"""The same cases over every kind of tool: workers, the trainer's process, environments, MCP servers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind
from toolgrpo.tools import Toolbox, load_tools

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:the model will see only")]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tools"

SOURCE = '''
"""The same three tools in every form."""
import asyncio
from toolgrpo.tools import tool

@tool(timeout=4FLAG)
async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"

@tool(timeout=60FLAG)
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b

@tool(timeout=60FLAG)
def fail(reason: str) -> str:
    """Raise."""
    raise ValueError(reason)
'''


@pytest.fixture(scope="module", params=["workers", "isolated", "in_process", "environment", "mcp"])
def toolbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    path = tmp_path_factory.mktemp(request.param) / "three.py"
    if request.param == "mcp":
        entry = {"command": sys.executable, "args": [str(FIXTURES / "mcp_server.py"), "stdio"]}
        box = load_tools(mcp_config={"mcpServers": {"fixture": entry}}, tool_timeout_s=6)
    elif request.param == "environment":
        imports, _, tools = SOURCE.replace("FLAG", "").partition("\n\n")
        body = re.sub(r"(def \w+\()", r"\1self, ", tools).replace("\n", "\n    ")
        path.write_text(f"{imports}\nclass Three:\n    def reset(self, **row): ...\n    {body}\nENVIRONMENT = Three\n")
        box = load_tools(path, tool_timeout_s=60, workers=1)
    else:
        flag = {"workers": "", "isolated": ", isolate=True", "in_process": ", in_process=True"}[request.param]
        path.write_text(SOURCE.replace("FLAG", flag) + "TOOL_FUNCTIONS = [add, fail, nap]\n")
        box = load_tools(path, tool_timeout_s=60, workers=1)
    with box:
        yield box


def test_has_schemas_in_the_openai_form(toolbox: Toolbox) -> None:
    by_name = {schema["function"]["name"]: schema for schema in toolbox.schemas}
    assert {"add", "fail", "nap"} <= set(toolbox.names)
    add = by_name["add"]
    assert add["type"] == "function" and add["function"]["description"] == "Add two integers."
    assert add["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_answers_in_call_order_one_each(toolbox: Toolbox) -> None:
    results = call_all(
        toolbox,
        attempt("nap", seconds=0.2),
        attempt("add", a=1, b="2"),
        CallAttempt(AttemptStatus.INVALID_JSON, "{", detail="not JSON"),
        attempt("fail", reason="because"),
        attempt("add", a=1),
        attempt("ad", a=1, b=1),
    )
    errors = [None, None, "invalid_json", "raised", "bad_arguments", "unknown_tool"]
    assert [r.error for r in results] == [error and ToolErrorKind(error) for error in errors]
    assert [r.content for r in results[:2]] == ["slept", "3"]
    assert "because" in results[3].content and "missing parameter 'b'" in results[4].content
    assert all(r.duration_s >= 0 and r.started_s >= 0 for r in results)
    assert results[0].duration_s > 0.15


def test_a_call_that_overruns_costs_itself(toolbox: Toolbox) -> None:
    results = call_all(toolbox, attempt("add", a=2, b=2), attempt("nap", seconds=1000))
    assert [r.error for r in results] == [None, ToolErrorKind.TIMEOUT]
    assert call_all(toolbox, attempt("add", a=2, b=3))[0].content == "5"


def test_no_answer_no_reward_and_no_observation_unless_there_is_one(toolbox: Toolbox) -> None:
    async def run() -> tuple[object, ...]:
        async with toolbox.session({}) as session:
            return session.observation, await session.call([]), await session.reward()

    assert asyncio.run(run()) == (None, (), None)

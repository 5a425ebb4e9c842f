"""The python tool through real tool workers and the real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox import RunStatus, Sandbox, SandboxResult
from toolgrpo.support.plugin_files import import_file
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.toolbox import parse_call

pytestmark = pytest.mark.e2e

FILE = "tools_funcs/python_tools.py"


def test_a_remote_run_prints_its_last_value(capsys: pytest.CaptureFixture[str]) -> None:
    printing = import_file(Path(FILE))._printing
    for code in ("print('a')\n6 * 7", "x = 1", "None"):
        exec(printing(code), {})
    assert capsys.readouterr().out == "a\n42\n" and printing("(") == "("


def test_a_run_that_was_ended_says_so_beside_what_it_printed() -> None:
    as_text = import_file(Path(FILE))._as_text
    ended = as_text(SandboxResult(RunStatus.TIMEOUT, stdout="partial\n", stderr="a warning"))
    assert ended == "partial\na warning\nthe run ended with status timeout"
    assert as_text(SandboxResult(RunStatus.ERROR, stderr="NameError")) == "NameError"


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox() -> Iterator[None]:
    try:
        Sandbox(workers=1).close()
    except SandboxError as error:
        pytest.skip(f"this machine cannot hold the sandbox: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLGRPO_PYTHON_TIMEOUT", "60")
        yield


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    with load_tools(FILE, workers=1, tool_timeout_s=240) as loaded:
        yield loaded


def ask(toolbox: Toolbox, code: str) -> Any:
    return run_tool(toolbox, {"name": "python", "arguments": {"code": code}})


def test_a_call_reads_what_is_printed_and_the_last_value_or_its_error(toolbox: Toolbox) -> None:
    assert ask(toolbox, "print('hello')\n6 * 7").content == "hello\n42"
    assert "no output" in ask(toolbox, "kept = 1").content
    assert "NameError" in ask(toolbox, "kept").content, "nothing is kept between calls"
    assert "Error" in ask(toolbox, "open('/etc/passwd').read()").content, "it runs in the sandbox"
    assert ask(toolbox, "1 + 1").content == "2"


def test_a_session_says_that_its_variables_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLGRPO_PYTHON_TIMEOUT", "1")
    with load_tools(environment=f"{FILE}:PythonSession", tool_timeout_s=240) as toolbox, toolbox.session({}) as session:
        run = [session.run({"name": "python", "arguments": {"code": code}}) for code in ("x = 3", "while 1: pass", "x")]
    assert "all variables are gone" in run[1].content and "NameError" in run[2].content


def test_a_session_keeps_its_variables_and_episodes_do_not_share_them() -> None:
    async def episode(toolbox: Toolbox, value: int) -> str:
        lines = (f"x = {value}", "x * 2")
        calls = [parse_call({"name": "python", "arguments": {"code": line}}) for line in lines]
        async with toolbox.session({}) as session:
            return [(await session.call([call]))[0].content for call in calls][1]

    async def both(toolbox: Toolbox) -> tuple[str, ...]:
        return await asyncio.gather(episode(toolbox, 1), episode(toolbox, 50))

    with load_tools(environment=f"{FILE}:PythonSession", tool_timeout_s=240) as toolbox:
        assert tuple(asyncio.run(both(toolbox))) == ("2", "100")

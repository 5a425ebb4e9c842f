"""The flags of a run that name tools, from the command line to a toolbox that answers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.job import Job
from toolgrpo.commands.terminal import Terminal
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools import Toolbox, run_tool

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "tools"


def toolbox(folder: Path, *flags: str) -> Toolbox:
    """What `recipes/train.py` makes of these flags."""
    always = ["--model_name_or_path", "nano", "--dataset_id_or_path", "arithmetic", "--reward", "accuracy"]
    arguments = parse_arguments([*always, "--output_dir", str(folder), *flags])
    box = Job(*arguments, Terminal(None, io.StringIO(), quiet=False)).toolbox()
    assert isinstance(box, Toolbox)
    return box


def test_a_script_with_a_timeout_and_a_cache(tmp_path: Path) -> None:
    hostile = str(FIXTURES / "hostile_tools.py")
    with toolbox(tmp_path, "--tools_script", hostile, "--tool_timeout", "0.5", "--cache_tools", "true") as box:
        assert "no answer within 0.5 s" in run_tool(box, {"name": "sleep_forever"}).content
        call = {"name": "nap", "arguments": {"seconds": 0.7}}  # its own timeout is longer than the run's
        first, second = run_tool(box, call), run_tool(box, call)
    assert first.content == second.content == "slept 0.7" and (first.cached, second.cached) == (False, True)


def test_servers_beside_functions_and_an_environment(tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": [str(FIXTURES / "mcp_server.py"), "stdio"], "prefix": "far_"}
    config.write_text(json.dumps({"mcpServers": {"fixture": server}}))
    with toolbox(
        tmp_path,
        *("--tools_script", str(ROOT / "tools_funcs" / "arithmetic_tools.py")),
        *("--environment", f"{FIXTURES / 'counter_environment.py'}:Counter"),
        *("--mcp_config", str(config)),
    ) as box:
        assert {"add", "bump", "far_add"} <= set(box.names)
        for name in ("add", "far_add"):
            assert run_tool(box, {"name": name, "arguments": {"a": 1, "b": 2}}).content == "3"
        with box.session({}) as session:
            lost, kept = session.run({"name": "die"}), session.run({"name": "add"})
        assert lost.error is ToolErrorKind.DIED and kept.error is ToolErrorKind.BAD_ARGUMENTS

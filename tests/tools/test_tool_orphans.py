"""Whoever is killed, alone or together: what a tool started goes with it, and nothing is left of the tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import all_end, has_ended, wait_for

TOOLS = Path(__file__).parents[1] / "fixtures" / "tools" / "process_tools.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing holds it")

_TRAINER = """
import json, os, sys, time
from toolgrpo.tools import load_tools, run_tool
box = load_tools(sys.argv[1], workers=1, tool_timeout_s=60)
call = {"name": "start_child", "arguments": {"detached": sys.argv[2] == "True"}}
child, worker, supervisor = json.loads(run_tool(box, call).content)
reaper = int(open(f"/proc/{supervisor}/stat").read().rpartition(")")[2].split()[1])
fork = os.fork() if sys.argv[3] == "True" else 0  # a data loader's worker, which holds all that the trainer held
if sys.argv[3] == "True" and fork == 0:
    time.sleep(600)
    os._exit(0)
found = {"child": child, "worker": worker, "supervisor": supervisor, "reaper": reaper, "trainer": os.getpid()}
print(json.dumps({**found, "fork": fork}), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("killed", "detached", "forked"),
    [
        (["trainer"], True, False),
        (["trainer"], False, True),
        (["supervisor", "trainer"], True, False),
        (["supervisor", "trainer"], False, True),
        (["worker", "supervisor", "trainer"], True, False),
        (["reaper", "trainer"], True, False),
        (["reaper"], True, False),
        (["supervisor"], True, False),
        (["worker"], True, False),
    ],
)
def test_a_child_of_a_tool_ends_with_those_above(killed: list[str], detached: bool, forked: bool) -> None:
    command = [sys.executable, "-c", _TRAINER, str(TOOLS), str(detached), str(forked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        found: dict[str, int] = json.loads(trainer.stdout.readline())
        try:
            for name in killed:
                os.kill(found[name], signal.SIGKILL)
            assert all_end(found["child"], found["worker"])
            if "trainer" in killed:
                assert all_end(found["supervisor"], found["reaper"])
        finally:
            for name in ("trainer", "fork", "child"):
                if found[name] and not has_ended(found[name]):
                    os.kill(found[name], signal.SIGKILL)


def test_a_supervisor_whose_import_never_ends_goes_with_its_trainer(tmp_path: Path) -> None:
    """Whether or not the trainer lived long enough to be watched: nothing spins on."""
    path, ids = tmp_path / "spins.py", tmp_path / "ids"
    path.write_text(
        f"import os\nopen({str(ids)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} ')\nwhile True: pass\n"
    )
    code = f"from toolgrpo.tools import load_tools; load_tools({str(path)!r}, workers=1)"
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: ids.exists() and len(ids.read_text().split()) == 2)
    finally:
        trainer.kill()
        trainer.wait()
    assert all_end(*(int(pid) for pid in ids.read_text().split()))

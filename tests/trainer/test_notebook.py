"""Trainers one after the other in one process, as cells of a notebook make them: in a real Jupyter kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

from tests.support.notebook_kernel import NotebookKernel  # noqa: E402

TOOLS = '''
def look_up(word: str) -> str:
    """Look a word up."""
    return "{meaning}"

TOOL_FUNCTIONS = [look_up]
'''

SETTINGS = """
import gc, sys, time
from toolgrpo.testing import ByteChat, ScriptedReply, tiny_trainer

seen = []

def of_results(completions, **_):
    seen.extend(m["content"] for c in completions for m in c if m["role"] == "tool")
    return [float(len(str(c)) % 3) for c in completions]

def said(request, number):
    answered = ">tool:" in ByteChat.text(request.ids)
    return ByteChat.say("end" + "." * (number % 5) if answered else 'call look_up {"word": "a"}')

def make(script, **changes):
    return tiny_trainer("out", of_results, script, parts={"tools": "my_tools.py"}, **changes)
"""

SCRIPTED = "trainer = make(said); print(trainer.train().global_step)"
LONG = """
def slowly(request, number):
    print("asked for a turn", flush=True)
    return ScriptedReply(said(request, number), delay_s=0.3)

trainer = make(slowly, max_steps=50)
trainer.train()
print("ended by", trainer.stopped_by, "after", trainer.state.global_step)
"""


def test_cells_run_again_with_an_edited_plugin_give_workers_back_and_can_be_interrupted(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS.format(meaning="first"))
    # Under pytest a kernel would leave its descriptors alone, which vLLM wants to have.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with NotebookKernel(tmp_path, {**inherited, "OMP_NUM_THREADS": "1"}) as kernel:
        kernel.run(SETTINGS)
        assert kernel.run(SCRIPTED).strip().endswith("2")
        assert set(eval(kernel.run("print(set(seen)); seen.clear()"))) == {"first"}
        (tmp_path / "my_tools.py").write_text(TOOLS.format(meaning="second, after an edit"))
        assert kernel.run(SCRIPTED).strip().endswith("2")
        assert set(eval(kernel.run("print(set(seen)); seen.clear()"))) == {"second, after an edit"}

        workers = "import threading; print(sum(t.name == 'toolgrpo-tools' for t in threading.enumerate()))"
        kernel.run("gc.collect()")
        assert kernel.run(workers).strip() == "1", "the trainer of the cell before the last one is gone already"
        kernel.run("del trainer; gc.collect()")
        assert kernel.run(workers).strip() == "0"

        shown = kernel.run(LONG, interrupt_after="asked for a turn")
        assert "ended by SIGINT after" in shown
        assert kernel.run(SCRIPTED).strip().endswith("2")

"""Trainers one after the other in one process, as cells of a notebook make them: in a real Jupyter kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

from tests.support.notebook_kernel import NotebookKernel  # noqa: E402

TOOLS = '''
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookKernel]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "my_tools.py").write_text(TOOLS.format(meaning="first"))
    # Under pytest a kernel would leave its descriptors alone, which vLLM wants to have.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with NotebookKernel(folder, {**inherited, "OMP_NUM_THREADS": "1"}) as kernel:
        kernel.run(SETTINGS)
        yield kernel


def test_a_cell_runs_again_and_an_edited_plugin_is_taken_up(kernel: Any) -> None:
    assert kernel.run(SCRIPTED).strip().endswith("2")
    assert set(eval(kernel.run("print(set(seen)); seen.clear()"))) == {"first"}
    (kernel._folder / "my_tools.py").write_text(TOOLS.format(meaning="second, after an edit"))
    assert kernel.run(SCRIPTED).strip().endswith("2")
    assert set(eval(kernel.run("print(set(seen)); seen.clear()"))) == {"second, after an edit"}


def test_a_trainer_that_nobody_has_gives_its_workers_back(kernel: Any) -> None:
    workers = "import threading; print(sum(t.name == 'toolgrpo-tools' for t in threading.enumerate()))"
    kernel.run("gc.collect()")
    assert kernel.run(workers).strip() == "1", "the trainer of the cell before the last one is gone already"
    kernel.run("del trainer; gc.collect()")
    assert kernel.run(workers).strip() == "0"


def test_an_interrupted_cell_ends_its_step_and_the_next_trains(kernel: Any) -> None:
    shown = kernel.run(LONG, interrupt_after="asked for a turn")
    assert "ended by SIGINT after" in shown
    assert kernel.run(SCRIPTED).strip().endswith("2")

"""Programs that `code_exec` scores: which part of a response is the program, and what one earns that searches for the tests
or takes its grader down."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from out_of_memory import KILLS_ITSELF, Counter, killed_while_it_runs
from test_nothing_is_inherited import forged

from confined_python import Sandbox
from confined_python.client import host_process
from confined_python.grading import Suite, grade
from tests.rewards.test_code_exec_rows import score
from toolgrpo.data import load_tasks
from toolgrpo.errors import RewardError, SandboxError, WorkerLostError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Score
from toolgrpo.rewards.code_exec import _SHARED, program_of


def test_the_program_of_a_response() -> None:
    assert program_of("```python\na\n```\ntext\n```py\nb = 1\n```\n```text\nout\n```") == "b = 1\n"
    assert program_of("x = 1\n") == "x = 1\n"
    assert program_of("I do not know how.") is None
    assert program_of("") is None


F = "def f(x):\n    return 2 * x\n"
TESTS_OF_F: dict[str, Any] = {"tests": ["assert f(2) == 4"]}
FENCED = f"```python\n{F}```"
SHAPES = {
    "one fence": FENCED,
    "no fence": F,
    "no fence, with a docstring": f'"""Twice."""\n\n{F}',
    "no language": f"```\n{F}```",
    **{f"tag {tag!r}": f"```{tag}\n{F}```" for tag in ("py", "Python", "python3", "python title=f.py", " python")},
    "text around": f"Here it is:\n\n{FENCED}\n\nIt doubles `x`, as ```f(1)``` shows.",
    "indented, as in a list": "1. Do this:\n\n   " + FENCED.replace("\n", "\n   ") + "\n2. Done.",
    "a body indented alone": "```python\n\n    " + F.replace("\n", "\n    ") + "\n```",
    "usage after": f"{FENCED}\nFor example:\n```python\nprint(f(2))  # 4\nx = f(3)\n```",
    "a test after": f"{FENCED}\n```python\nimport unittest\nfrom solution import f\ndef test_f():\n    assert f(2) == 4\n```",
    "output after, without a language": f"{FENCED}\nThis prints\n```\n4\n```",
    "output after, in text": f"{FENCED}\n```text\nf(2) -> 4\n```",
    "between other fences": f"```bash\npip install x\n```\n```python\nimport os\n```\n{FENCED}\n```json\n{{}}\n```\n```\n>>> f(2)\n```",
    "a wrong draft before": f"```python\ndef f(x):\n    return x\n```\nNo, twice:\n{FENCED}",
    "a helper before, explained": "```python\nimport math\nTWO = 2\n\ndef twice(x):\n    return TWO * x\n```\nWith it:\n"
    "```python\ndef f(x):\n    y = twice(x)\n    return math.floor(y)\n```\nso\n```python\ny = f(1)\n```",
    "usage before it is defined": f"```python\nresult = f(2)\n```\n```python\n{F}\nresult = 0\n```\n```python\nf(result)\n```",
    "a name that is assigned": "```python\nf = lambda x: 2 * x\n```\n```python\nf(2)\n```",
    "defined in a branch": f"```python\ntry:\n    import x\nexcept ImportError:\n    {F.replace(chr(10), chr(10) + '    ')}\n```\n```python\nf(2)\n```",
    "never closed": f"Here:\n```python\n{F}",
    "never closed, after another": f"```\npip install x\n```\n```python\n{F}",
    "an unclosed example after": f"{FENCED}\n```python\nprint(f(",
    "thinking before": f"<think>\n```python\ndef f(x):\n    return x\n```\n</think>\n\n{FENCED}",
    "thoughts in words, with a sketch": f"First `f(x)`:\n```\nf x = 2x\n```\nIn Python:\n{FENCED}",
}


def scores_of(texts: Collection[str], **row: Any) -> list[Score]:
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return get_reward("code_exec")(completions=completions, **{name: [cell] * len(texts) for name, cell in row.items()})


def test_a_right_program_is_found_in_every_shape_of_a_response() -> None:
    """The block that defines what the tests ask for is graded, whatever stands around it."""
    for row in (TESTS_OF_F, {"tests": "def check(candidate):\n    assert candidate(3) == 6\n", "entry_point": "f"}):
        scores = scores_of(SHAPES.values(), **row)
        assert dict(zip(SHAPES, scores, strict=True)) == dict.fromkeys(SHAPES, 1.0)


def test_what_is_no_right_program_scores_nothing() -> None:
    other_name, other_language = "```python\ndef g(x):\n    return 2 * x\n```", f"```text\n{F}```"
    worse_after = f"{FENCED}\nBetter:\n```python\ndef f(x):\n    return x\n```"
    assert scores_of([other_name, other_language, worse_after, "I would double it."], **TESTS_OF_F) == [0.0] * 4
    with pytest.raises(RewardError, match="tests of row 1 must be"):
        score(["x = 1"] * 2, [TESTS_OF_F, {"tests": []}])


@pytest.mark.parametrize("name", ["mbpp_full_10", "mbpp_sanitized_30"])
def test_every_reference_solution_passes_and_no_empty_one(name: str) -> None:
    file = Path(__file__).parents[2].parent / "shared" / "data" / f"{name}.jsonl"
    if not file.exists():
        pytest.skip("the MBPP rows that this test reads are not beside the repository")
    rows = list(load_tasks(f"mbpp:{file}"))
    assert score([row["answer"] for row in rows], rows) == [1.0] * len(rows)
    assert score(["import sys; sys.exit(0)"] * len(rows), rows) == [0.0] * len(rows)


OLD_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def test_fences_are_read_as_the_pattern_that_says_what_they_are() -> None:
    drawn = random.Random(5)
    pieces = [*"\n\n `\t\r\u2028", "```", "```python", "x = 1", "py", "```text more", "+-", "```\n"]
    for _ in range(20_000):
        text = "".join(drawn.choice(pieces) for _ in range(drawn.randrange(14)))
        fenced = [body for word, body in OLD_FENCE.findall(text) if word.lower() in ("python", "py", "python3", "")]
        program, spaces = program_of(text), re.compile(r"(?m)^[ \t]+")
        if fenced:
            assert program is not None and spaces.sub("", program) == spaces.sub("", fenced[-1]), repr(text)
        elif "```" in text:  # at most one that is never closed
            assert program is None or spaces.sub("", program).rstrip() in spaces.sub("", text), repr(text)


def test_the_reward_pays_for_forgeable_tests_only_where_the_row_says_so() -> None:
    metrics: dict[str, float] = {}

    def scored(*allow: Any) -> list[Score]:
        programs = ["def apply(f, x): return f(x)", "def apply(f, x): return 0", "def twice(x): return 2 * x"]
        tests = ["assert apply(lambda x: x, 3) == 3"] * 2 + ["assert twice(2) == 4"]
        rows = [{"tests": [test], "allow_forgeable": said} for test, said in zip(tests, allow, strict=True)]
        return score(programs, rows, metrics)

    counted = {"forgeable": 2 / 3, "worker_lost": 0.0, "compared": 0.0, "refused": 0.0}
    assert scored(None, False, True) == [0.0, 0.0, 1.0]
    assert metrics == {f"code_exec/{name}": share for name, share in counted.items()}
    metrics.clear()
    assert scored(True, True, None) == [1.0, 0.0, 1.0]
    assert metrics["code_exec/forgeable"] == 2 / 3, "counted all the same"
    with pytest.raises(RewardError, match=r"allow_forgeable .*row 1 .*'yes'"):
        scored(None, "yes", None)


@pytest.fixture
def own_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reward opens a sandbox of its own for this test."""
    monkeypatch.setattr(_SHARED, "_sandbox", None)
    yield
    if _SHARED._sandbox is not None:
        _SHARED._sandbox.close()


def mbpp(name: str, factor: int) -> dict[str, Any]:
    tests = [f"assert {name}({given}) == {given * factor}" for given in (3, 14, 159)]
    right, wrong = (f"def {name}(x):\n    return {factor} {sign} x" for sign in "*+")
    return {"tests": tests, "name": name, "right": right, "wrong": wrong}


def humaneval(name: str, factor: int) -> dict[str, Any]:
    asserts = "".join(f"    assert candidate({given}) == {given * factor}\n" for given in (2, 71, 828))
    return {**mbpp(name, factor), "tests": f"def check(candidate):\n{asserts}", "entry_point": name}


@pytest.fixture
def with_workers(own_sandbox: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many workers the reward has."""

    def choose(count: int) -> None:
        monkeypatch.setattr(import_module("toolgrpo.rewards.code_exec"), "SHARED_WORKERS", count)
        monkeypatch.setattr(_SHARED, "_workers", count)

    return choose


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_reward_pays_no_forged_answer_of_a_group(with_workers: Any, workers: int) -> None:
    """One honest answer that is wrong, one that is right, and six that search for the tests."""
    with_workers(workers)
    for task in (mbpp("scale", 7), humaneval("stretch", 11)):
        group = [task["wrong"], *[forged(task["name"])] * 3, task["right"], *[forged(task["name"])] * 3]
        assert score(group, [task] * 8) == [0.0] * 4 + [1.0] + [0.0] * 3


def test_the_reward_pays_no_forged_answer_of_a_batch(with_workers: Any) -> None:
    with_workers(3)
    tasks = [mbpp("scale", 7), humaneval("stretch", 11), mbpp("widen", 13)]
    batch = [task for task in tasks for _ in range(3)]
    for _ in range(2):  # also where every test was judged before
        assert score([forged(task["name"]) for task in batch], batch) == [0.0] * 9
    assert score([task["right"] for task in tasks], tasks) == [1.0] * 3


KILLS_GRADER = f"import time\ntime.sleep(0.3)  # until the kernel has counted another\n{KILLS_ITSELF}"
TWICE: dict[str, Any] = {"tests": ["assert twice(2) == 4"]}


@pytest.fixture
def short_of_memory(tmp_path: Path, own_sandbox: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that counts another kill all the time, so that who kills itself takes its worker down."""
    file = tmp_path / "vmstat"
    file.write_text("oom_kill 000000001\n")
    done = threading.Event()

    def count() -> None:
        kills = 1
        with file.open("r+b", buffering=0) as counter:
            while not done.wait(0.01):
                kills += 1
                os.pwrite(counter.fileno(), f"oom_kill {kills:09}\n".encode(), 0)

    monkeypatch.setattr(host_process, "VMSTAT", file)
    thread = threading.Thread(target=count)
    thread.start()
    yield
    done.set()
    thread.join()


def hosts() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "confined_python.host.host" in " ".join(child.cmdline())
    ]


def test_a_program_that_kills_its_grader_scores_nothing_and_ends_nothing(short_of_memory: None) -> None:
    with Sandbox(workers=1) as sandbox, pytest.raises(WorkerLostError):
        grade(sandbox, KILLS_GRADER, Suite(tuple(TWICE["tests"])))
    before = hosts()
    kills_in_the_call = f"def twice(x):\n    exec({KILLS_GRADER!r})"
    programs = [KILLS_GRADER, "def twice(x): return 2 * x", kills_in_the_call, "def twice(x): return x"]
    metrics: dict[str, float] = {}
    assert score(programs, [TWICE] * 4, metrics) == [0.0, 1.0, 0.0, 0.0]
    assert metrics["code_exec/worker_lost"] == 0.5
    assert len(hosts()) == len(before) + 1, "a sandbox that was given up is closed"


def test_where_nothing_runs_it_is_no_score(short_of_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SandboxError):
        score(["x = 1"], [TWICE])


def test_code_exec_scores_no_program_that_the_kernel_killed(
    tmp_path: Path, own_sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "vmstat")
    counter = Counter(tmp_path / "vmstat")
    scores: list[Score] = []

    def run(head: str) -> None:
        scores.extend(score([f"{head}def twice(x):\n    return 2 * x"], [TWICE]))

    run("")  # starts the sandbox
    first = _SHARED._sandbox
    assert first is not None
    killed_while_it_runs(counter, first, run)
    assert set(scores) == {1.0}
    assert _SHARED._sandbox is not first, "scored by a second sandbox"
    first.close()

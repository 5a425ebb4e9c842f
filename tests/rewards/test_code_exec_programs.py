"""Programs that `code_exec` scores: which part of a response is the program, and what one that takes its grader down earns."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from out_of_memory import KILLS_ITSELF, Counter, killed_while_it_runs

from confined_python import Sandbox
from confined_python.client import host_process
from confined_python.grading import Suite, grade
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


def test_a_right_program_is_found_in_every_shape_of_a_response() -> None:
    """The block that defines what the tests ask for is graded, whatever stands around it."""
    completions = [[{"role": "assistant", "content": text}] for text in SHAPES.values()]
    check = "def check(candidate):\n    assert candidate(3) == 6\n"
    forms: list[tuple[Any, dict[str, list[str]]]] = [(["assert f(2) == 4"], {}), (check, {"entry_point": ["f"]})]
    for tests, more in forms:
        columns = {name: value * len(SHAPES) for name, value in more.items()}
        scores = get_reward("code_exec")(completions=completions, tests=[tests] * len(SHAPES), **columns)
        assert dict(zip(SHAPES, scores, strict=True)) == dict.fromkeys(SHAPES, 1.0)


WRONG_SHAPES = (
    "```python\ndef g(x):\n    return 2 * x\n```",
    f"{FENCED}\nBetter:\n```python\ndef f(x):\n    return x\n```",
    f"```text\n{F}```",
    "I would double it.",
)


def test_what_is_no_right_program_scores_nothing() -> None:
    completions = [[{"role": "assistant", "content": text}] for text in WRONG_SHAPES]
    scores = get_reward("code_exec")(completions=completions, tests=[["assert f(2) == 4"]] * len(WRONG_SHAPES))
    assert scores == [0.0] * len(WRONG_SHAPES)


def test_rows_without_tests_are_refused() -> None:
    with pytest.raises(RewardError, match="row 1"):
        get_reward("code_exec")(
            completions=[[{"role": "assistant", "content": "x = 1"}]] * 2, tests=[["assert x == 1"], []]
        )


@pytest.mark.parametrize("name", ["mbpp_full_10", "mbpp_sanitized_30"])
def test_every_reference_solution_passes_and_no_empty_one(name: str) -> None:
    file = Path(__file__).parents[2].parent / "shared" / "data" / f"{name}.jsonl"
    if not file.exists():
        pytest.skip("the MBPP rows that this test reads are not beside the repository")
    rows = list(load_tasks(f"mbpp:{file}"))
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    reward = get_reward("code_exec")
    gold = [[{"role": "assistant", "content": f"Here:\n```python\n{row['answer']}\n```"}] for row in rows]
    assert reward(completions=gold, **columns) == [1.0] * len(rows)
    empty = [[{"role": "assistant", "content": "```python\nimport sys; sys.exit(0)\n```"}]] * len(rows)
    assert reward(completions=empty, **columns) == [0.0] * len(rows)


OLD_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def test_fences_are_read_as_the_pattern_that_says_what_they_are() -> None:
    drawn = random.Random(5)
    pieces = [
        "```",
        "```python",
        "\n",
        "\n",
        " ",
        "x = 1",
        "`",
        "py",
        "\t",
        "```text more",
        "\r",
        "+-",
        "```\n",
        "\u2028",
    ]
    for _ in range(20_000):
        text = "".join(drawn.choice(pieces) for _ in range(drawn.randrange(14)))
        fenced = [body for word, body in OLD_FENCE.findall(text) if word.lower() in ("python", "py", "python3", "")]
        program, spaces = program_of(text), re.compile(r"(?m)^[ \t]+")
        if fenced:
            assert program is not None and spaces.sub("", program) == spaces.sub("", fenced[-1]), repr(text)
        elif "```" in text:  # at most one that is never closed
            assert program is None or spaces.sub("", program).rstrip() in spaces.sub("", text), repr(text)


RIGHT = "def apply(f, x):\n    return f(x)"


def score(allow: list[Any] | None, **columns: Any) -> tuple[list[Score], dict[str, float]]:
    programs = [RIGHT, "def apply(f, x): return 0", "def twice(x): return 2 * x"]
    metrics: dict[str, float] = {}
    given = {} if allow is None else {"allow_forgeable": allow}
    scores = get_reward("code_exec")(
        completions=[[{"role": "assistant", "content": f"```python\n{program}\n```"}] for program in programs],
        tests=[["assert apply(lambda x: x, 3) == 3"]] * 2 + [["assert twice(2) == 4"]],
        log_metric=metrics.__setitem__,
        **given,
    )
    return scores, metrics


def test_the_reward_pays_for_forgeable_tests_only_where_the_row_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scores, metrics = score(None)
    assert scores == [0.0, 0.0, 1.0]
    assert metrics == {
        "code_exec/forgeable": 2 / 3,
        "code_exec/worker_lost": 0.0,
        "code_exec/compared": 0.0,
        "code_exec/refused": 0.0,
    }
    assert score([None, False, True])[0] == [0.0, 0.0, 1.0]
    scores, metrics = score([True, True, None])
    assert scores == [1.0, 0.0, 1.0]
    assert metrics["code_exec/forgeable"] == 2 / 3, "counted all the same"
    with pytest.raises(RewardError, match=r"allow_forgeable .*row 1 .*'yes'"):
        score([None, "yes", None])


KILLS_GRADER = f"import time\ntime.sleep(0.3)  # until the kernel has counted another\n{KILLS_ITSELF}"


@pytest.fixture
def short_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that counts another kill all the time, so that who kills itself takes its worker down; a reward that starts anew."""
    file = tmp_path / "vmstat"
    file.write_text("oom_kill 000000001\n")
    done = threading.Event()

    def count() -> None:
        kills = 1
        with file.open("r+b", buffering=0) as counter:
            while not done.wait(0.01):
                kills += 1
                os.pwrite(counter.fileno(), f"oom_kill {kills:09}\n".encode(), 0)

    shared = import_module("toolgrpo.rewards.code_exec")._SHARED
    monkeypatch.setattr(host_process, "VMSTAT", file)
    monkeypatch.setattr(shared, "_sandbox", None)
    thread = threading.Thread(target=count)
    thread.start()
    yield
    done.set()
    thread.join()
    if shared._sandbox is not None:
        shared._sandbox.close()


def hosts() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "confined_python.host.host" in " ".join(child.cmdline())
    ]


def test_a_program_that_kills_its_grader_scores_nothing_and_ends_nothing(short_of_memory: None) -> None:
    with Sandbox(workers=1) as sandbox, pytest.raises(WorkerLostError):
        grade(sandbox, KILLS_GRADER, Suite(("assert twice(2) == 4",)))
    before = hosts()
    programs = [
        KILLS_GRADER,
        "def twice(x): return 2 * x",
        f"def twice(x):\n    exec({KILLS_GRADER!r})",
        "def twice(x): return x",
    ]
    metrics: dict[str, float] = {}
    scores = get_reward("code_exec")(
        completions=[[{"role": "assistant", "content": f"```python\n{program}\n```"}] for program in programs],
        tests=[["assert twice(2) == 4"]] * 4,
        log_metric=metrics.__setitem__,
    )
    assert scores == [0.0, 1.0, 0.0, 0.0]
    assert metrics["code_exec/worker_lost"] == 0.5
    assert len(hosts()) == len(before) + 1, "a sandbox that was given up is closed"


def test_where_nothing_runs_it_is_no_score(short_of_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SandboxError):
        get_reward("code_exec")(
            completions=[[{"role": "assistant", "content": "```python\nx = 1\n```"}]], tests=[["assert twice(2) == 4"]]
        )


def test_code_exec_scores_no_program_that_the_kernel_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(_SHARED, "_sandbox", None)
    counter = Counter(tmp_path / "vmstat")
    scores: list[Score] = []

    def score(head: str) -> None:
        program = f"```python\n{head}def twice(x):\n    return 2 * x\n```"
        completion = [{"role": "assistant", "content": program}]
        scores.extend(get_reward("code_exec")(completions=[completion], tests=[["assert twice(2) == 4"]]))

    score("")  # starts the sandbox
    first = _SHARED._sandbox
    assert first is not None
    killed_while_it_runs(counter, first, score)
    assert set(scores) == {1.0}
    assert _SHARED._sandbox is not first, "scored by a second sandbox"
    first.close()
    _SHARED.use(Sandbox.close)

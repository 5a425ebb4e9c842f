"""Grading: honest solutions pass, and no program that does not solve its task scores anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.errors import DataError, RewardError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.code_exec import program_of
from toolgrpo.sandbox import Sandbox
from toolgrpo.sandbox.grading import Suite, grade

ADD = Suite(tests=("assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert not add(0, 0)"))
CHECK = Suite(
    tests=(
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate([1, 2], k=1) == [2], 'msg'\n"
        "    assert abs(candidate([0.5], k=0)[0] - 0.5) < 1e-6\n",
    ),
    entry_point="tail",
)
LOOP = Suite(
    tests=(
        "def check(candidate):\n    import random\n    for _ in range(5):\n        n = random.randint(1, 9)\n"
        "        assert candidate(n) == n * n\n    try:\n        candidate('x')\n        assert False\n"
        "    except Exception:\n        pass\n",
    ),
    entry_point="square",
)
NODES = Suite(
    tests=("assert depth(root) == 2",),
    setup="root = Node(1)\nroot.left = Node(2)",
)
TREE = """
class Node:
    def __init__(self, value):
        self.value, self.left, self.right = value, None, None
def depth(node):
    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
"""


@pytest.mark.parametrize(
    ("program", "suite"),
    [
        ("def add(a, b):\n    return a + b", ADD),
        ("import numpy\ndef add(a, b):\n    return numpy.int64(a + b)", ADD),
        ("def add(a, b):\n    print('noise')\n    return a + b\nif __name__ == '__main__':\n    add(1, 1)", ADD),
        ("def tail(items, k):\n    return items[k:]", CHECK),
        ("def square(n):\n    return n ** 2", LOOP),
        (TREE, NODES),
        ("def f(x):\n    return float('nan') if x else float('inf')", Suite(("assert f(1) != f(1)", "assert f(0) > 1e300"))),
        ("def f(g):\n    return g(3)", Suite(("assert f(lambda x: x + 1) == 4",))),
        ("def enc(s):\n    return s[::-1]\ndef dec(s):\n    return s[::-1]", Suite(("assert dec(enc('abc')) == 'abc'",))),
    ],
)  # fmt: skip
def test_an_honest_solution_passes(strongest: Sandbox, program: str, suite: Suite) -> None:
    result = grade(strongest, program, suite)
    assert result.all_passed, result


def test_what_forgeable_means(strongest: Sandbox) -> None:
    """Stated so that the docs stay true: a compared value is safe there too, a bare expression is not."""
    liar = "class L(int):\n    def __eq__(self, o): return True\ndef apply(f, x): return L(7)"
    compared = grade(strongest, liar, Suite(("assert apply(lambda x: x, 3) == 3",)))
    assert compared.forgeable and not compared.all_passed
    bare = grade(strongest, liar, Suite(("assert apply(lambda x: x, 3) in (3,)",)))
    assert bare.forgeable and bare.all_passed
    for test in ("assert depth(root) == 2", "assert depth(root) in (2,)"):
        liar_of_nodes = f"class Node:\n    def __init__(self, v): pass\n{liar}\ndef depth(n): return L(7)"
        graded = grade(strongest, liar_of_nodes, Suite((test,), setup=NODES.setup))
        assert not graded.forgeable and not graded.all_passed


def test_bad_tests_are_an_error_of_the_data(strongest: Sandbox) -> None:
    with pytest.raises(DataError, match="no Python"):
        grade(strongest, "x = 1", Suite(("assert (",)))
    with pytest.raises(DataError, match="no_such_library"):
        grade(strongest, "x = int", Suite(("assert x() == 0",), setup="import no_such_library"))
    with pytest.raises(DataError, match="at least one test"):
        Suite(())


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

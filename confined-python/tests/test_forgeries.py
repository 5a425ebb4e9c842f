"""Programs that do not solve their task and try to pass: none scores, on any rung, and every reference solution does.

The tasks in problems.jsonl are our own, in HumanEval's format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from confined_python import Sandbox
from confined_python.grading import Suite, grade

ADD = Suite(tests=("assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert not add(0, 0)"))
LIAR = """
class Liar(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return hash(5)
    def __bool__(self): return False
    def __sub__(self, other): return 0
    def __repr__(self): return '5'
"""
FORGERIES = {
    "nothing": "",
    "sys.exit": "import sys; sys.exit(0)",
    "sys.exit in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "os._exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "atexit": "import atexit, os; atexit.register(lambda: os._exit(0))\ndef add(a, b): return 7",
    "raise SystemExit in a thread": "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "lying int": LIAR + "def add(a, b): return Liar(7)",
    "lying __class__": LIAR.replace("(int)", "")
    + "Liar.__class__ = property(lambda self: int)\ndef add(a, b): return Liar()",
    "lying list": "class L(list):\n    def __eq__(self, o): return True\ndef add(a, b): return L([1])",
    "lying str": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef add(a, b): return S('x')",
    "mock": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "lying metaclass": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\n"
    "class add(metaclass=M):\n    def __init__(self, a, b): pass",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
    "        for d in (f.f_locals, f.f_globals):\n            for k in list(d):\n"
    "                if k in ('answers', 'expressions', 'status', 'outcome', 'verdicts'):\n                    d[k] = True\n"
    "        f = f.f_back\n    return True",
    "sentinels in the caller": "import sys\ndef add(a, b): return [c for c in sys._getframe(1).f_code.co_consts]",
    "print": "import builtins\nbuiltins.print = lambda *a, **k: None\ndef add(a, b): return 7",
    "stdout": "import sys\nprint('PASSED ok 3 passed')\nsys.stdout = None\nsys.stderr = None\ndef add(a, b): return 7",
    "builtins": "import builtins\nfor n in ('eval', 'exec', 'isinstance', 'abs', 'len', 'all', 'type'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef add(a, b): return 7",
    "AssertionError": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef add(a, b): return 7",
    "the encoder": "import confined_python.inside.cells as c, confined_python.literals as l\n"
    "c.encode = l.encode = lambda v, depth=0: True\nc.evaluate_all = lambda e, n: {'status': 'ok', 'exit_code': 0, "
    "'answers': [{'value': True} for _ in e]}\ndef add(a, b): return 7",
    "the judge": "import confined_python.inside.judge as j\nj.judge = lambda *a: [['pass']] * 3\nj._verdict = lambda *a: ['pass']\n"
    "def add(a, b): return 7",
    "the result pipe": "import os, struct\nbody = b'{\"status\":\"ok\",\"exit_code\":0,\"answers\":"
    "[{\"value\":true},{\"value\":true},{\"value\":true}]}'\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, struct.pack('!I', len(body)) + body)\n    except OSError:\n        pass\ndef add(a, b): return 7",
    "answers ahead of time": "import os, struct\nfor body in (b'{\"answer\":\"true\"}', b'{\"verdicts\":[[\"pass\"],[\"pass\"],[\"pass\"]]}', "
    "b'{\"need\":[\"add\",\"[]\"]}'):\n    for _ in range(9): os.write(4, struct.pack('!I', len(body)) + body)\ndef add(a, b): return 7",
    "answers from a thread": "import json, os, struct, threading\ndef answer():\n    while True:\n        head = os.read(3, 4)\n"
    "        os.read(3, 4096)\n        body = b'{\"answer\":\"true\"}'\n        os.write(4, struct.pack('!I', len(body)) + body)\n"
    "for _ in range(3): threading.Thread(target=answer, daemon=True).start()\ndef add(a, b): return 7",
    "a trace": "import sys\ndef trace(frame, event, arg):\n    for name in list(frame.f_locals): frame.f_locals[name] = 5\n    return trace\n"
    "sys.settrace(trace)\nsys.setprofile(trace)\ndef add(a, b): return 7",
    "a frame that never ends": "import os\nos.write(4, b'\\xff\\xff\\xff\\x00')\ndef add(a, b): return 7",
    "overridden afterwards": "def add(a, b): return 7\nimport threading, time\ndef later():\n    time.sleep(0.01)\n"
    "    global add\n    add = lambda a, b: True\nthreading.Thread(target=later, daemon=True).start()",
    "a constant": "def add(a, b): return 5",
    "a generator": "def add(a, b): yield 5",
    "the files of the tests": "import glob\ndef add(a, b): return open(glob.glob('/**/test_forgeries.py')[0]).read()",
    "deep nesting": "def add(a, b):\n    x = 5\n    for _ in range(99): x = [x]\n    return x",
    "a syntax error": "def add(a, b) return a + b",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_scores_nothing(sandbox: Sandbox, name: str) -> None:
    result = grade(sandbox, FORGERIES[name], ADD, timeout=1.0)
    assert not result.all_passed, result
    assert not result.forgeable, "the solution must not choose how it is graded"


PROBLEMS = [json.loads(line) for line in Path(__file__).with_name("problems.jsonl").read_text().splitlines()]
FOR_ANY_PROBLEM = {  # {name} is the function that is asked for
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "sys.exit in the call": "import sys\ndef {name}(*args, **kwargs): sys.exit(0)",
    "os._exit in the call": "import os\ndef {name}(*args, **kwargs): os._exit(0)",
    "a value that equals everything": "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    "    def __hash__(self): return 0\n    def __bool__(self): return True\n    def __sub__(self, other): return 0\n"
    "def {name}(*args, **kwargs): return Any()",
    "a list that equals everything": "class Any(list):\n    def __eq__(self, other): return True\ndef {name}(*args, **kwargs): return Any()",
    "a check of its own": "def check(candidate): pass\ndef {name}(*args, **kwargs): return None",
    "assertions that hold": "import builtins\nclass AssertionError(BaseException): pass\nbuiltins.AssertionError = AssertionError\n"
    "builtins.abs = builtins.all = builtins.len = lambda *a: 0\ndef {name}(*args, **kwargs): return None",
    "the frames of its caller": "import sys\ndef {name}(*args, **kwargs):\n    frame, found = sys._getframe(1), []\n    while frame:\n"
    "        found += [c for c in frame.f_code.co_consts if c is not None]\n        frame = frame.f_back\n    return found[-1]",
    "words of success": "print('1 passed')\nprint('ok')\ndef {name}(*args, **kwargs): return 'passed'",
}  # fmt: skip


def suite_of(problem: dict[str, Any]) -> Suite:
    return Suite(tests=(problem["test"],), entry_point=problem["entry_point"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem["task_id"]))
def test_the_reference_solution_passes_and_no_forgery(sandbox: Sandbox, problem: dict[str, Any]) -> None:
    reference = grade(sandbox, problem["prompt"] + problem["canonical_solution"], suite_of(problem))
    assert reference.all_passed and not reference.forgeable, reference
    for name, template in FOR_ANY_PROBLEM.items():
        forged = grade(sandbox, template.replace("{name}", problem["entry_point"]), suite_of(problem), timeout=2.0)
        assert not forged.all_passed and not forged.forgeable, (name, forged)

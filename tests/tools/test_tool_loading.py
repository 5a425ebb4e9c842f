"""Loading plugins: what works, and errors in the users' words, each naming the file and what to do."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import PluginError
from toolgrpo.tools import load_tools, run_tool, tool
from toolgrpo.tools.open_toolbox import slow_import
from toolgrpo.tools.plugin.plugin_file import PluginSource, load_functions, load_plugin, tools_of
from toolgrpo.tools.plugin.tool_source import environment_source, source_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tools"

GOOD = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return a + b
'''


def write(folder: Path, text: str, name: str = "my_tools.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(path: Path) -> list[str]:
    return [tool.spec.name for tool in load_functions(PluginSource(path=str(path)))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD, ("No TOOL_FUNCTIONS found in", "TOOL_FUNCTIONS = [")),
        (GOOD + "TOOL_FUNCTIONS = add", ("must be a list of functions, got a function",)),
        (GOOD + "TOOL_FUNCTIONS = []", ("is empty",)),
        (GOOD + "TOOL_FUNCTIONS = [add, 'add']", ("TOOL_FUNCTIONS[1]", "'add' (a str)")),
        (GOOD + "TOOL_FUNCTIONS = [add, add]", ("Two tools are named 'add'", "my_tools.py:2", "Rename one")),
        (GOOD + "TOOL_FUNCTIONS = [lambda x: x]", ("'<lambda>' cannot be called",)),
        ("def f(a): 'F.'\nTOOL_FUNCTIONS = [f]", ("my_tools.py:1: tool 'f'", "parameter 'a' has no annotation")),
        ("def f(a: int): ...\nTOOL_FUNCTIONS = [f]", ("my_tools.py:1: tool 'f'", "no docstring")),
        ("class A: 'A.'\nTOOL_FUNCTIONS = [A]", ("tool 'A': it is a class", "ENVIRONMENT = A")),
        ("class A:\n def f(self): 'F.'\nTOOL_FUNCTIONS = [A.f]", ("my_tools.py:2: A.f is a method", "[MyTools().f]")),
        ("def f(*args): 'F.'\nTOOL_FUNCTIONS = [f]", ("'*args' has no fixed form", "functools.wraps", "`forward`")),
        ("async def f(): 'F.'; yield 1\nTOOL_FUNCTIONS = [f]", ("my_tools.py:1: tool 'f'", "async generator")),
        ("from .maths import add", ("cannot be imported", "There is no maths.py beside the file")),
        *(
            (f"{future}{GOOD.replace('a: int', f'a: {name}')}\nTOOL_FUNCTIONS = [add]", (line,))
            for future in ("", "from __future__ import annotations\n")
            for name, line in (
                *(
                    ("List[int]", "from typing import List"),
                    ("Any", "from typing import Any"),
                    ("Missing", "'Missing'"),
                ),
                *(("np.ndarray", "import numpy as np"), ("decimal.Decimal", "import decimal")),
            )
        ),
        ("def broken(:", ("cannot be imported", "SyntaxError")),
        ("raise SystemExit(3)", ("cannot be imported", "SystemExit: 3")),
        ("1 / 0", ("cannot be imported", "line 1", "1 / 0", "ZeroDivisionError")),
    ],
)
def test_errors_name_the_file_and_what_to_do(tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    with pytest.raises(PluginError) as caught:
        load(write(tmp_path, text))
    said = str(caught.value)
    assert all(part in said for part in ("my_tools.py", *says)) and "importlib" not in said, said
    assert "Traceback" not in said or not isinstance(caught.value.__cause__, NameError)


def test_a_file_or_a_module_that_does_not_exist_or_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="No such file"):
        load(tmp_path / "nothing.py")
    with pytest.raises(PluginError, match=r"must end with \.py"):
        load(write(tmp_path, "x", "tools.txt"))
    with pytest.raises(PluginError, match="'no_such_module_anywhere'"):
        load_functions(PluginSource(module="no_such_module_anywhere"))


def test_two_files_of_one_name_and_imports_beside_them() -> None:
    first = load_functions(PluginSource(path=str(FIXTURES / "first" / "same_name_tools.py")))
    second = load_functions(PluginSource(path=str(FIXTURES / "second" / "same_name_tools.py")))
    assert (first[0].function(), second[0].function()) == ("first", "second")


def test_the_decorator_says_more() -> None:
    def finish() -> str:
        """End."""
        return ""

    async def free(**arguments: object) -> object:
        """Take what the schema says."""
        return arguments

    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    decorated = [
        tool(name="stop", ends_episode=True, timeout=3, cache=False, isolate=True)(finish),
        tool(schema=schema)(free),
    ]
    stop, free_spec = (one.spec for one in tools_of(decorated, "here"))
    assert (stop.name, stop.ends_episode, stop.timeout_s, stop.cache, stop.isolate) == ("stop", True, 3, False, True)
    assert free_spec.is_async and free_spec.parameters == schema
    whole: Any = tool(isolate=True)(finish)
    assert tools_of([functools.partial(whole)], "here")[0].spec.isolate, "what its function asked for"
    assert type(stop)(**json.loads(json.dumps(asdict(stop)))) == stop


WRAPPED = '''
import functools

def timed(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

@timed
async def later(q: str) -> str:
    """Look up, later."""
    return f"{q} later"

class Index(dict):
    pass

def find(index: Index, limit: int, q: str) -> str:
    """Find it."""
    return f"{index[q]} of {limit}"

async def wait(seconds: float, q: str) -> str:
    """Wait."""
    return f"{q} after {seconds}"

def lines(q: str) -> list:
    """Lines."""
    yield q
    yield q

TOOL_FUNCTIONS = [later, functools.partial(find, Index(x="it"), limit=3), functools.partial(wait, 0.1), lines]
'''


@pytest.mark.parametrize("here", [False, True])
def test_decorated_coroutines_and_partials_are_tools(tmp_path: Path, here: bool) -> None:
    text = WRAPPED + ("from toolgrpo.tools import tool\n" if here else "")
    marked = "TOOL_FUNCTIONS = [tool(in_process=True)(one) for one in TOOL_FUNCTIONS]\n" if here else ""
    with load_tools(write(tmp_path, text + marked), workers=1) as box:
        assert box.names == ["later", "find", "wait", "lines"]
        assert [list(one["function"]["parameters"]["properties"]) for one in box.schemas[:2]] == [["q"], ["q"]]
        said = [run_tool(box, {"name": name, "arguments": {"q": "x"}}).content for name in box.names]
    assert said == ["x later", "it of 3", "x after 0.1", '["x", "x"]']


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1}, {"in_process": True, "isolate": True}])
def test_impossible_options_are_refused_where_they_are_written(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError):
        tool(**options)


def test_sources_of_what_a_user_gives(tmp_path: Path) -> None:
    assert source_of("tools.py") == PluginSource(path="tools.py")
    assert source_of(Path("a/b.py")) == PluginSource(path="a/b.py")
    assert source_of("package.tools") == PluginSource(module="package.tools")
    assert source_of(json) == PluginSource(module="json")
    assert source_of([len]).callables is not None
    assert environment_source("a/b.py:Maze") == PluginSource(path="a/b.py", attribute="Maze")
    assert environment_source("pkg.mod:Maze") == PluginSource(module="pkg.mod", attribute="Maze")
    assert environment_source("a/b.py") == PluginSource(path="a/b.py")
    with pytest.raises(PluginError, match=r"tools\[1\] is not callable"):
        source_of([len, 3])  # type: ignore[list-item]
    with pytest.raises(PluginError, match="got a int"):
        source_of(3)  # type: ignore[arg-type]  # the point of the case
    lock = threading.Lock()
    with pytest.raises(PluginError, match="in_process"):  # it cannot travel
        source_of([lambda: str(lock)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class E:\n    def go(self) -> str:\n        '''Go.'''", "has no reset method"),
        ("class E:\n    def reset(self, **row): ...", "no public methods besides reset"),
        ("class E:\n    def reset(self): ...\n    def go(self, a): '''Go.'''", "parameter 'a' has no annotation"),
        (
            "import functools\nclass E:\n    def reset(self): ...\n    @functools.cache\n    def go(self): ...",
            "go is a _lru_cache_wrapper, and only plain",
        ),
        (
            "class E:\n    def reset(self): ...\n    @property\n    def reward(self): ...",
            "reward is a property, and only",
        ),
        ("E = 3", "must be a class, got a int"),
        ("", "No E found in"),
    ],
)
def test_environment_errors(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PluginError, match=r"my_tools\.py") as caught:
        load_plugin(None, PluginSource(path=str(write(tmp_path, text)), attribute="E"))
    assert says in str(caught.value)


TRAINING_SCRIPT = '''
import time
import torch  # as a script that trains does; the tools need nothing of it

FACTOR = 3
HELD = torch.zeros(1)

def triple(n: int) -> int:
    """Triple a number."""
    return FACTOR * n

def which_modules() -> list[str]:
    """List what the worker imported."""
    import sys

    return sorted({"torch", "a_training_script"} & set(sys.modules))
'''


def test_functions_leave_their_training_script_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_training_script.py").write_text(TRAINING_SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module("a_training_script")
    try:
        with load_tools([script.triple, script.which_modules], workers=1) as box:
            assert run_tool(box, {"name": "triple", "arguments": {"n": 4}}).content == "12"
            assert run_tool(box, {"name": "which_modules"}).content == "[]"
    finally:
        sys.modules.pop("a_training_script")


def test_an_import_that_takes_long_is_told_with_its_seconds_and_the_cure() -> None:
    said = slow_import("tools.py", 32.4, ("trl", "torch"))
    assert said is not None and "32 s to import tools.py (it imports torch, trl)" in said
    assert slow_import("tools.py", 1.0, ("torch",)) is None


def test_a_package_that_a_plugin_lacks_is_named_with_its_line_and_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as error:
        load_tools(write(tmp_path, "import json\nimport no_such_package\n" + GOOD))
    assert f'File "{tmp_path / "my_tools.py"}", line 2' in str(error.value) and sys.executable in str(error.value)


def test_a_package_in_the_working_folder_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mypkg").mkdir()
    write(tmp_path / "mypkg", f"{GOOD}TOOL_FUNCTIONS = [add]\n", "__init__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with load_tools("mypkg", workers=1) as box:
        assert run_tool(box, {"name": "add", "arguments": {"a": 3, "b": 1}}).content == "4"

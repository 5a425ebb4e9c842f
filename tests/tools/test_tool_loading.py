"""Loading plugins: what works, and errors in the users' words, each naming the file and what to do."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import PluginError
from toolgrpo.tools import load_tools, run_tool
from toolgrpo.tools.open_toolbox import slow_import
from toolgrpo.tools.plugin.plugin_file import PluginSource, load_functions, load_plugin
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
    path.write_text(textwrap.dedent(text))
    return path


def load(path: Path) -> list[str]:
    return [tool.spec.name for tool in load_functions(PluginSource(path=str(path)))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD, ("No TOOL_FUNCTIONS found in", "my_tools.py", "TOOL_FUNCTIONS = [")),
        (GOOD + "TOOL_FUNCTIONS = add", ("must be a list of functions, got a function", "my_tools.py")),
        (GOOD + "TOOL_FUNCTIONS = []", ("is empty", "my_tools.py")),
        (
            GOOD + "TOOL_FUNCTIONS = [add, 'add']",
            ("TOOL_FUNCTIONS[1]", "not callable", "'add' (a str)", "without quotes"),
        ),
        (GOOD + "TOOL_FUNCTIONS = [add, add]", ("Two tools are named 'add'", "my_tools.py:2", "Rename one")),
        (GOOD + "TOOL_FUNCTIONS = [lambda x: x]", ("'<lambda>' cannot be called", "my_tools.py")),
        (
            "def f(a):\n    '''F.\n\n    Args:\n        a: A.\n    '''\nTOOL_FUNCTIONS = [f]",
            ("my_tools.py:1: tool 'f'", "parameter 'a' has no annotation", "`a: int`"),
        ),
        ("def f(a: int): ...\nTOOL_FUNCTIONS = [f]", ("my_tools.py:1: tool 'f'", "no docstring")),
        ("import no_such_module_here", ("cannot be imported", "my_tools.py", "line 1", "ModuleNotFoundError")),
        ("from .maths import add", ("cannot be imported", "There is no maths.py beside the file")),
        *(
            (f"{future}{GOOD.replace('a: int', f'a: {name}')}\nTOOL_FUNCTIONS = [add]", ("my_tools.py", line))
            for future in ("", "from __future__ import annotations\n")
            for name, line in (
                *(
                    (f"{name}[int]", f"add this line at its top: from typing import {name}")
                    for name in ("List", "Optional")
                ),
                *((name, f"add this line at its top: from typing import {name}") for name in ("Any", "Dict")),
                ("np.ndarray", "add this line at its top: import numpy as np"),
                ("decimal.Decimal", "add this line at its top: import decimal"),
                ("Missing", "'Missing'"),
            )
        ),
        ("def broken(:", ("cannot be imported", "SyntaxError", "my_tools.py")),
        ("raise SystemExit(3)", ("cannot be imported", "SystemExit: 3")),
        ("1 / 0", ("cannot be imported", "line 1", "1 / 0", "ZeroDivisionError")),
    ],
)
def test_errors_name_the_file_and_what_to_do(tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    path = tmp_path / "my_tools.py"
    path.write_text(text)
    with pytest.raises(PluginError) as caught:
        load(path)
    for part in says:
        assert part in str(caught.value)
    if isinstance(caught.value.__cause__, NameError):
        assert "Traceback" not in str(caught.value)
    assert "importlib" not in str(caught.value) and "toolgrpo/tools/loading" not in str(caught.value)


def test_a_path_that_does_not_exist_or_is_no_python_file(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="No such file"):
        load(tmp_path / "nothing.py")
    with pytest.raises(PluginError, match=r"must end with \.py"):
        load(write(tmp_path, "x", "tools.txt"))


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(PluginError, match="'no_such_module_anywhere'"):
        load_functions(PluginSource(module="no_such_module_anywhere"))


def test_two_files_of_one_name_and_imports_beside_them() -> None:
    first = load_functions(PluginSource(path=str(FIXTURES / "first" / "same_name_tools.py")))
    second = load_functions(PluginSource(path=str(FIXTURES / "second" / "same_name_tools.py")))
    assert (first[0].function(), second[0].function()) == ("first", "second")


def test_the_decorator_says_more(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        from toolgrpo.tools import tool

        @tool(name="stop", ends_episode=True, timeout=3, cache=False, isolate=True)
        def finish() -> str:
            '''End.'''
            return ""

        @tool(schema={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
        async def free(**arguments):
            '''Take what the schema says.'''
            return arguments

        TOOL_FUNCTIONS = [finish, free]
        """,
    )
    stop, free = (tool.spec for tool in load_functions(PluginSource(path=str(path))))
    assert (stop.name, stop.ends_episode, stop.timeout_s, stop.cache, stop.isolate) == ("stop", True, 3, False, True)
    assert free.is_async and free.parameters["required"] == ["x"]
    assert type(stop)(**json.loads(json.dumps(asdict(stop)))) == stop


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1}, {"in_process": True, "isolate": True}])
def test_impossible_options_are_refused_where_they_are_written(options: dict[str, Any]) -> None:
    from toolgrpo.tools import tool

    with pytest.raises(PluginError):
        tool(**options)


def test_sources_of_what_a_user_gives(tmp_path: Path) -> None:
    import json as a_module

    assert source_of("tools.py") == PluginSource(path="tools.py")
    assert source_of(Path("a/b.py")) == PluginSource(path="a/b.py")
    assert source_of("package.tools") == PluginSource(module="package.tools")
    assert source_of(a_module) == PluginSource(module="json")
    assert source_of([len]).callables is not None
    assert environment_source("a/b.py:Maze") == PluginSource(path="a/b.py", attribute="Maze")
    assert environment_source("pkg.mod:Maze") == PluginSource(module="pkg.mod", attribute="Maze")
    assert environment_source("a/b.py") == PluginSource(path="a/b.py")
    with pytest.raises(PluginError, match=r"tools\[1\] is not callable"):
        source_of([len, 3])  # type: ignore[list-item]
    with pytest.raises(PluginError, match="got a int"):
        source_of(3)  # type: ignore[arg-type]  # the point of the case


def test_what_cannot_travel_is_refused_with_a_way_out() -> None:
    import threading

    lock = threading.Lock()

    def held() -> str:
        """Hold a lock."""
        return str(lock)

    with pytest.raises(PluginError, match="in_process"):
        source_of([held])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class E:\n    def go(self) -> str:\n        '''Go.'''", "has no reset method"),
        ("class E:\n    def reset(self, **row): ...", "no public methods besides reset"),
        ("class E:\n    def reset(self): ...\n    def go(self, a): '''Go.'''", "parameter 'a' has no annotation"),
        ("E = 3", "must be a class, got a int"),
        ("", "No E found in"),
    ],
)
def test_environment_errors(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text, "my_environment.py")
    with pytest.raises(PluginError) as caught:
        load_plugin(None, PluginSource(path=str(path), attribute="E"))
    assert says in str(caught.value)
    assert "my_environment.py" in str(caught.value)


TRAINING_SCRIPT = '''
import time
import torch  # as a script that trains does; the tools need nothing of it

FACTOR = 3
HELD = torch.zeros(1)

def triple(n: int) -> int:
    """Triple a number.

    Args:
        n: The number.
    """
    return FACTOR * n

def which_modules() -> list[str]:
    """List what the worker imported."""
    import sys

    return sorted({"torch", "a_training_script"} & set(sys.modules))
'''


def test_functions_of_a_training_script_do_not_bring_it_into_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert said is not None and said.startswith("the tool workers took 32 s to import tools.py (it imports torch, trl)")
    assert slow_import("tools.py", 1.0, ("torch",)) is None


def test_a_package_that_a_plugin_lacks_is_named_with_its_line_and_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as error:
        load_tools(write(tmp_path, "import json\nimport no_such_package\n" + GOOD))
    said = str(error.value)
    assert f'File "{tmp_path / "my_tools.py"}", line 2' in said
    assert f"no_such_package is a package, it belongs into the environment that this runs in: {sys.executable}" in said


def test_a_package_in_the_working_folder_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text(
        "def f(a: int) -> int:\n    'F.'\n    return a\n\nTOOL_FUNCTIONS = [f]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with load_tools("mypkg", workers=1) as box:
        assert run_tool(box, {"name": "f", "arguments": {"a": 3}}).content == "3"

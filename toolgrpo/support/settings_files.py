"""YAML and JSON files of settings: configs, mixtures, launch files, MCP servers, the head of a model card.

Safe YAML with its traps taken out: only true and false are booleans, `1e-5` is a number, a key stands once in its
mapping, in JSON too. Whatever stands in a file, it is read within a second and in little memory, or is a
`BadSettings`: the bytes, the brackets that are open at once, and the values that aliases and merge keys stand for are
bounded before any value is made.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_MOST_BYTES = 256 << 10  # a parser written in Python takes 10 s for a MiB
_MOST_VALUES = 10_000  # with those that aliases repeat
_MOST_OPEN = 200  # brackets; the parser takes seconds to find out by itself
_MOST_DIGITS = 40  # of an integer, written in any base
_SHOWN = 100  # characters of a line, around what is wrong in it
_TOO_MANY = f"with its aliases the file has more than {_MOST_VALUES:,} values; settings need no more. Is it data?"
_BRACKET = re.compile(r"[\[\]{}]")


class BadSettings(ValueError):
    """A file cannot be read as settings; the message says why, after its name."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; raise OSError or BadSettings."""
    return parse_yaml(_text_of(path, "YAML"))


def read_yaml_with_lines(path: Path) -> tuple[Any, dict[tuple[str, str], int]]:
    """Return the content of a YAML file, and the line of each key by its heading ("": none)."""
    return _parsed(_text_of(path, "YAML"))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise OSError or BadSettings."""
    try:
        return json.loads(_text_of(path, "JSON"), object_pairs_hook=unrepeated)
    except BadSettings:
        raise
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise BadSettings(f"is not valid JSON: {why}") from error


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for a key that stands there twice: Python would take the last, in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def _text_of(path: Path, kind: str) -> str:
    with path.open("rb") as file:  # its size would not tell: /dev/zero has none
        read = file.read(_MOST_BYTES + 1)
    if len(read) > _MOST_BYTES:
        raise BadSettings(f"has more than {_MOST_BYTES:,} bytes, and settings need no more. Is it data?")
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSettings(f"is not text (byte {error.start} is no UTF-8); give a {kind} file") from error


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text; raise BadSettings."""
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[Any, dict[tuple[str, str], int]]:
    try:
        _check_brackets(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _check_size(node)
        lines = _lines_of_keys(node)
        return loader.construct_document(node), lines
    except RecursionError:
        raise BadSettings("is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date in a 13th month
        raise BadSettings(f"is not valid YAML: {_where(error, text)}") from error


def _lines_of_keys(root: yaml.Node) -> dict[tuple[str, str], int]:
    keys = [("", key, value) for key, value in root.value] if isinstance(root, yaml.MappingNode) else []
    keys += [(head.value, *pair) for _, head, of in keys if isinstance(of, yaml.MappingNode) for pair in of.value]
    return {(str(heading), str(key.value)): key.start_mark.line + 1 for heading, key, _ in keys}


def _check_brackets(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        if depth > _MOST_OPEN:
            raise RecursionError


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that stand for too many values, or for themselves; each value is looked at once."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node), 0)
        if known is None:
            raise _error("an alias refers to itself", node)
        if known:
            return known
        sizes[id(node)] = None  # begun
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        whole = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(map(size, inner)))
        if whole > _MOST_VALUES:
            raise _error(_TOO_MANY, node)
        sizes[id(node)] = whole
        return whole

    size(root)


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _where(error: Exception, text: str) -> str:
    """Return what is wrong with a YAML text, and the line in which."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, lines = error.problem_mark, [*text.splitlines(), ""]
    left_out = max(0, mark.column - _SHOWN // 2)
    line = lines[min(mark.line, len(lines) - 1)][left_out : left_out + _SHOWN]
    return f"line {mark.line + 1}: {error.problem:.200}\n    {line}\n    {' ' * (mark.column - left_out)}^"


class _Loader(yaml.SafeLoader):
    _n_values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._n_values += 1
        if self._n_values > _MOST_VALUES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # of PyYAML's stubs
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is not None and (key.tag, name) in seen:
                raise _error(f"the key {name!r} appears twice", key)
            seen.add((key.tag, name))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _MOST_DIGITS:
            raise _error("no setting is an integer of so many digits; write it as text, in quotes", node)
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF"))
EXPONENT_IS_NUMBER = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)
_Loader.add_implicit_resolver(*EXPONENT_IS_NUMBER)

"""Settings that a user wrote are read in little time and memory, whatever stands in them, by each reader of the package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.commands.export import _config_of
from toolgrpo.commands.given import read_given
from toolgrpo.commands.main import launched
from toolgrpo.data.load import load_tasks
from toolgrpo.errors import UserError
from toolgrpo.support.settings_files import BadSettings, parse_yaml, read_json, read_yaml
from toolgrpo.tools.mcp.config_file import read_mcp_config


def repeated(first: str, line: str, times: int = 12) -> str:
    """Return lines each of which names the one before nine times."""
    names = (",".join([f"*a{number}"] * 9) for number in range(times))
    return f"a0: &a0 {first}\n" + "".join(f"a{n}: &a{n} {line.format(names)}\n" for n, names in enumerate(names, 1))


HOSTILE = {
    "aliases that multiply": (repeated("[x, y, z]", "[{}]"), "more than 10,000 values"),
    "merge keys that multiply": (repeated("{k: 1, l: 2}", "{{<<: [{}], m: 3}}"), "more than 10,000 values"),
    "keys that multiply": (repeated("[x, y]", "{{? [{}] : 1}}"), "more than 10,000 values"),
    "an alias within itself": ("a: &a {b: [*a]}", "line 1: an alias refers to itself"),
    "many values": ("a: [" + "1," * 100_000 + "]", "more than 10,000 values"),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(20_000)), "more than 10,000 values"),
    "many bytes": ("a: " + "x" * (1 << 20), "Is it data"),
    "open brackets": ("[" * 100_000, "nested too deeply"),
    "dashes": ("- " * 50_000, "nested too deeply"),
    "a decimal": (f"a: {'9' * 5000}", "line 1: .* so many digits"),
    "base 60": ("a: 1" + ":10" * 50_000, "so many digits"),
    "a float of base 60": ("a: 1" + ":10" * 50_000 + ".5", "too large"),
    "a key twice": ("a: 1\nb: {c: 1, d: 2, c: 3}", "line 2: the key 'c' appears twice"),
    "a merge key twice": ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "the key '<<' appears twice"),
    "a key that is a list": ("? [a]\n: 1", "unhashable key"),
    "a date": ("a: 2024-13-01", "month must be in"),
    "an object of Python": ("a: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
    "two documents": ("a: 1\n---\nb: 2", "another document"),
    "NUL": ("a: \0", "special characters are not allowed"),
    "an open quote far along": ("a: " + "x" * 5000 + ": [", "line 1: "),
}


READERS: dict[str, Callable[[Path], Any]] = {
    "config": lambda path: read_given({}, ["--config", str(path)]),
    "mixture": load_tasks,
    "launcher": lambda path: launched(["--accelerate_config", str(path)]),
    "run.yaml": lambda path: _config_of(path.rename(path.parent / "run.yaml").parent),
}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "many bytes"])
def test_hostile_yaml_is_a_sentence(name: str) -> None:
    text, problem = HOSTILE[name]
    with pytest.raises(BadSettings, match=problem) as caught:
        parse_yaml(text)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_yaml_is_bounded(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for name in ("aliases that multiply", "many bytes", "a key twice", "open brackets"):
        text, problem = HOSTILE[name]
        path.write_text(text)
        with pytest.raises(UserError, match=problem) as caught:
            READERS[reader](path)
        assert ".yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"mcpServers": {"a": {"url": "x"}, "a": {"url": "y"}}}', "the key 'a' appears twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b" " * (1 << 20), "Is it data"),
        (b"\xff\xfe", "no UTF-8"),
        (b"{", "is not valid JSON"),
    ],
)
def test_hostile_json_is_a_sentence(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        read_mcp_config(path)


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_a_device_without_an_end_is_read_to_the_bound(read: Callable[[Path], Any]) -> None:
    with pytest.raises(BadSettings, match="Is it data"):
        read(Path("/dev/zero"))


def test_what_yaml_means() -> None:
    text = "base: &base {x: 1, y: 2}\nown: {<<: *base, y: 3}\nagain: [*base, *base]\nword: no\nrate: 1e-5\nyes: true"
    base = {"x": 1, "y": 2}
    told = {"base": base, "own": {"x": 1, "y": 3}, "again": [base, base], "word": "no", "rate": 1e-5, "yes": True}
    assert parse_yaml(text) == told
    assert parse_yaml("") is None and parse_yaml("# a word\n") is None
    assert parse_yaml("1: a\n'1': b") == {1: "a", "1": "b"}

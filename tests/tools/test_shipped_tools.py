"""The other shipped plugin files: arithmetic, calculator, files, the web."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.tools.plugin.plugin_file import PluginSource, load_functions

FOLDER = Path(__file__).parents[2] / "tools_funcs"


def tools_of(name: str) -> dict[str, Any]:
    return {tool.spec.name: tool.function for tool in load_functions(PluginSource(path=str(FOLDER / name)))}


CALCULATOR = tools_of("calculator_tools.py")["calculator"]
FILES = tools_of("file_tools.py")
WEB = tools_of("http_tools.py")


def test_arithmetic() -> None:
    math_tools = tools_of("math_tools.py")
    assert list(tools_of("arithmetic_tools.py")) == list(math_tools)[:4], "the tools of the embedded job"
    assert [math_tools[name](17, 5) for name in ("add", "subtract", "multiply")] == [22, 12, 85]
    assert (math_tools["divide"](17, 5), math_tools["divide"](15, 5)) == ("3 remainder 2", "3")
    with pytest.raises(ValueError, match="b must not be 0"):
        math_tools["divide"](1, 0)
    assert math_tools["calculate_sum"](20, 22) == "Sum: 42"
    assert math_tools["calculate_product"](1.5, 4) == "Product: 6.0"


COMPUTED = {
    **{"(3 + 4) * 2**10 / 7": "1024", "10 / 4": "2.5", "1/3 + 1/6": "0.5", "2**0.5": "1.41421356237", "2^10": "1024"},
    **{"-7 // 2": "-4", "7 % -3": "-2", "2 ** -2": "0.25", "123456789 ** 3": str(123456789**3)},
    **{"sqrt(16) + factorial(5)": "124", "round(2.567, 2)": "2.57", "max(1, 2, 3) - gcd(12, 18)": "-3"},
}


@pytest.mark.parametrize("expression", COMPUTED)
def test_calculator_computes(expression: str) -> None:
    assert CALCULATOR(expression) == COMPUTED[expression]


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "lambda: 1", "[1, 2]", "'a' * 3", "a", "1 if 1 else 2", "True",
        "open('x')", "9**9**9", "9**9**9**9", "factorial(10**9)", "1/0", "1 % 0", "log(0)", "(-8)**(1/3)", "1e308 * 10", "",
        "1 +", "(" * 500, "1" * 2000, "exp(1000)", "factorial(2.5)", "gcd(0.5, 1)", "0 ** -1", "f'{1}'", "1j",
    ],
)  # fmt: skip
def test_calculator_refuses_with_a_sentence(expression: str) -> None:
    with pytest.raises(ValueError):
        CALCULATOR(expression)


@given(
    st.recursive(
        st.integers(-50, 50).map(str),
        lambda s: st.tuples(s, st.sampled_from("+-*"), s).map("({0[0]}{0[1]}{0[2]})".format),
    )
)
def test_calculator_agrees_with_python_on_integers(expression: str) -> None:
    assert CALCULATOR(expression) == str(eval(expression))


@given(st.text(max_size=60))
def test_calculator_only_ever_raises_value_error(text: str) -> None:
    try:
        result = CALCULATOR(text)
    except ValueError:
        return
    assert isinstance(result, str) and (math.isfinite(float(result.partition("/")[0])))


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "documents"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\nthree\n")
    (root / "sub" / "b.txt").write_text("deep")
    (root / "raw.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "inner.txt").symlink_to(root / "a.txt")
    monkeypatch.setenv("TOOLGRPO_READ_ROOT", str(root))
    return root


def test_files_inside_are_read(documents: Path) -> None:
    assert FILES["read_file"]("a.txt") == "one\ntwo\nthree"
    assert FILES["read_file"]("a.txt", first_line=2, lines=1) == "two"
    assert FILES["read_file"]("a.txt", first_line=9) == "[a.txt has 3 lines]"
    assert FILES["read_file"]("sub/../inner.txt") == "one\ntwo\nthree"
    assert FILES["list_files"]() == ["a.txt", "inner.txt", "link.txt", "raw.bin", "sub/"]
    assert FILES["list_files"]("sub") == ["b.txt"]


@pytest.mark.parametrize(
    "path", ["../secret.txt", "link.txt", "/etc/hostname", "sub/../../secret.txt", "..", "~/x/../../.."]
)
def test_nothing_outside_is_read(documents: Path, path: str) -> None:
    with pytest.raises((PermissionError, ValueError)) as caught:
        FILES["read_file"](path)
    assert "secret" not in str(caught.value).replace("secret.txt", "")


def test_files_that_cannot_be_read_are_explained(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whys = {"nope.txt": "no file", "sub": "it holds: b.txt", "raw.bin": "not a text file", "a\0b": "zero"}
    for path, says in whys.items():
        with pytest.raises(ValueError, match=says):
            FILES["read_file"](path)
    monkeypatch.delenv("TOOLGRPO_READ_ROOT")
    with pytest.raises(PermissionError, match="TOOLGRPO_READ_ROOT"):
        FILES["read_file"]("a.txt")


PAGE = "<html><head><title>t</title><style>x{}</style></head><body><h1>Hällo</h1><script>no()</script><p>a &amp; b</p></body>"
ANSWERS = {  # path: status, type and text; of a redirect where it leads to
    "/page": (200, "text/html; charset=utf-8", PAGE),
    "/big": (200, "text/plain", "x" * 3_000_000),
    "/away": (302, "http://forbidden.example/x", ""),
    "/moved": (302, "/page", ""),
    "/loop": (302, "/loop", ""),
}


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        status, kind, text = ANSWERS.get(parts.path, (404, "text/plain", "nothing here"))
        if parts.path == "/echo":
            found = {"method": self.command, "query": query, "body": body, "x": self.headers.get("X-Key")}
            status, kind, text = 200, "application/json", json.dumps(found)
        elif parts.path == "/search":
            results = [{"title": f"{query['q']} {i}", "url": f"http://r/{i}", "content": "c"} for i in range(9)]
            status, kind, text = 200, "application/json", json.dumps({"results": results})
        self.send_response(status)
        self.send_header("location" if status == 302 else "content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("TOOLGRPO_HTTP_HOSTS", f"example.org, {base}")
    monkeypatch.setenv("TOOLGRPO_SEARCH_URL", f"http://{base}/search")
    yield f"http://{base}"
    server.shutdown()
    server.server_close()


def run(coroutine: Any) -> str:
    return asyncio.run(coroutine)


def test_pages_and_apis_of_listed_hosts(site: str) -> None:
    assert run(WEB["fetch_url"](f"{site}/page")) == "Hällo\n\na & b"
    assert run(WEB["fetch_url"](f"{site}/moved")) == "Hällo\n\na & b"
    assert run(WEB["fetch_url"](f"{site}/nope")) == "[status 404]\nnothing here"
    assert run(WEB["fetch_url"](f"{site}/big", max_chars=10)) == "x" * 10 + "\n[cut: 1999990 characters left out]"
    answer = run(WEB["call_api"](f"{site}/echo", "POST", {"q": "1"}, {"k": [1]}, {"X-Key": "v"}))
    status, _, text = answer.partition("\n")
    assert status == "[status 200]" and json.loads(text) == {
        "method": "POST",
        "query": {"q": "1"},
        "body": '{"k":[1]}',
        "x": "v",
    }
    found = run(WEB["web_search"]("tea", max_results=2))
    assert found == "1. tea 0\n   http://r/0\n   c\n2. tea 1\n   http://r/1\n   c"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("http://forbidden.example/", "forbidden.example may not be asked; allowed are example.org"),
        ("http://127.0.0.1:1/", "127.0.0.1:1 may not be asked"),
        ("http://example.org:8080/", "example.org:8080 may not be asked"),
        ("http://example.org@forbidden.example/", "forbidden.example may not"),
        ("http://example.org.forbidden.example/", "may not be asked"),
        ("file:///etc/passwd", "must start with http"),
        ("ftp://example.org/", "must start with http"),
        ("http://[::1/", "is not a web address"),
        ("{site}/away", "forbidden.example may not be asked"),
        ("{site}/loop", "more than 5 redirects"),
    ],
)
def test_everything_else_is_refused(site: str, path: str, says: str) -> None:
    with pytest.raises((PermissionError, ValueError, RuntimeError)) as caught:
        run(WEB["fetch_url"](path.replace("{site}", site)))
    assert says in str(caught.value)


def test_refused_by_default(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLGRPO_HTTP_HOSTS")
    with pytest.raises(PermissionError, match="TOOLGRPO_HTTP_HOSTS"):
        run(WEB["fetch_url"](f"{site}/page"))
    monkeypatch.delenv("TOOLGRPO_SEARCH_URL")
    with pytest.raises(PermissionError, match="TOOLGRPO_SEARCH_URL"):
        run(WEB["web_search"]("x"))

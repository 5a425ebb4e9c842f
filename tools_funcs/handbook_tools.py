"""Search, code, files and a web API together, over a small handbook that is shipped: for recipes/configs/handbook.yaml.

    search         the documents of the handbook by words            read_file      one of them, line by line
    execute_code   Python in the sandbox                             call_api       the maker's API, really over HTTP

The folder is recipes/data/handbook, or TOOLGRPO_READ_ROOT. The API is served by the process that calls it, on a free
port of this machine and nowhere else; copy this file and give your own folder and host instead.
"""

import math
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

from toolgrpo.tools import tool

from .file_tools import read_file
from .handbook_api import serve
from .http_tools import call_api as call_any_api
from .python_tools import execute_code

_FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "data" / "handbook"
os.environ.setdefault("TOOLGRPO_READ_ROOT", str(_FOLDER))


@tool(cache=True)
def search(query: str, max_results: int = 3) -> str:
    """Search the handbook; gives the name of each file that fits and what it says.

    Args:
        query: Words to look for, as in "warranty oak drill".
        max_results: How many files to show, at most 10.
    """
    words = _words(query)
    documents = _documents()
    seen_in = Counter(word for text in documents.values() for word in set(_words(text)))
    scores = {
        name: sum(math.log(1 + len(documents) / seen_in[word]) for word in words if word in _words(f"{name} {text}"))
        for name, text in documents.items()
    }
    best = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
    shown = [f"{name}\n{documents[name].strip()}" for name in best[: max(1, min(max_results, 10))]]
    return "\n\n".join(shown) or "nothing was found; try other words"


async def call_api(path: str, query: dict[str, str] | None = None) -> str:
    """Ask the maker's API. GET /warehouses lists the warehouses, GET /stock says what one of them holds.

    Args:
        path: /warehouses or /stock.
        query: For /stock: product, with the name of its file without .md (as in oak_drill), and warehouse.
    """
    address = _address()
    return await call_any_api(f"http://{address}/{path.lstrip('/')}", query=query)


@cache
def _address() -> str:
    address = f"127.0.0.1:{serve()}"
    listed = os.environ.get("TOOLGRPO_HTTP_HOSTS")
    os.environ["TOOLGRPO_HTTP_HOSTS"] = f"{listed},{address}" if listed else address
    return address


@cache
def _documents() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path(os.environ["TOOLGRPO_READ_ROOT"]).glob("*.md"))}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))


TOOL_FUNCTIONS = [search, read_file, execute_code, call_api]

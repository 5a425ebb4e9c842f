"""The web, from an allow-list of hosts: fetch a page, call an API, search.

Refused by default: TOOLGRPO_HTTP_HOSTS lists the hosts that may be asked, as `example.org`, `*.example.org` (its
subdomains) or `localhost:8080`; without a port, 80 and 443. Redirects are followed only to hosts of the list.
`web_search` asks the search service at TOOLGRPO_SEARCH_URL, with `q` and `format=json` in the query and
`{"results": [{"title", "url", "content"}]}` in the answer, which is what SearXNG speaks.

Not covered: a listed name that resolves to an internal address is asked; list only names you trust.
"""

import fnmatch
import json
import os
import re
from html.parser import HTMLParser
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

import httpx

_MAX_BYTES = 2_000_000
_MAX_REDIRECTS = 5
_TIMEOUT_S = 15.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


async def fetch_url(url: str, max_chars: int = 8000) -> str:
    """Fetch a web page and give its text.

    Args:
        url: The address, starting with http:// or https://.
        max_chars: How many characters of text to give at most.
    """
    answer = await _request("GET", url)
    kind = answer.headers.get("content-type", "")
    text = _page_text(answer.text) if "html" in kind else answer.text
    head = "" if answer.status_code == 200 else f"[status {answer.status_code}]\n"
    return head + _cut(text, max_chars)


async def call_api(
    url: str,
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET",
    query: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> str:
    """Call a web API and give its answer.

    Args:
        url: The address, starting with http:// or https://.
        method: The HTTP method.
        query: Parameters of the query.
        body: What to send, as a JSON object.
        headers: Request headers.
    """
    answer = await _request(method, url, params=query, json_body=body, headers=headers)
    return f"[status {answer.status_code}]\n{_cut(answer.text, 8000)}"


async def web_search(query: str, max_results: int = 5) -> str:
    """Search the web.

    Args:
        query: What to search for.
        max_results: How many results to give, at most 20.
    """
    service = os.environ.get("TOOLGRPO_SEARCH_URL")
    if not service:
        raise PermissionError("no search service may be asked: TOOLGRPO_SEARCH_URL is not set")
    answer = await _request("GET", service, params={"q": query, "format": "json"})
    if answer.status_code != 200:
        raise RuntimeError(f"the search service answered with status {answer.status_code}")
    try:
        results = json.loads(answer.text)["results"][: max(1, min(max_results, 20))]
        lines = [
            f"{i}. {r['title']}\n   {r['url']}\n   {_cut(r.get('content') or '', 300)}"
            for i, r in enumerate(results, 1)
        ]
    except (ValueError, KeyError, TypeError):
        raise RuntimeError("the search service gave an answer of another form") from None
    return "\n".join(lines) or "no results"


async def _request(
    method: str,
    url: str,
    params: dict[str, str] | None = None,
    json_body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One request, each hop of it checked against the list, the body read up to a limit."""
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False) as client:
        for _ in range(_MAX_REDIRECTS + 1):
            _check_allowed(url)
            try:
                async with client.stream(method, url, params=params, json=json_body, headers=headers) as answer:
                    if not answer.has_redirect_location:
                        return await _read(answer)
                    url = urljoin(str(answer.url), answer.headers["location"])
                    params = None
                    if answer.status_code not in (307, 308):
                        method, json_body = "GET", None
            except httpx.HTTPError as error:
                raise RuntimeError(
                    f"{urlsplit(url).hostname} cannot be asked: {error or type(error).__name__}"
                ) from None
    raise RuntimeError(f"more than {_MAX_REDIRECTS} redirects")


async def _read(answer: httpx.Response) -> httpx.Response:
    content = b""
    async for chunk in answer.aiter_bytes():
        content += chunk
        if len(content) >= _MAX_BYTES:
            break
    headers = {"content-type": answer.headers.get("content-type", "text/plain")}
    return httpx.Response(answer.status_code, headers=headers, content=content[:_MAX_BYTES])


def _check_allowed(url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{url[:100]} is not a web address") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url[:100]} is not a web address; it must start with http:// or https://")
    listed = [entry.strip().lower() for entry in os.environ.get("TOOLGRPO_HTTP_HOSTS", "").split(",") if entry.strip()]
    if not listed:
        raise PermissionError("no host may be asked: TOOLGRPO_HTTP_HOSTS is not set")
    host = parts.hostname.lower().rstrip(".")
    usual = port is None or port == _DEFAULT_PORTS[parts.scheme]
    for entry in listed:
        name, _, wanted = entry.partition(":")
        if fnmatch.fnmatchcase(host, name) and (port == int(wanted) if wanted else usual):
            return
    raise PermissionError(f"{host}{'' if usual else f':{port}'} may not be asked; allowed are {', '.join(listed)}")


class _TextOnly(HTMLParser):
    """Collects what a reader would see."""

    _SILENT = ("script", "style", "noscript", "template", "head")
    _BREAKS = ("p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in self._SILENT
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._SILENT and self._silent:
            self._silent -= 1
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data)


def _page_text(page: str) -> str:
    parser = _TextOnly()
    parser.feed(page)
    lines = [re.sub(r"[ \t\xa0]+", " ", line).strip() for line in "".join(parser.parts).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _cut(text: str, max_chars: int) -> str:
    max_chars = max(1, min(max_chars, 20_000))
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: {len(text) - max_chars} characters left out]"


TOOL_FUNCTIONS = [fetch_url, call_api, web_search]

"""Requests that a server on the loopback interface answers: those of this machine, not of web pages.

A browser sends requests for any page it shows, also to 127.0.0.1. Two headers give such a page away:
`Host`, where it reaches this machine under a name of its own (DNS rebinding), and `Origin`, where it
asks for an address that is not its own. What can be
read in two ways is no address.

Not covered: programs of other users of this machine; a key keeps those out.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>0|[1-9][0-9]{0,4}))?")
_HTTP = 80  # browsers and clients leave this port out


def is_local(name: str | None) -> bool:
    """Return whether this is a name or an address of the loopback interface."""
    if name == "localhost":
        return True
    try:
        return ip_address(name or "").is_loopback
    except ValueError:
        return False


def is_foreign(host: str | None, origin: str | None, *, served_on: str = "127.0.0.1", port: int | None = None) -> bool:
    """Return whether a request with these headers came through another host name or port, or from a foreign page.

    `port` is that of the server; None: any. A server for other machines (`served_on` is no loopback
    address) has names, and behind a proxy ports, that it cannot know; there a page may ask only where
    it came from.
    """
    own = _address(host)
    if own is None or (is_local(served_on) and not (is_local(own[0]) and port in (None, own[1]))):
        return True
    if origin is None:
        return False
    scheme, _, rest = origin.partition("://")
    page = _address(rest, 443 if scheme == "https" else _HTTP) if scheme in ("http", "https") else None
    return page is None or not (is_local(page[0]) or page == own)


def _address(text: str | None, default: int = _HTTP) -> tuple[str, int] | None:
    """Return the host and the port of a header; None if it is not exactly that."""
    found = _ADDRESS.fullmatch(text or "")
    return None if found is None else (found["host"].strip("[]").lower(), int(found["port"] or default))

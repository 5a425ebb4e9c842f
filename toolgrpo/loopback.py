"""Requests that a server on the loopback interface answers: those of this machine, not of web pages.

A browser sends requests for any page it shows, also to 127.0.0.1. Two headers give such a page away:
`Host`, where it reaches this machine under a name of its own (DNS rebinding), and `Origin`, where it
asks for an address that is not its own.

Not covered: programs of other users of this machine; a key keeps those out.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/\\?#@]+", re.IGNORECASE)  # a scheme and a host, perhaps with a port


def is_local(name: str | None) -> bool:
    """Return whether this is a name or an address of the loopback interface."""
    if name == "localhost":
        return True
    try:
        return ip_address(name or "").is_loopback
    except ValueError:
        return False


def is_foreign(host: str | None, origin: str | None, *, served_on: str = "127.0.0.1") -> bool:
    """Return whether a request with these headers came through another host name, or from a foreign page.

    A server for other machines (`served_on` is no loopback address) has names that it cannot know;
    there a page may ask only where it came from.
    """
    own = _name(f"//{host or ''}")
    if is_local(served_on) and not is_local(own):
        return True
    if origin is None:
        return False
    page = _name(origin) if _ORIGIN.fullmatch(origin) else None
    return page is None or not (is_local(page) or page == own)


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:  # brackets that hold no address
        return None

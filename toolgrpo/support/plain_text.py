"""Text that others wrote, made safe to show and to keep: nothing in it steers a terminal or tears a
line.

Models, tools, rewards and servers write what they like: escape sequences that clear a screen or
rename its window, C1 controls, line separators that `str.splitlines` takes for the end of a line,
marks that turn the reading direction around, halves of surrogate pairs that no file takes. `plain` and
`plain_json` write such a character as its escape; neither changes any other.

Nothing but the standard library: tool workers and the trainer share it. Not covered: letters that
only look like others.

`without_secrets` is for what a run keeps of its settings, `counted` for sentences with a number.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_URL = r"https?://[^\s@?#]+[^\s@?#/]"
"""Address of a chat endpoint, up to /v1: without a password, a query and a slash at its end."""

_UNSEEN = (
    "\x7f-\x9f"  # DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks of the reading direction
    "\u2028\u2029\ufeff"  # separators of lines and paragraphs, and the byte order mark
    "\ud800-\udfff"  # half a character
)
_IN_TEXT = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")  # all but tabulators and newlines
_IN_JSON = re.compile(f"[{_UNSEEN}]")  # JSON escapes the first 32 itself


def plain(text: str) -> str:
    """Return `text` with what would steer a terminal written out: `\\x1b` for an escape."""
    return _IN_TEXT.sub(_escaped, text)


def duration(seconds: float) -> str:
    """Return a time in the unit that a person would choose."""
    unit, name = next(((size, name) for size, name in ((3600, "h"), (60, "min")) if seconds >= 1.5 * size), (1, "s"))
    return f"{seconds / unit:.1f} {name}"


def listed_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def counted(n: int, noun: str) -> str:
    """Return a number and its noun: `1 row`, `2 rows`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def plain_json(json_text: str) -> str:
    """Return a JSON text that stays on its line and means the same, with nothing unseen in it.

    Outside of its strings JSON is ASCII, so each character that is replaced stands in a string,
    where `\\uXXXX` is the same.
    """
    if json_text.isascii() and "\x7f" not in json_text:  # nearly always; and looking costs a tenth
        return json_text
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


def finite(value: Any) -> Any:
    """Return what JSON can hold of a value: NaN and infinity become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


# Secrets in what a run was given, and in the environment. Names are read word by word: `hf_token`, `apiKey`, `X-Amz-Signature`.
_SECRET_PARTS = ("SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "APIKEY", "AUTHORIZATION")
_MANY = {"TOKENS", "KEYS"}
_SECRET_WORDS = {"TOKEN", "KEY", "AUTH", "PWD", "SIG", "SIGNATURE", "BEARER"}
_HARMLESS_ENDS = {"ID", "IDS", "FILE", "PATH", "DIR", "NAME", "COLUMN", "LIMIT", "LENGTH", "TYPE"}
_HARMLESS = {"pad_token", "eos_token", "bos_token", "unk_token", "mask_token", "PWD", "SSH_AUTH_SOCK"}
_BLANK = "***"

_SHELL_WORD = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\])+"""
_NAME = r"[A-Za-z][\w.-]*"
_IN_URL = re.compile(r"(\w://)[^\s/'\"]*@")  # user:password@
_PAIRS = (
    re.compile(rf"(?P<head>[?&#;](?P<name>{_NAME})=)(?P<value>[^&\s#;'\"]+)"),  # of a query
    re.compile(rf"(?P<head>(?<![\w-])--?(?P<name>{_NAME})(?:=|\s+))(?P<value>(?!--){_SHELL_WORD})"),  # of a command
    re.compile(rf"(?P<head>(?<![\w.-])(?P<name>{_NAME})=)(?P<value>{_SHELL_WORD})"),  # of an environment
    re.compile(  # of JSON, YAML and HTTP
        rf"""(?P<head>(?P<quote>["']?)(?<![\w.-])(?P<name>{_NAME})(?P=quote)\s*:(?!//)\s*)"""
        rf"""(?P<value>(?:(?:Bearer|Basic|Token)\s+)?(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s,}}\]'"]+))"""
    ),
)
_KNOWN = re.compile(r"\b(?:sk-|hf_|gh[oprsu]_|github_pat_|xox[abp]-|AKIA|glpat-)[\w-]{8,}")


def without_secrets(value: Any) -> Any:
    """Return a setting with what looks like a secret blanked, at any depth; keys that name one are left out.

    Text is looked at as a URL, a command line, JSON and headers. Not covered: a secret that nothing names.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(one) for key, one in value.items() if not names_secret(str(key), one)}
    if isinstance(value, list | tuple):
        return [without_secrets(one) for one in value]
    if not isinstance(value, str):
        return value
    text = _IN_URL.sub(rf"\1{_BLANK}@", value)
    for pairs in _PAIRS:
        text = pairs.sub(_blanked, text)
    return _KNOWN.sub(_BLANK, text)


def names_secret(name: str, value: Any = "") -> bool:
    """Return whether a name is that of a secret, if this is its value: numbers of tokens are none."""
    upper = _words(name)
    if value is None or isinstance(value, bool) or not upper or name in _HARMLESS:
        return False
    if _has_secret_part(upper):
        return upper[-1] not in _HARMLESS_ENDS
    if upper[-1] in _MANY:  # `access_tokens: [a, b]` is one, `max_tokens: 512` is none
        return not isinstance(value, int | float) and not str(value).strip("'\"").isdigit()
    return not _SECRET_WORDS.isdisjoint(upper) and upper[-1] not in _HARMLESS_ENDS


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable is named like a secret: HF_TOKEN, DB_PASSWORD, AWS_ACCESS_KEY_ID."""
    upper = _words(name)
    return name not in _HARMLESS and (_has_secret_part(upper) or not (_SECRET_WORDS | _MANY).isdisjoint(upper))


def _words(name: str) -> list[str]:
    return [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _has_secret_part(words: Sequence[str]) -> bool:
    joined = "".join(words)
    return any(part in joined for part in _SECRET_PARTS)


def _blanked(found: re.Match[str]) -> str:
    value = found["value"]
    if value.startswith(_BLANK) or not names_secret(found["name"], value):
        return found[0]
    quote = value[0] if value[0] in "'\"" and value[-1] == value[0] else ""
    return f"{found['head']}{quote}{_BLANK}{quote}"

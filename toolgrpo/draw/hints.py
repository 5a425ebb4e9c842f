"""Hints of names and texts about the values of a parameter: ranges by words, bounds, lists, examples, dates. Pure.

`arguments.py` draws by it. The tables are for parameters of which nothing else is known; the first row that fits counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_PERCENT = r"percent|per cent|%"
OF_ONE = re.compile(  # "0.05 means 5 percent": a share of one, though percent are spoken of
    r"as a (?:decimal|fraction)|decimal (?:fraction|form)|not (?:a |in )?per ?cent|"
    r"\b0?\.\d+ (?:means|for|is|=) ?\d+(?:\.\d+)? ?(?:%|per ?cent)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from low to high, in steps."""

    low: float
    high: float
    step: float


RANGES: tuple[tuple[str, Range], ...] = (  # by the words of a name and what is said of it; the first that fits
    (r"correlation", Range(-0.8, 0.9, 0.1)),
    (r"probability|fraction|proportion|quantile|\bshare of\b|\bratio|confidence|alpha\b", Range(0.05, 0.95, 0.05)),
    (r"latitude|\blat\b", Range(-60, 65, 0.5)),
    (r"longitude|\blon\b|\blng\b", Range(-170, 170, 0.5)),
    (rf"(?=.*(?:{_PERCENT})).*(?:{OF_ONE.pattern})", Range(0.01, 0.12, 0.005)),
    (rf"volatility.*(?:{_PERCENT})", Range(8, 45, 1)),
    (rf"(?:{_PERCENT})", Range(0.5, 12, 0.5)),
    (r"\brate\b|\byield\b", Range(0.5, 9, 0.5)),
    (r"^(?:\w+ )*year\b|year of|calendar year", Range(1990, 2025, 1)),
    (r"^(?:\w+ )*month\b(?!s)", Range(1, 12, 1)),
    (r"^(?:\w+ )*(?:day|dom)\b(?!s)(?! rate)", Range(1, 28, 1)),
    (r"^(?:\w+ )*hour\b(?!s)", Range(0, 23, 1)),
    (r"^(?:\w+ )*(?:minute|second)\b(?!s)", Range(0, 59, 1)),
    (r"\bages?\b", Range(20, 95, 1)),
    (r"\byears\b", Range(1, 30, 1)),
    (r"\bmonths\b|monthly payments", Range(12, 360, 12)),
    (r"\bdays\b|\bweeks\b|\bhours\b", Range(1, 60, 1)),
    (r"\bminutes\b|\bseconds\b", Range(5, 300, 5)),
    (r"shares|quantity|units\b", Range(5, 200, 5)),
    (r"celsius|temperature|fahrenheit", Range(-10, 40, 1)),
    (r"principal|balance|savings|salary|income|spending|contribution|loan|mortgage|capital", Range(1000, 200000, 500)),
    (r"face value|\bcosts?\b|amount|money|budget|revenue|\bvalue of\b", Range(100, 10000, 100)),
    (r"price|spot|strike|fee\b", Range(5, 200, 1)),
    (r"weight|height|width|length|distance|radius|area|mass|speed", Range(1, 200, 1)),
    (
        r"count|limit|max|top\b|size|how many|\bk\b|depth|page|number of(?! the | an? )|decimals|digits|places",
        Range(1, 10, 1),
    ),
)

WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (  # likewise, for texts; `{n}` is a number
    (r"e-?mail", ("anna@example.org", "ben@example.com", "info@example.org")),
    (r"\burl\b|\buri\b|web address|link\b", ("https://example.org/", "https://example.com/page")),
    (r"time ?zone|\btz\b", ("Europe/Oslo", "America/New_York", "Asia/Tokyo", "UTC", "Europe/Berlin", "Asia/Kolkata")),
    (r"\bcity|\btown|\bplace\b|location|destination|origin", ("Oslo", "Paris", "Tokyo", "Berlin", "London", "Madrid")),
    (r"country|nation", ("Norway", "France", "Japan", "Germany", "Brazil", "Canada", "Kenya")),
    (r"currenc|\bfrom cur|\bto cur", ("USD", "EUR", "GBP", "JPY", "CHF", "NOK")),
    (r"language|\blocale|\blang\b", ("en", "de", "fr", "es", "ja")),
    (r"colou?r", ("red", "green", "blue", "yellow", "black")),
    (r"\bisin\b", ("US0378331005", "US5949181045", "DE0007164600")),
    (r"ticker|\bsymbol|stock", ("AAPL", "MSFT", "SAP", "TSLA", "IBM")),
    (r"\bunits?\b", ("km", "m", "cm", "mile", "kg", "g", "pound", "celsius", "fahrenheit", "hour", "minute")),
    (r"expression|formula|equation|arithmetic", ("({n} + {n}) * {n}", "{n} * {n} - {n}", "{n} + {n} / {n}", "{n} ** 2")),
    (r"python|\bcode\b|program\b|script", ("print({n} * {n} + {n})", "sum(range({n}))", "sorted([{n}, {n}, {n}])[0]")),
    (r"\bsql\b|select statement", ("SELECT {n} + {n}", "SELECT {n} * {n}")),
    (r"regex|pattern", ("[aeiou]", r"\d+", "[A-Z]")),
    (r"\bip\b", ("10.0.0.{n}", "192.168.1.{n}")),
    (r"binary", ("1010", "1101", "100111", "1110001")),
    (r"\bhex", ("ff", "1a3", "7e", "c0de")),
    (r"roman", ("XIV", "MCMXC", "XLII", "IX")),
    (r"phone", ("+47 22 12 34 {n}", "+1 555 01{n}")),
    (r"company|employer|vendor|supplier", ("Acme", "Globex", "Initech", "Umbrella")),
    (r"product|item\b", ("laptop", "desk", "lamp", "chair", "notebook")),
    (r"person|author|user|first name|last name|customer|employee|student", ("Anna", "Ben", "Carla", "David", "Emma")),
    (r"text|sentence|message|content|paragraph|title|string|phrase|document|comment|note", (
        "the quick brown fox jumps over the lazy dog", "A journey of a thousand miles begins with one step",
        "It was a bright cold day in April", "Rain is expected on {n} days", "never odd or even",
        "She sells {n} shells by the shore")),
    (r"path|file|folder|director", (".", "README.md", "notes.txt")),
    (r"name|label|tag|word|\bkey\b|query|keyword|search|topic", ("level", "river", "garden", "planet", "winter", "apple")),
)  # fmt: skip
ANY_WORD = ("river", "garden", "planet", "level", "winter", "music", "apple", "stone")

_ONE_OF = re.compile(
    r"\b(?:one of|available|choose from|allowed|valid|supported|options):? +(.+)", re.IGNORECASE | re.DOTALL
)
_LISTED = re.compile(
    r"\b(?:known|choices|expected|holds|did you mean|are|use)(?: \w+){0,2}?:? +(.+)", re.IGNORECASE | re.DOTALL
)
AS_IN = re.compile(
    r"(?:as in|such as|e\.g\.,?|for example,?|for instance,?|examples?:|like"
    r"|(?:known|valid|allowed|available|supported|possible)(?: \w+){0,2}:) +(.+)",
    re.IGNORECASE,
)
SUM = re.compile(r"sum (?:up )?to (?:1\b|one\b)")
_WORD = re.compile(  # x1, then ISIN, results of maxResults, 2 of address2
    r"(?<![^\W\d_])[^\W\d_]{1,2}\d+(?![^\W\d_])|[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+"
)
_OTHER_NUMBER = re.compile(rf"[.;](?: +[^\s.;]+){{6,}}? in (?:{_PERCENT})", re.IGNORECASE)
_QUOTED = re.compile(r"""(?:"([^"\n]{1,80})"|'([^'\n]{1,80})'|`([^`\n]{1,80})`)""")


def words_of(name: str) -> list[str]:
    """Return the words of a name in any case: `maxResults_per_page` is max results per page."""
    return [word.lower() for word in _WORD.findall(name)] or [name]


def bounds_in(text: str) -> tuple[float | None, float | None]:
    """Return the least and the greatest number that a text about a number allows, as far as it says so."""
    low = high = None
    number = f"({_NUMBER})"
    if found := re.search(rf"(?:between|from) {number} (?:and|to) {number}", text):
        return float(found[1]), float(found[2])
    if found := re.search(rf"[\[(] ?{number} ?, ?{number} ?[\])]|\b{number} ?(?:-|–|\.\.|to) ?{number}\b", text):
        first, last = (float(one) for one in found.groups() if one is not None)
        if first < last:
            return first, last
    if found := re.search(
        rf"(?:at least|minimum(?: of)?|>=|≥|not less than|no less than|min\.?:?) ?{number}", text, re.I
    ):
        low = float(found[1])
    elif found := re.search(rf"(?:greater than|more than|larger than|over|above|exceed|>) ?{number}", text):
        low = float(found[1]) + (1 if "." not in found[1] else 0.1)
    elif re.search(r"not(?: be)? negative|non-?negative", text, re.I):
        low = 0.0
    elif re.search(r"\bpositive(?!\))\b", text, re.I):
        low = 0.01
    if found := re.search(
        rf"(?:at most|maximum(?: of)?|<=|≤|up to|no more than|not more than|max\.?:?) ?{number}", text, re.I
    ):
        high = float(found[1])
    elif found := re.search(rf"(?:less than|smaller than|below|under|<) ?{number}", text):
        high = float(found[1]) - (1 if "." not in found[1] else 0.1)
    return low, high


def listed_in(text: str, *cues: re.Pattern[str]) -> list[str]:
    """Return the values that a text lists after a word such as "one of" or "as in"."""
    found = next((one for cue in cues or (_ONE_OF, _LISTED) if (one := cue.search(text))), None)
    if found is None:
        return []
    quoted = [next(filter(None, one)) for one in _QUOTED.findall(found[1])]
    if quoted:
        return quoted
    listed = re.split(r"[.;\n)\]](?:\s|$)", found[1].lstrip("[({"))[0]
    parts = [part.strip(" '\"`[](){}") for part in re.split(r",|\bor\b|\band\b|\|", listed)]
    parts = [part for part in parts if 0 < len(part) <= 40 and len(part.split()) <= 4]
    return parts if len(parts) > 1 or cues else []


def about_it(name: str, schema: Mapping[str, Any]) -> str:
    """Return the words of a name, then what is said of it, in lower case."""
    return f"{' '.join(words_of(name))} . {said_of(schema)}".lower()


def said_of(schema: Mapping[str, Any]) -> str:
    """Return the description of a parameter, without what it says of another number: "; 0 gives the loss in percent"."""
    return _OTHER_NUMBER.sub("", str(schema.get("description") or ""))


def dated(about: str, schema: Mapping[str, Any], rng: random.Random) -> str | None:
    """Return a date or a time where a text is to be one."""
    form, day = schema.get("format"), date(2015, 1, 1) + timedelta(days=rng.randrange(4000))
    clock = f"{rng.randrange(24):02}:{rng.choice((0, 15, 30, 45)):02}"
    if form == "date-time" or re.search("yyyy-mm-ddthh|date ?time|timestamp", about):
        return f"{day}T{clock}:00"
    if form == "time" or re.search(r"hh:mm|24-hour", about):
        return clock
    if form == "date" or re.search(r"yyyy-mm-dd|iso date|\bdate\b|^(?:\w+ )*(?:day|on|birthday)\b", about):
        return day.isoformat()
    if form == "uuid":
        return f"{rng.getrandbits(32):08x}-0000-4000-8000-{rng.getrandbits(48):012x}"
    return f"{day:%Y-%m}" if "yyyy-mm" in about else None


def alternatives(said: str) -> list[str]:
    """Return the words of a text that is nothing but alternatives: "md5, sha1 or sha256"."""
    parts = re.split(r", or |, | or |\|", said.strip().rstrip("."))
    return parts if len(parts) > 1 and not any(re.search(r"\s", part) for part in parts) else []


def filled(text: str, rng: random.Random) -> str:
    return re.sub(r"\{n\}", lambda _: str(rng.randint(2, 30)), text)

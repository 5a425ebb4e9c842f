r"""Numbers as people and models write them, read exactly.

Understood: signs (also the typographic minus), thousands separators (`1,234`, `1{,}234`, `1\,234`, `1_234`), decimals, `.5`,
scientific notation, simple fractions (`3/4`, `\frac{3}{4}`), currency before or after, percent signs, units (`18 m^2`),
ordinals, bold and code marks, `\boxed{}`. A number glued to a word (`CO2`, `Q4`) is part of the word.

Not covered: decimal commas, thousands split by a plain space, numbers in words or short for them (`42k`), mixed fractions.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["all_numbers", "boxed", "last_number", "marked_answer"]

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\d\w]))?"
_CURRENCY = r"(?:US|R|A|C|HK)?[$€£¥₹]|USD|EUR|GBP|Rs\.?"
_NUMBER = re.compile(
    rf"(?<![\w.])(?:(?<![\d)\]%])(?P<sign>[-+]))?\s?(?:(?:{_CURRENCY})\s?)?(?P<inner>-)?"
    rf"(?P<value>(?<![A-Za-z_\d.]){_PLAIN}|(?<=USD){_PLAIN}|(?<=EUR){_PLAIN}|(?<=GBP){_PLAIN}|(?<=Rs){_PLAIN}|(?<=Rs\.){_PLAIN})"
    rf"(?:\s?/\s?(?P<below>{_PLAIN})(?![/\d]))?"
)
_MINUS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})


def all_numbers(text: str) -> list[Fraction]:
    """The numbers of a text, exactly, in their order."""
    values = (_value(match) for match in _NUMBER.finditer(_plain(text)))
    return [value for value in values if value is not None]


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or None."""
    return next(reversed(all_numbers(text)), None)


def boxed(text: str) -> str | None:
    r"""What stands in the last closed `\boxed{...}`, with its braces matched."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for index in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start:index].strip()
    return None


def marked_answer(text: str) -> str:
    r"""The part of a text that is marked as the answer: in `\boxed{}`, after `####`, or else all of it."""
    inside = boxed(text)
    if inside is not None:
        return inside
    return text.rpartition("####")[2] if "####" in text else text


def _plain(text: str) -> str:
    text = re.sub(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3}(?!\d))", ",", text)  # 1 234 with a space that does not break
    text = text.translate(_MINUS)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"\1/\2", text)  # \frac12
    text = re.sub(r"(?<=[A-Za-z)}])\^\{?[-+]?\d+\}?", " ", text)  # m^2 is a unit, not a 2
    text = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", text)  # 18_000, as programs write it
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\!|\{,\\!\})(?=\d{3})", ",", text)
    return re.sub(r"[*_`]{1,3}(?=[-+$€£¥₹.\d])|\\(?=[$%])", " ", text)


def _value(match: re.Match[str]) -> Fraction | None:
    value = Fraction(match["value"].replace(",", ""))
    if match["below"] is not None:
        below = Fraction(match["below"].replace(",", ""))
        if below == 0:
            return None
        value /= below
    return -value if "-" in (match["sign"], match["inner"]) else value

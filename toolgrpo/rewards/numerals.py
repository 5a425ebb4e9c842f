r"""Numbers as people and models write them, read exactly.

Understood: signs (also the typographic minus), thousands separators (`1,234`, `1{,}234`, `1\,234`,
`1_234`), decimals, `.5`, scientific notation, simple fractions (`3/4`, `\frac{3}{4}`), currency
before or after, percent signs, units (`18 m^2`), ordinals, bold and code marks, `\boxed{}`. A
number glued to a word (`CO2`, `Q4`) is part of the word.

Invariants: every function takes a time that grows with the length of its text and no faster,
whatever a model has written; every number that is given out fits a float. Digits that make no such
number (`1/0`, a thousand digits) have no value.

Not covered: decimal commas, thousands split by a plain space, numbers in words or short for them
(`42k`), mixed fractions.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\d\w]))?"
_CURRENCY = r"(?:US|R|A|C|HK)?[$€£¥₹]|USD|EUR|GBP|Rs\.?"
WORD = r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # of a word, in scripts with spaces between words
_NUMBER = re.compile(
    rf"(?<!{WORD})(?<!\.)(?:(?<![\d)\]%])(?P<sign>[-+])(?!\s))?\s?(?:(?:{_CURRENCY})\s?)?(?P<inner>-)?"
    rf"(?P<value>(?<![A-Za-z_\d.]){_PLAIN}|(?<=USD){_PLAIN}|(?<=EUR){_PLAIN}|(?<=GBP){_PLAIN}|(?<=Rs){_PLAIN}|(?<=Rs\.){_PLAIN})"
    rf"(?:\s?/\s?(?P<below>{_PLAIN})(?![/\d]))?"
)
_WHOLE = re.compile(r"[-+−]?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?")
_MOST_DIGITS = 300  # of a numerator or denominator as it is written; more would fit no float, and in time no int
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_NO_WORDS = re.compile(r"[^\w\n]*\d[^A-Za-z\n]*")
_MINUS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})


def all_numbers(text: str) -> list[Fraction]:
    """Return the numbers of a text, exactly, in their order, without those that have no value."""
    values = (_value(match) for match in _NUMBER.finditer(plain(text)))
    return [value for value in values if value is not None]


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None where there is none, or it has no value."""
    last = deque(_NUMBER.finditer(plain(text)), maxlen=1)
    return _value(last[0]) if last else None


def whole_number(text: str) -> Fraction | None:
    """Return the number that a text is, where it is nothing else, and no number of a list or code such as 007."""
    bare = text.strip()
    return last_number(bare) if _WHOLE.fullmatch(bare) else None


def boxed(text: str) -> str | None:
    r"""Return what stands in the last closed `\boxed{...}`, with its braces matched."""
    open_braces: list[tuple[bool, int]] = []  # each: is it a box's, and where its inside starts
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append((brace[0] != "{", brace.end()))
        elif open_braces:
            is_box, inside = open_braces.pop()
            if is_box and inside > start:
                start, end = inside, brace.start()
    return None if start < 0 else text[start:end].strip()


def marked_answer(text: str) -> str:
    r"""Return the part of a text that is marked as the answer, or else all of it.

    Marks are `\boxed{}` and `####`.
    """
    inside = boxed(text)
    if inside is not None:
        return inside
    if "####" not in text:
        return text
    rest = text.rpartition("####")[2].lstrip()
    line = rest.partition("\n")[0]
    return line if _NO_WORDS.fullmatch(line) else rest  # a heading marks what follows it


def plain(text: str) -> str:
    """Return a text with its numbers in the forms that are read: no marks around them, one minus, commas for thousands."""
    text = re.sub(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3}(?!\d))", ",", text)  # 1 234 with a space that does not break
    text = text.translate(_MINUS)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"\1/\2", text)  # \frac12
    text = re.sub(r"(?<=[A-Za-z)}])\^\{?[-+]?\d+\}?", " ", text)  # m^2 is a unit, not a 2
    text = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", text)  # 18_000, as programs write it
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|,?\\!\s?|\{,\\!\})(?=\d{3})", ",", text)
    return re.sub(r"(?:[*`]|(?<![^\W_])_){1,3}(?=[-+$€£¥₹.\d])|\\(?=[$%])", " ", text)  # not the one in user_7


def _value(match: re.Match[str]) -> Fraction | None:
    above, below = match["value"], match["below"] or "1"
    if max(len(above), len(below)) > _MOST_DIGITS:
        return None
    divisor = Fraction(below.replace(",", ""))
    if divisor == 0:
        return None
    value = Fraction(above.replace(",", "")) / divisor
    try:
        float(value)
    except OverflowError:
        return None
    return -value if "-" in (match["sign"], match["inner"]) else value

"""Plain values as JSON and back: the only thing that leaves a sandboxed process.

`decode` builds exact built-in types and nothing else, so a value that crossed cannot carry
behaviour: no `__eq__` that lies, no subclass. `encode` runs beside hostile code and is not trusted.
Not covered: what is no plain literal. What stands for it, if anything, says the caller (`other`);
`form_of_python` and `python_of_form` do it for classes, fractions and dates.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_HASHED = 5000  # in the sets and keys of one value: some ten milliseconds where they are chosen to collide

_MAX_DEPTH = 100


class NotPlainError(ValueError):
    """The value is not made of None, bool, int, float, complex, str, bytes, list, tuple, set,
    frozenset and dict.
    """


def encode(value: Any, depth: int = 0, other: Callable[[Any], Any] | None = None) -> Any:
    """Return a JSON form of a plain value.

    Subclasses (a Counter, a namedtuple, numpy numbers) become what they refine. `other` gives a
    form to what is not plain, as one key and its body, or raises NotPlainError.
    """
    if depth > _MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"i": hex(int(value))}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"b" if isinstance(value, bytes) else "y": bytes(value).hex()}
    for kind, tag in ((list, "l"), (tuple, "t"), (frozenset, "z"), (set, "s")):
        if isinstance(value, kind):
            return {tag: [encode(item, depth + 1, other) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1, other), encode(v, depth + 1, other)] for k, v in dict.items(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1, other)
    if other is not None:
        return other(value)
    raise NotPlainError(f"a {type(value).__name__} is not a plain literal")


def encode_text(value: Any, other: Callable[[Any], Any] | None = None) -> str:
    """Return the form as a text, for who only hands it on."""
    return json.dumps(encode(value, 0, other), separators=(",", ":"))


def decode_text(text: str, other: Callable[[str, Any], Any] | None = None) -> Any:
    """Undo `encode_text`; NotPlainError on anything that it does not write."""
    try:
        form = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotPlainError(f"not the form of a plain literal: {error}") from None
    return decode(form, other=other)


_VALUES: dict[str, tuple[Any, Callable[[Any], list[Any]]]] = {
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator]),
    "Decimal": (Decimal, lambda value: [str(value)]),
    "date": (date, lambda value: [value.year, value.month, value.day]),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
    "datetime": (datetime, lambda value: [*value.timetuple()[:6], value.microsecond]),
    "slice": (slice, lambda value: [value.start, value.stop, value.step]),
    "time": (time, lambda value: [value.hour, value.minute, value.second, value.microsecond]),
}
"""Values of the standard library, and what each is made of; those with a time zone do not cross."""


_CLASSES: dict[str, Any] = {name: kind for name, kind in vars(builtins).items() if type(kind) is type}


def form_of_python(value: Any) -> dict[str, Any]:
    """Return the form of what Python itself has: a class (`int`, `ValueError`), a Fraction, a date."""
    name = type(value).__name__
    if name == "type" and value.__name__ in _CLASSES and _CLASSES[value.__name__] is value:
        return {"T": value.__name__}
    if name not in _VALUES or type(value) is not _VALUES[name][0] or getattr(value, "tzinfo", None) is not None:
        raise NotPlainError(f"a {name} is not a plain literal")
    parts = _VALUES[name][1](value)
    if not all(part is None or isinstance(part, int | str) for part in parts):
        raise NotPlainError(f"a {name} of more than numbers is not a plain literal")
    return {"v": [name, parts]}


def python_of_form(tag: str, body: Any) -> Any:
    """Undo `form_of_python`; NotPlainError on anything that it does not write."""
    try:
        match tag:
            case "T":
                return _CLASSES[body]
            case "v":
                return _VALUES[body[0]][0](*body[1])
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise NotPlainError(f"a malformed {tag!r}: {error}"[:200]) from None
    raise NotPlainError(f"an unknown tag {tag[:20]!r}")


def decode(form: Any, *, most_hashed: int | None = None, other: Callable[[str, Any], Any] | None = None) -> Any:
    """Undo `encode`; NotPlainError on anything that `encode` does not write.

    `most_hashed` bounds what goes into sets and keys of dicts, but for plain texts as keys, whose
    hashes nobody can foresee: the others can be chosen so that each meets all before it, which
    takes quadratic time.
    """
    return _Decoding(most_hashed, other).value(form, 0)


class _Decoding:
    def __init__(self, most_hashed: int | None, other: Callable[[str, Any], Any] | None) -> None:
        self._left = most_hashed
        self._other = other

    def value(self, form: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH + 1:
            raise NotPlainError("nested too deeply")
        if form is None or form is True or form is False or type(form) is str:
            return form
        if type(form) is not dict or len(form) != 1:
            raise NotPlainError("not the form of a plain literal")
        [(tag, body)] = form.items()
        try:
            match tag:
                case "i":
                    return int(body, 16)
                case "f":
                    return float.fromhex(body)
                case "c":
                    return complex(float.fromhex(body[0]), float.fromhex(body[1]))
                case "b":
                    return bytes.fromhex(body)
                case "y":
                    return bytearray.fromhex(body)
                case "l":
                    return [self.value(item, depth + 1) for item in body]
                case "t":
                    return tuple(self.value(item, depth + 1) for item in body)
                case "s":
                    return {self.hashed(item, depth + 1) for item in body}
                case "z":
                    return frozenset(self.hashed(item, depth + 1) for item in body)
                case "d":
                    return {self.hashed(key, depth + 1): self.value(item, depth + 1) for key, item in body}
                case _ if self._other is not None:
                    return self._other(tag, body)
        except NotPlainError:
            raise
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise NotPlainError(f"a malformed {tag!r}: {error}"[:200]) from None
        raise NotPlainError(f"an unknown tag {tag[:20]!r}")

    def hashed(self, form: Any, depth: int) -> Any:
        if self._left is not None and type(form) is not str:
            self._left -= _weight(form, self._left)
            if self._left < 0:
                raise NotPlainError("more in sets and keys than can be taken in at once")
        return self.value(form, depth)


def _weight(form: Any, enough: int) -> int:
    """Return how much there is to compare where one value is compared with another.

    Not counted much beyond `enough`.
    """
    weight, waiting = 0, [form]
    while waiting and weight <= enough:
        part = waiting.pop()
        if type(part) is dict:  # only says of what kind the rest is
            waiting += part.values()
            continue
        weight += 1
        if type(part) is str:
            weight += len(part) // 16
        elif type(part) is list:
            waiting += part
    return weight

"""Plain values as JSON and back: the only thing that leaves a sandboxed process.

`decode` builds exact built-in types and nothing else, so a value that crossed cannot carry
behaviour: no `__eq__` that lies, no subclass. `encode` runs beside hostile code and is not trusted.
Not covered: Fraction, Decimal, datetimes and the like, which do not cross.
"""

from __future__ import annotations

import json
from typing import Any

MOST_HASHED = 5000  # in the sets and keys of one value: some ten milliseconds where they are chosen to collide

_MAX_DEPTH = 100


class NotPlainError(ValueError):
    """The value is not made of None, bool, int, float, complex, str, bytes, list, tuple, set,
    frozenset and dict.
    """


def encode(value: Any, depth: int = 0) -> Any:
    """Return a JSON form of a plain value.

    Subclasses (a Counter, a namedtuple, numpy numbers) become what they refine.
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
        return {"b": bytes(value).hex()}
    for kind, tag in ((list, "l"), (tuple, "t"), (frozenset, "z"), (set, "s")):
        if isinstance(value, kind):
            return {tag: [encode(item, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    raise NotPlainError(f"a {type(value).__name__} is not a plain literal")


def encode_text(value: Any) -> str:
    """Return the form as a text, for who only hands it on."""
    return json.dumps(encode(value), separators=(",", ":"))


def decode_text(text: str) -> Any:
    """Undo `encode_text`; NotPlainError on anything that it does not write."""
    try:
        form = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotPlainError(f"not the form of a plain literal: {error}") from None
    return decode(form)


def decode(form: Any, *, most_hashed: int | None = None) -> Any:
    """Undo `encode`; NotPlainError on anything that `encode` does not write.

    `most_hashed` bounds what goes into sets and keys of dicts, but for plain texts as keys, whose
    hashes nobody can foresee: the others can be chosen so that each meets all before it, which
    takes quadratic time.
    """
    return _Decoding(most_hashed).value(form, 0)


class _Decoding:
    def __init__(self, most_hashed: int | None) -> None:
        self._left = most_hashed

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

"""Plain values as JSON and back: the only thing that leaves a sandboxed process.

`decode` builds exact built-in types and nothing else, so a value that crossed cannot carry behaviour: no `__eq__` that
lies, no subclass. `encode` runs beside hostile code and is not trusted.
Not covered: Fraction, Decimal, datetimes and the like, which do not cross.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NotPlainError", "decode", "encode"]

_MAX_DEPTH = 100


class NotPlainError(ValueError):
    """The value is not made of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict."""


def encode(value: Any, depth: int = 0) -> Any:
    """A JSON form of a plain value; subclasses (a Counter, a namedtuple, numpy numbers) become what they refine."""
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


def decode(form: Any, depth: int = 0) -> Any:
    """The inverse of `encode`; raises NotPlainError on anything that `encode` does not write."""
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
            case "l" | "t" | "s" | "z":
                kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
                return kind(decode(item, depth + 1) for item in body)
            case "d":
                return {decode(k, depth + 1): decode(v, depth + 1) for k, v in body}
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise NotPlainError(f"a malformed {tag!r}: {error}") from None
    raise NotPlainError(f"an unknown tag {tag!r}")

"""A calculator for expressions, without `eval`: Python's parser reads, a walk over the tree computes.

Only numbers, arithmetic and the functions below exist, and sizes are bounded, so an expression can neither reach the
interpreter nor keep it busy.
"""

import ast
import math
import operator
from fractions import Fraction

from toolgrpo.tools import tool

_MAX_CHARS = 1000
_MAX_BITS = 4096

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS = {
    "abs": abs, "round": round, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt,
    "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos,
    "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan, "degrees": math.degrees,
    "radians": math.radians, "gcd": math.gcd, "lcm": math.lcm, "factorial": lambda n: _factorial(n),
}  # fmt: skip


@tool(cache=True)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly where that is possible, as in (3 + 4) * 2**10 / 7.

    Args:
        expression: Numbers, + - * / // % ** and ( ), pi, e, and functions such as sqrt, log, sin, round, gcd, factorial.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"this is not an arithmetic expression: {getattr(error, 'msg', error)}") from None
    return _text(_evaluate(tree.body))


def _evaluate(node: ast.expr) -> int | float | Fraction:
    match node:
        case ast.Constant(value=bool() | str() | bytes() | complex() | None):
            raise ValueError(f"{node.value!r} is not a number")
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _divide(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            values = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.FloorDiv | ast.Mod) and values[1] == 0:
                raise ValueError("division by zero")
            return _bounded(_BINARY[type(op)](*values))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_evaluate(argument) for argument in arguments])
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            known = ", ".join([*_CONSTANTS, *_FUNCTIONS])
            raise ValueError(f"'{name}' is unknown or used wrongly here; known are {known}")
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _call(name: str, arguments: list[int | float | Fraction]) -> int | float | Fraction:
    try:
        return _bounded(
            _FUNCTIONS[name](*[int(a) if isinstance(a, Fraction) and a.denominator == 1 else a for a in arguments])
        )
    except (TypeError, ValueError, OverflowError) as error:
        shown = ", ".join(_text(argument) for argument in arguments)
        raise ValueError(f"{name}({shown}): {error}") from None


def _divide(left: int | float | Fraction, right: int | float | Fraction) -> int | float | Fraction:
    if right == 0:
        raise ValueError("division by zero")
    if isinstance(left, float) or isinstance(right, float):
        return _bounded(left / right)
    return _bounded(Fraction(left) / Fraction(right))


def _power(base: int | float | Fraction, exponent: int | float | Fraction) -> int | float | Fraction:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        exponent = int(exponent)
    if isinstance(exponent, int) and not isinstance(base, float):
        size = max(abs(Fraction(base).numerator).bit_length(), Fraction(base).denominator.bit_length())
        if size * abs(exponent) > _MAX_BITS:
            raise ValueError("the result of ** is too large")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        return _bounded(Fraction(base) ** exponent)
    try:
        result = float(base) ** float(exponent)
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"**: {error}") from None
    if isinstance(result, complex):
        raise ValueError("a fractional power of a negative number is not real")
    return _bounded(result)


def _factorial(n: int) -> int:
    if isinstance(n, int) and n > 400:
        raise ValueError("at most factorial(400)")
    return math.factorial(n)


def _bounded(value: int | float | Fraction) -> int | float | Fraction:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is not a finite number")
        return value
    exact = Fraction(value)
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("the numbers become too large")
    return exact.numerator if exact.denominator == 1 else exact


def _text(value: int | float | Fraction) -> str:
    """Exact integers as they are, everything else with 12 significant digits."""
    if isinstance(value, Fraction):
        try:
            value = float(value)
        except OverflowError:
            return f"{value.numerator}/{value.denominator}"
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


TOOL_FUNCTIONS = [calculator]

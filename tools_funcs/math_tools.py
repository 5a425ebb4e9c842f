"""Arithmetic, one operation a tool: four of integers that answer with a number, two of any numbers that answer in words."""

from toolgrpo.tools import tool


@tool(cache=True)
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


@tool(cache=True)
def subtract(a: int, b: int) -> int:
    """Subtract the second integer from the first.

    Args:
        a: The integer to subtract from.
        b: The integer to subtract.
    """
    return a - b


@tool(cache=True)
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


@tool(cache=True)
def divide(a: int, b: int) -> str:
    """Divide the first integer by the second, with quotient and remainder.

    Args:
        a: The integer to divide.
        b: The integer to divide by; not 0.
    """
    if b == 0:
        raise ValueError("b must not be 0: nothing can be divided by 0")
    quotient, remainder = divmod(a, b)
    return str(quotient) if remainder == 0 else f"{quotient} remainder {remainder}"


@tool(cache=True)
def calculate_sum(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"Sum: {a + b}"


@tool(cache=True)
def calculate_product(a: float, b: float) -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"Product: {a * b}"


TOOL_FUNCTIONS = [add, subtract, multiply, divide, calculate_sum, calculate_product]

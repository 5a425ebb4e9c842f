"""Your tools: functions with types and a docstring, both of which the model reads. They run in worker processes."""

PARTS = {110 + 17 * number: (3 + number % 41, 40 + 13 * number % 90) for number in range(48)}  # number: (price, stock)


def find(part: int) -> tuple[int, int]:
    if part not in PARTS:
        raise ValueError(f"there is no part {part}")  # the model reads this sentence
    return PARTS[part]


def price(part: int) -> int:
    """Price of a part.

    Args:
        part: Number of the part.
    """
    return find(part)[0]


def stock(part: int) -> int:
    """How many of a part there are.

    Args:
        part: Number of the part.
    """
    return find(part)[1]


TOOL_FUNCTIONS = [price, stock]

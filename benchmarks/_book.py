"""A book of 20 pages of 300 tokens, one call a page: the chain of `segments.py`.

`Book` is the environment: every page says which one comes next, the last one says the code, which is
the answer. What a page says apart from that is filler. Nobody needs more than the last page, so a
history without old results loses nothing but room.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PAGES = 20
PAGE_TOKENS = 300
N_PAGES = 97  # that there are: numbers of two digits
HELD_OUT = 20  # of them are the first pages of held-out questions
_LINE = "Nothing of note is told here. "
_REPEATS = 11  # of the line: about PAGE_TOKENS of nano's tokens, said by `segments.py`


class Book:
    """A book that is read page by page."""

    def reset(self, start: int = 0, pages: int = PAGES, code: int = 0, **row: Any) -> None:
        self.expected, self.left, self.code = start, pages, code

    def open_page(self, number: int) -> str:
        """Open a page of the book.

        Args:
            number: The page.
        """
        if number != self.expected:
            return f"Error: that is not the next page. Open page {self.expected}."
        self.left -= 1
        if self.left == 0:
            return f"{_LINE * _REPEATS}The code is {self.code}."
        self.expected = (number * 37 + self.code) % N_PAGES  # of each book another one
        return f"{_LINE * _REPEATS}Open page {self.expected}."


def question(start: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Read the book from page {start} on, page by page. What is the code?"}]


def rows(n: int, seed: str, pages: int = PAGES) -> list[dict[str, Any]]:
    """Rows of a first page and a code; those that are held out begin at pages where no other does."""
    rng = random.Random(seed)
    starts = range(HELD_OUT) if seed == "heldout" else range(HELD_OUT, N_PAGES)
    found = []
    for start in rng.choices(starts, k=n):
        code = rng.randrange(10, 100)
        found.append({"prompt": question(start), "answer": str(code), "start": start, "pages": pages, "code": code})
    return found


def demonstrations(n: int, stub: str) -> list[dict[str, Any]]:
    """Conversations of one to four pages, one in twenty of the whole book. In a fifth of them a wrong page is opened first,
    and in a fifth, of up to the whole book, only the last results are left.
    """
    rng = random.Random("demonstrations")
    found = []
    for place, row in enumerate(rows(n, "shown")):
        book = Book()
        drops = place % 5 == 3
        pages = PAGES if place % 20 == 0 else rng.randint(1, PAGES if drops else 4)
        book.reset(**{**row, "pages": pages})
        messages: list[dict[str, Any]] = list(row["prompt"])
        errs_at = rng.randrange(pages) if place % 5 == 2 else None
        for page in range(pages):
            if page == errs_at:
                messages += _opened(rng.randrange(N_PAGES), book)
            number = book.expected
            call, result = _opened(number, book)
            messages += [call, result]
        messages.append({"role": "assistant", "content": row["answer"]})
        found.append({"messages": _without_old_results(messages, stub, rng.randint(1, 3)) if drops else messages})
    return found


def _without_old_results(messages: list[dict[str, Any]], stub: str, kept: int) -> list[dict[str, Any]]:
    results = [place for place, message in enumerate(messages) if message["role"] == "tool"]
    return [{**one, "content": stub} if place in results[:-kept] else one for place, one in enumerate(messages)]


def _opened(number: int, book: Book) -> list[dict[str, Any]]:
    """A call and its result."""
    call = {"type": "function", "function": {"name": "open_page", "arguments": {"number": number}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "open_page", "content": book.open_page(number)},
    ]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

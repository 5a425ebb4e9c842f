"""Write the table of families in docs/background/chat_formats.md from runs with real tokenizers.

    python tests/real_tokenizers/families.py                    # 500 conversations each; a quarter of an hour on two cores
    python tests/real_tokenizers/families.py --conversations 50 --print

Wants the tokenizers that `fetch.py` fetches.
"""

from __future__ import annotations

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

from tests.support.fetched_tokenizers import CASES, fetched_tokenizer
from tests.support.random_conversations import tally
from toolgrpo.chat import resolve_format
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.errors import ChatFormatError

PAGE = Path(__file__).parents[2] / "docs" / "background" / "chat_formats.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = "| model | vocabulary | format | calls are | tokens compared | drifted | calls misread |\n|---|---|---|---|---|---|---|"


def row(name: str, n: int) -> str:
    tokenizer = fetched_tokenizer(name)
    vocabulary = "its own" if CASES[name].real else f"{CASES[name].vocabulary}'s"
    try:
        chat: Any = resolve_format(tokenizer)
    except ChatFormatError as error:
        return f"| {name} | {vocabulary} | refused: {str(error).split(': ', 2)[1][:80]} | | | | |"
    assert isinstance(chat, TemplateFormat)
    counts = tally(chat, tokenizer, n, f"{name} {n}")
    words = "its own" if chat.family.knows_tools else "Hermes'"
    misread = f"{counts.misread} of {counts.calls:,}"
    return f"| {name} | {vocabulary} | `{chat.name}` | {words} | {counts.tokens:,} | {counts.drifted} | {misread} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--print", action="store_true", help="only print it")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = []
    for name in CASES:
        lines.append(row(name, chosen.conversations))
        print(lines[-1], flush=True)
    if not chosen.print:
        text = PAGE.read_text(encoding="utf-8")
        table = f"{BEGIN}\n{HEAD}\n" + "\n".join(lines) + f"\n{END}"
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()

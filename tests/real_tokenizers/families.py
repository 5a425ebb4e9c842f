"""Write the table of families in docs/background/chat_formats.md from runs with real tokenizers.

    python tests/real_tokenizers/families.py                    # 500 conversations each; a quarter of an hour on two cores
    python tests/real_tokenizers/families.py --conversations 50 --print

Wants the tokenizers that `fetch.py` fetches.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fetched_tokenizers import CASES, fetched_tokenizer
from tests.support.random_conversations import tally
from toolgrpo.chat import resolve_format
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.errors import ChatFormatError

PAGE = Path(__file__).parents[2] / "docs" / "background" / "chat_formats.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = "| format | calls are | models (\\*: with another's vocabulary) | tokens compared | drifted | calls misread |\n|---|---|---|---|---|---|"


@dataclass
class Group:
    """The models of one format, and what was counted over all of them: tokens, drifted, misread, calls."""

    models: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def add(groups: dict[tuple[str, str], Group], name: str, n: int) -> None:
    """Count `n` conversations of one model into the group of its format."""
    shown = name if CASES[name].real else f"{name}\\*"
    tokenizer = fetched_tokenizer(name)
    try:
        chat = resolve_format(tokenizer)
    except ChatFormatError:
        groups.setdefault(("none: refused", ""), Group()).models.append(shown)
        return
    assert isinstance(chat, TemplateFormat)
    counts = tally(chat, tokenizer, n, f"{name} {n}")
    group = groups.setdefault((f"`{chat.name}`", "its own" if chat.family.knows_tools else "Hermes'"), Group())
    group.models.append(shown)
    group.counts.update({what: getattr(counts, what) for what in ("tokens", "drifted", "misread", "calls")})


def row(key: tuple[str, str], group: Group) -> str:
    n = group.counts
    counts = f"{n['tokens']:,} | {n['drifted']} | {n['misread']} of {n['calls']:,}" if key[1] else "| |"
    return f"| {key[0]} | {key[1]} | {', '.join(group.models)} | {counts} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--print", action="store_true", help="only print it")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    groups: dict[tuple[str, str], Group] = {}
    for name in CASES:
        add(groups, name, chosen.conversations)
        print(name, flush=True)
    lines = [row(key, group) for key, group in groups.items()]
    print(*lines, sep="\n")
    if not chosen.print:
        text = PAGE.read_text(encoding="utf-8")
        table = f"{BEGIN}\n{HEAD}\n" + "\n".join(lines) + f"\n{END}"
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()

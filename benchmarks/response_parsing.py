"""Reading a turn: transformers' response parser beside ours, for the turns that hurt.

    python benchmarks/response_parsing.py            # table on the terminal, JSON in benchmarks/results/response_parsing.json
    python benchmarks/response_parsing.py --quick    # stops at shorter turns

Each turn is doubled until transformers' parser, with TRL's response template, takes half a second or the turn has 128,000
characters. `growth` is its time for the last turn over that for half of it: linear is 2, quadratic 4, cubic 8. Beside it is
what the same turn costs ours, with TRL's template (Qwen3) or a corrected one. Tokenizers are byte-level stand-ins, so a
character is a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from _reporting import progress, run, save
from _rows import Figure, Row
from rich.console import Console
from rich.table import Table
from transformers.utils.chat_parsing import parse_response

from tests.support.chat_families import trl_tokenizer
from toolgrpo.chat import resolve_format
from toolgrpo.chat.response_template import response_template_of

LONGEST = 128_000
ENOUGH_S = 0.5

# What: TRL's template, and the turn of about n characters.
TURNS: dict[str, tuple[str, Callable[[int], str]]] = {
    "calls in a row": ("qwen3", lambda n: '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * (n // 50)),
    "spaces in a value": ("qwen3_5_think", lambda n: f"<tool_call><function=f><parameter=a>{' ' * n}</tool_call>"),
    "open parameters": (
        "qwen3_5_think",
        lambda n: "<tool_call><function=f>" + "<parameter=a>" * (n // 13) + "</tool_call>",
    ),
    "thoughts without an end": ("nemotron_3_nano", lambda n: "x" * n),
    "keys without a value": (
        "glm4moe",
        lambda n: "<tool_call>f\n" + "<arg_key>a</arg_key>\n<arg_value>" * (n // 32) + "</tool_call>",
    ),
    "short strings": ("gemma4", lambda n: "<|tool_call>call:f{a:[" + '<|"|>a<|"|>,' * (n // 12) + "1]}<tool_call|>"),
    "open brackets": ("lfm2_2_5", lambda n: f"<|tool_call_start|>[f(a={'[' * n})]<|tool_call_end|>"),
    "recipients": ("gptoss", lambda n: "to=functions." * (n // 13)),
    "objects": ("llama3_1", lambda n: '{"name": "f", "parameters": {}};' * (n // 32)),
}


def seconds(what: Callable[[], Any]) -> float:
    """Processor time, not time on the clock: what else runs on the machine does not count."""
    started = time.process_time()
    what()
    return time.process_time() - started


def beside(name: str, make: Callable[[int], str], enough_s: float) -> dict[str, Any]:
    tokenizer = trl_tokenizer(name)
    described = response_template_of(tokenizer)
    assert described is not None

    def theirs(text: str) -> None:
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # it raises for a malformed call
            parse_response(text, described, prefix="")

    n, half_s = 500, 0.0
    whole_s = seconds(lambda: theirs(make(n)))
    while whole_s < enough_s and n < LONGEST:
        n, half_s = 2 * n, whole_s
        whole_s = seconds(lambda n=n: theirs(make(n)))  # type: ignore[misc]
    ours = resolve_format(tokenizer)
    ids = ours.encode(make(n))  # type: ignore[attr-defined]
    return {
        "template": name,
        "characters": n,
        "transformers_ms": whole_s * 1000,
        "growth": whole_s / half_s if half_s else None,
        "ours_ms": seconds(lambda: ours.parse(ids)) * 1000,
    }


def measure(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, (name, make) in TURNS.items():
        progress(what)
        found[what] = beside(name, make, ENOUGH_S / (5 if quick else 1))
        save("response_parsing", found, quick=quick)
    return found


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    return [
        Row(
            benchmark="response_parsing",
            what=f"{what}, {results[what]['characters']:,} characters, {results[what]['template']}",
            unit="ms of a processor",
            ours=Figure(results[what]["ours_ms"], n=1),
            other=Figure(results[what]["transformers_ms"], n=1),
            other_name="transformers' parser",
        )
        for what in TURNS
        if what in results
    ]


def show(results: dict[str, Any]) -> None:
    table = Table(title="Processor time to read one turn")
    for column in ("turn", "template", "chars", "transformers ms", "growth", "ours ms"):
        table.add_column(column, justify="left" if column in ("turn", "template") else "right")
    for what in TURNS:
        row = results[what]
        growth = f"{row['growth']:.1f}" if row["growth"] else ""
        table.add_row(
            what,
            row["template"],
            f"{row['characters']:,}",
            f"{row['transformers_ms']:.0f}",
            growth,
            f"{row['ours_ms']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    run("response_parsing", __doc__, "stops at shorter turns", measure, show)

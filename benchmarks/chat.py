"""Chat formats: what reading a turn and bridging to the next one costs, and how it grows.

    python benchmarks/chat.py            # table on the terminal, JSON in benchmarks/results/chat.json
    python benchmarks/chat.py --quick    # fewer repetitions, fewer formats

First table: one turn (read it, bridge one result) after 1, 8, 32 and 128 such turns, for every format; beside it what
tokenizing the whole conversation again costs, as TRL's loop does in asynchronous mode. The real tokenizers of Qwen and GPT-OSS
are used where they are at hand; all other formats stand on TRL's templates over bytes.

Second table: the processor time to read a turn of 2n characters over that for n, for the inputs that hurt parsers most.
Linear is 2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from _reporting import benchmark, parser_of, progress, save
from _rows import Figure, Row

from tests.support.chat_families import trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, printed_turn
from tests.support.real_tokenizers import NotAtHand, real_tokenizer
from toolgrpo.chat import ChatFormat, resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.trajectory import Message

TOKENIZERS = Path(__file__).parents[2] / "shared" / "tokenizers"
TURNS = (1, 8, 32, 128)
TARGET_MS = 1.0
TEMPLATES = (
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "llama3_1",
    "gptoss",
    "glm4moe",
    "gemma4_v5",
    "lfm2_2_5",
    "nemotron_3_ultra",
    "muse_glimmer",  # read as its response template says
)
QUESTION: Message = {"role": "user", "content": "What is 12 + 30? Look it up."}
TURN = calling(("look_up", {"key": "12 + 30"}))
RESULT = tool_message("look_up", "42")


def tokenizers(quick: bool) -> dict[str, Any]:
    """Name and tokenizer of each format that is measured."""
    found: dict[str, Any] = {}
    for name in ("real-qwen3", "real-qwen2_5", "real-gptoss"):
        with suppress(NotAtHand):
            found[name] = real_tokenizer(name, TOKENIZERS)
    for name in TEMPLATES[: 2 if quick else None]:
        found[name] = trl_tokenizer(name)
    return found


def times_ms(what: Callable[[], Any], repetitions: int) -> list[float]:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        what()
        times.append((time.perf_counter() - started) * 1000)
    return times


def one_turn(chat: ChatFormat, tokenizer: Any, repetitions: int) -> list[dict[str, Any]]:
    """Cost of a turn after so many turns."""
    sampled = printed_turn(chat, [QUESTION], TURN, [RESULT], [LOOK_UP]).said
    found = []
    for turns in TURNS:
        ids = chat.prompt([QUESTION], [LOOK_UP])
        messages: list[Message] = [QUESTION]
        for _ in range(turns):
            ids = [*ids, *sampled]
            ids += chat.bridge(ids, [RESULT], messages=[QUESTION], schemas=[LOOK_UP])
            messages += [TURN, RESULT]
        ended = [*ids, *sampled]

        def again(messages: list[Message] = messages) -> Any:
            return tokenizer.apply_chat_template(messages, tools=[LOOK_UP], add_generation_prompt=True)

        assert len(chat.parse(sampled, before=ids).attempts) == 1
        parse = times_ms(partial(chat.parse, sampled, before=ids), repetitions)
        bridge = partial(chat.bridge, ended, [RESULT], messages=[QUESTION], schemas=[LOOK_UP])
        bridged = times_ms(bridge, repetitions)
        tokenized = times_ms(again, max(3, repetitions // 20))
        together = [read + then for read, then in zip(parse, bridged, strict=True)]
        found.append(
            {
                "turns_before": turns,
                "history_tokens": len(ids),
                "turn_tokens": len(sampled),
                "parse_ms": statistics.median(parse),
                "bridge_ms": statistics.median(bridged),
                "again_ms": statistics.median(tokenized),
                "spread": {
                    name: asdict(Figure.of(times)) for name, times in (("ours", together), ("again", tokenized))
                },
            }
        )
    return found


HARD: dict[str, Callable[[int], str]] = {
    "one long argument": lambda n: '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * n + '"}}</tool_call>',
    "calls in a row": lambda n: '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * (n // 50),
    "openings only": lambda n: "<tool_call>" * (n // 11),
    "open parameters": lambda n: "<tool_call><function=f>" + "<parameter=a>" * (n // 13),
    "empty parameters": lambda n: "<tool_call><function=f>" + "<parameter=a></parameter>" * (n // 25) + "</tool_call>",
    "open quotes": lambda n: "<|tool_call_start|>[f(a=" + "\\'" * (n // 2) + "<|tool_call_end|>",
    "open strings": lambda n: "<|tool_call>call:f{a:" + '<|"|>a:' * (n // 7) + "}<tool_call|>",
    "bare objects": lambda n: '{"name": "f", "parameters": {}};' * (n // 32),
    "headers": lambda n: "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant" * (n // 73),
    "nested": lambda n: '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (n // 5) + "</tool_call>",
    "thoughts": lambda n: "<think></think>" * (n // 15),
}


def fastest_ms(chat: ChatFormat, ids: list[int], repetitions: int) -> float:
    """Processor time, not time on the clock: what else runs on the machine does not count."""
    times = []
    for _ in range(repetitions):
        started = time.process_time()
        chat.parse(ids)
        times.append(time.process_time() - started)
    return min(times) * 1000


def growth(quick: bool) -> Iterator[dict[str, Any]]:
    """t(2n) / t(n) of every reader for every hard input; the largest ratio of each input is what counts."""
    size = 25_000 if quick else 100_000
    formats = {name: resolve_format(trl_tokenizer(name)) for name in TEMPLATES[1:8]}  # one for each reader
    for what, make in HARD.items():
        progress(f"growth: {what}")
        worst: dict[str, Any] = {"input": what, "ratio": 0.0}
        for name, chat in formats.items():
            assert isinstance(chat, TemplateFormat)
            small, large = chat.encode(make(size)), chat.encode(make(2 * size))
            repetitions = 3 if quick else 7
            once, twice = (fastest_ms(chat, ids, repetitions) for ids in (small, large))
            if twice / once > worst["ratio"]:
                worst = {"input": what, "ratio": twice / once, "format": name, "characters": 2 * size, "ms": twice}
        yield worst


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    target, name = f"under {results['target_ms']:g} ms", "tokenizing it all again (TRL, asynchronous)"
    for family, turns in results["one_turn"].items():
        for turn in turns:
            ours, again = Figure(turn["parse_ms"] + turn["bridge_ms"]), Figure(turn["again_ms"])
            if spread := turn.get("spread"):
                ours, again = Figure(**spread["ours"]), Figure(**spread["again"])
            what = f"read a turn and bridge one result, {family}, after {turn['turns_before']} turns"
            made.append(Row(what, ours, "ms", again, name, target=target))
    for hard in results["growth"]:
        what = f"twice the input, {hard['input']}, the worst format ({hard['format']})"
        made.append(Row(what, Figure(hard["ratio"]), "times the time", target="2: linear"))
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    repetitions = 50 if quick else 400
    turns: dict[str, Any] = {}
    results: dict[str, Any] = {"target_ms": TARGET_MS, "one_turn": turns, "growth": []}
    for name, tokenizer in tokenizers(quick).items():
        progress(f"one turn of {name}")
        turns[name] = one_turn(resolve_format(tokenizer), tokenizer, repetitions)
        save("chat", results, quick=quick)
    for found in growth(quick):
        results["growth"].append(found)
        save("chat", results, quick=quick)
    return results


if __name__ == "__main__":
    benchmark("chat", parser_of(__doc__, "fewer repetitions, fewer formats"), measure, rows)

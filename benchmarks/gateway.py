"""The gateway: what a request costs beside the engine, many agents at once, exact tokens, and whether agents learn.

    python benchmarks/gateway.py             # all of it, hours: six trainings of nano are the last part
    python benchmarks/gateway.py --quick     # fewer repetitions, and no training
    python benchmarks/gateway.py --only request at_once drift learning

Results stand in benchmarks/results/gateway.json; a part that is not asked for keeps what was measured before.

request   one client, one request after the other, an engine that takes no time, nano's tokenizer and chat format.
          The whole way there and back over HTTP, the client's side included.
at_once   64 episodes by agents in processes of their own, and the same by our own loop, over an engine that takes a
          fixed time for each token and, like an accelerator, none of the processor.
drift     tokens that the engine was asked to go on from and that are others in what is trained on, of an agent that
          only ever adds to its messages. What is sampled is random ids, which no tokenizer would write.
learning  nano's arithmetic by recipes/agents/arithmetic.py and by our own loop, with the same rewards and seeds. Each training
          is written down when it ends; if this is interrupted, the next time goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import _agent_learning
from _reporting import result_file, run, save
from _rows import Figure, Row
from rich.console import Console
from rich.table import Table

from toolgrpo.testing import ScriptedEngine

PARTS = ("request", "at_once", "drift", "learning")
AGENTS, TURNS, TURN_TOKENS, TOKEN_S = 64, 3, 40, 0.02
RESULT = {"role": "tool", "content": "42"}
TOOLS = json.loads(
    '[{"type": "function", "function": {"name": "add", "description": "Add two integers.", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]'
)
AGENT = f"""
TOOLS = {TOOLS!r}

async def run(client, row):
    messages = list(row["prompt"])
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return 1.0
        messages.append(message)
        messages += [{{"role": "tool", "tool_call_id": call.id, "content": "42"}} for call in message.tool_calls]
"""


@cache  # a training proves its chat format once
def nano() -> tuple[Any, Any]:
    """Return nano's tokenizer and its chat format."""
    from toolgrpo.chat import resolve_format
    from toolgrpo.models import folder_of
    from toolgrpo.trainer.given_parts import load_tokenizer

    tokenizer = load_tokenizer(str(folder_of("nano")))
    return tokenizer, resolve_format(tokenizer)


def runner(engine: ScriptedEngine, **limits: Any) -> Any:
    from toolgrpo.testing import scripted_runner

    tokenizer, chat = nano()
    return scripted_runner(engine, chat=chat, tokenizer=tokenizer, **limits)


def talks(tokenizer: Any, n_calls: int, padding: int = 0) -> Callable[[Any, int], list[int]]:
    """Return what says so many calls in an episode, and then an answer."""
    call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
    answer = tokenizer.encode("The answer is 42.<|im_end|>")
    thought = tokenizer.encode("so " * padding)

    def script(request: Any, number: int) -> list[int]:
        done = tokenizer.decode(list(request.ids)).count("<tool_response>")
        return [*thought, *(call if done < n_calls else answer)]

    return script


def measure_request(quick: bool) -> dict[str, Any]:
    from tests.support.gateway import visit

    tokenizer, chat = nano()
    n, turns = (20, 8) if quick else (200, 8)
    engine = ScriptedEngine(talks(tokenizer, turns), max_model_len=100_000)

    def visitor(url: str, key: str) -> list[float]:
        took = []
        for _ in range(n):
            connection = http.client.HTTPConnection(urlsplit(url).netloc)
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {random.random()} plus 1?"}]
            for _ in range(turns):
                body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
                began = time.perf_counter()
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = json.load(connection.getresponse())
                took.append(time.perf_counter() - began)
                message = answer["choices"][0]["message"]
                messages += [message, *({**RESULT, "tool_call_id": call["id"]} for call in message["tool_calls"])]
            connection.close()
        return took

    limits: dict[str, Any] = {"max_turns": None, "max_completion_length": 10_000_000}
    used = time.process_time()
    took = sorted(visit(engine, visitor, chat=chat, tokenizer=tokenizer, **limits).returned)
    cpu_ms = 1000 * (time.process_time() - used) / len(took)
    return {
        "n": len(took),
        "cpu_ms": cpu_ms,
        "p50_ms": 1000 * statistics.median(took),
        "p95_ms": 1000 * took[int(0.95 * len(took))],
    }


def measure_at_once(quick: bool) -> dict[str, Any]:
    from toolgrpo.gateway.agents import load_agent
    from toolgrpo.rollout import Episode
    from toolgrpo.rollout.scheduler import run_rollout
    from toolgrpo.testing import ScriptedTools

    tokenizer, _ = nano()
    calls = TURNS - 1
    repeats = 2 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agent.py").write_text(AGENT)
        player = load_agent(Path(folder) / "agent.py")
        tools = ScriptedTools({"add": lambda a, b: "42"})
        tools.schemas[:] = TOOLS
        took: dict[str, list[float]] = {"own loop": [], "agents": []}
        try:
            for _ in range(repeats):
                for name, changes in (("own loop", {"tools": tools}), ("agents", {"player": player})):
                    script = talks(tokenizer, calls, TURN_TOKENS // 2)
                    engine = ScriptedEngine(script, max_model_len=100_000, step_s=TOKEN_S)
                    shared = replace(runner(engine, max_completion_length=10_000), **changes)
                    prompt = [{"role": "user", "content": "What is 1 plus 2?"}]
                    episodes = [Episode(tuple(prompt), row={"prompt": prompt, "n": n}) for n in range(AGENTS)]
                    began = time.perf_counter()
                    done = run_rollout(episodes, shared).trajectories
                    took[name].append(time.perf_counter() - began)
                    assert {len(one.turns) for one in done} == {TURNS}, "the two loops play different episodes"
        finally:
            player.close()
    seconds = {name: statistics.median(times) for name, times in took.items()}
    return {
        "agents": AGENTS,
        "turns": TURNS,
        "seconds": seconds,
        "ratio": seconds["agents"] / seconds["own loop"],
        "ms_per_agent": 1000 * (seconds["agents"] - seconds["own loop"]) / AGENTS,
    }


def measure_drift(quick: bool) -> dict[str, Any]:
    from tests.support.gateway import visit

    tokenizer, chat = nano()
    wanted = 10_000 if quick else 100_000
    draw = random.Random(0)
    call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
    plain = [token for token in range(len(tokenizer)) if token not in set(tokenizer.all_special_ids)]
    plain = [token for token in plain if not tokenizer.decode([token]).startswith("<")]
    compared = others = episodes = 0
    while compared < wanted:
        engine = ScriptedEngine(lambda request, number: [*draw.choices(plain, k=40), *call], max_model_len=100_000)

        def visitor(url: str, key: str) -> None:
            import openai

            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": "go on"}]
            for _ in range(20):
                said = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                message = said.choices[0].message
                messages += [message, *({**RESULT, "tool_call_id": one.id} for one in message.tool_calls or ())]

        limits: dict[str, Any] = {"max_turns": None, "max_completion_length": 100_000}
        seen = visit(engine, visitor, chat=chat, tokenizer=tokenizer, **limits).trajectory
        trained = (*seen.prompt_ids, *seen.ids)
        for request in engine.requests[-1:]:
            asked = tuple(request.ids)
            compared += len(asked)
            others += sum(one != other for one, other in zip(asked, trained[: len(asked)], strict=True))
        others += len(seen.segment_starts)
        episodes += 1
    return {"tokens": compared, "others": others, "episodes": episodes}


def measure_learning(quick: bool) -> dict[str, Any]:
    def kept(runs: list[dict[str, Any]], *, complete: bool = False) -> dict[str, Any]:
        return {"runs": runs, "compared": _agent_learning.compared(runs), "complete": complete}

    def hand_on(runs: list[dict[str, Any]]) -> None:
        save("gateway", {**kept_results(), "learning": {**kept(runs), "quick": quick}}, quick=quick)

    earlier = kept_results().get("learning", {})
    begun = earlier.get("runs", []) if not earlier.get("complete") else []
    return kept(_agent_learning.measure(begun, hand_on), complete=True)


MEASURES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "request": measure_request,
    "at_once": measure_at_once,
    "drift": measure_drift,
    "learning": measure_learning,
}
only: list[str] = []


def kept_results() -> dict[str, Any]:
    kept = result_file("gateway")
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    return results


def measure(quick: bool) -> dict[str, Any]:
    for part in only or [part for part in PARTS if not (quick and part == "learning")]:
        found = {**MEASURES[part](quick), "quick": quick}
        save("gateway", {**kept_results(), part: found}, quick=quick)
    return kept_results()


def show(results: dict[str, Any]) -> None:
    table = Table(title="the gateway", title_justify="left")
    for column in ("", "measured", "aim"):
        table.add_column(column)
    if request := results.get("request"):
        shown = f"{request['p50_ms']:.2f} ms at p50, {request['p95_ms']:.2f} at p95; {request['cpu_ms']:.2f} ms of a processor"
        table.add_row("a request beside the engine", shown, "3 ms at p50")
    if at_once := results.get("at_once"):
        own, agents = at_once["seconds"]["own loop"], at_once["seconds"]["agents"]
        shown = f"{agents:.2f} s, our loop {own:.2f} s: {at_once['ratio']:.2f} times ({at_once['ms_per_agent']:.0f} ms an agent)"
        table.add_row(f"{at_once['agents']} agents at once", shown, "1.15 times")
    if drift := results.get("drift"):
        table.add_row("drift of an append-only agent", f"{drift['others']} of {drift['tokens']} tokens", "0 of 100000")
    learning = results.get("learning", {})
    for one in learning.get("runs", ()):
        shown = ", ".join(f"{name} {rate['rate']:.3f} {rate['interval']}" for name, rate in one["after"].items())
        table.add_row(f"nano by {one['way']}, seed {one['seed']}", shown, "")
    for name, more in learning.get("compared", {}).items():
        low, high = more["interval"]
        table.add_row(f"agent beside own loop, {name}", f"{more['mean']:+.3f} [{low:+.3f}, {high:+.3f}]", "holds 0")
    Console(width=140).print(table)


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    if request := results.get("request"):
        p50, p95 = Figure(request["p50_ms"], n=request["n"]), Figure(request["p95_ms"], n=request["n"])
        what = "a request over HTTP beside the engine, client included"
        made.append(Row(benchmark="gateway", what=f"{what}: median", unit="ms", ours=p50, target="under 3 ms"))
        made.append(Row(benchmark="gateway", what=f"{what}: 95 of 100 take less than", unit="ms", ours=p95))
    if at_once := results.get("at_once"):
        own, agents = (Figure(at_once["seconds"][name]) for name in ("own loop", "agents"))
        what = f"{at_once['agents']} agents at once on an engine of a fixed pace"
        row = Row(
            benchmark="gateway", what=what, ours=agents, other=own, other_name="our own loop", target="at most 1.15"
        )
        made.append(row)
    if drift := results.get("drift"):
        what = f"drifted tokens of an append-only agent, of {drift['tokens']:,}"
        made.append(Row(benchmark="gateway", what=what, unit="", ours=Figure(drift["others"]), target="0"))
    return made + _agent_learning.rows(results.get("learning", {}).get("runs", ()))


def _more_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], action=_Only, help="parts to measure")


class _Only(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Sequence[Any] | str | None, option: str | None = None
    ) -> None:
        only.extend(values or ())


if __name__ == "__main__":
    run("gateway", __doc__, "fewer repetitions, and no training", measure, show, _more_flags)

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
learning  nano's arithmetic by recipes/agents/arithmetic.py and by our own loop, with the same rewards, questions, steps,
          seeds and settings, those of recipes/configs/nano.yaml but for fewer steps. Each training is kept when it
          ends; if this is interrupted, the next time goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from _machine import ROOT
from _reporting import benchmark, kept, parser_of, progress, save
from _rows import Figure, Row

from toolgrpo.testing import ScriptedEngine

SEEDS, STEPS, TIME_LIMIT_S = (1, 2, 3), 30, 4 * 3600.0  # of the trainings
WAYS = {"own loop": "nano.yaml", "agent": "agent.yaml"}
REWARDS = ("--reward", "accuracy", "exact_match", "--reward_weights", "0.5", "0.5")
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
    from toolgrpo.build import load_tokenizer
    from toolgrpo.chat import resolve_format
    from toolgrpo.models import folder_of

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
    from toolgrpo.rollout import Episode, Scheduler
    from toolgrpo.rollout.scheduler import run_all, run_blocking
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
                    shared = runner(engine, max_completion_length=10_000, **changes)
                    prompt = [{"role": "user", "content": "What is 1 plus 2?"}]
                    episodes = [Episode(tuple(prompt), row={"prompt": prompt, "n": n}) for n in range(AGENTS)]
                    began = time.perf_counter()
                    done = run_blocking(run_all(episodes, Scheduler(shared))).trajectories
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
    """Train what is not among the runs of an interrupted measurement; each training is kept as it ends."""
    before = kept("gateway", quick).get("learning", {})
    runs = before.get("runs", []) if not before.get("complete") else []
    for seed in SEEDS:
        for way in WAYS:
            if any((run["seed"], run["way"]) == (seed, way) for run in runs):
                continue
            progress(f"learning: {way}, seed {seed}")
            runs.append({"seed": seed, "way": way, **trained(way, seed)})
            save("gateway", {**kept("gateway", quick), "learning": {"runs": runs, "quick": quick}}, quick=quick)
    return {"runs": runs, "complete": True}


def trained(way: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        what = ["--config", f"recipes/configs/{WAYS[way]}", "--output_dir", folder, "--quiet"]
        size = ["--seed", str(seed), "--max_steps", str(STEPS)]
        command = [sys.executable, "-m", "toolgrpo", "train", *what, *size, *REWARDS]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIME_LIMIT_S)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {name: summary[name] for name in ("before", "after", "steps", "seconds_per_step")}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "request": measure_request,
    "at_once": measure_at_once,
    "drift": measure_drift,
    "learning": measure_learning,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    for part in options.only or [part for part in PARTS if not (quick and part == "learning")]:
        found = {**PARTS[part](quick), "quick": quick}
        save("gateway", {**kept("gateway", quick), part: found}, quick=quick)
    return kept("gateway", quick)


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    if request := results.get("request"):
        what = "a request over HTTP beside the engine, client included"
        for name, said, target in (("p50_ms", "median", "under 3 ms"), ("p95_ms", "95 of 100 take less than", "")):
            made.append(Row(f"{what}: {said}", Figure(request[name], n=request["n"]), "ms", target=target))
    if at_once := results.get("at_once"):
        own, agents = (Figure(at_once["seconds"][name]) for name in ("own loop", "agents"))
        what = f"{at_once['agents']} agents at once on an engine of a fixed pace"
        made.append(Row(what, agents, other=own, other_name="our own loop", target="at most 1.15 times as long"))
    if drift := results.get("drift"):
        what = f"drifted tokens of an append-only agent, of {drift['tokens']:,}"
        made.append(Row(what, Figure(drift["others"]), "", target="0"))
    runs = results.get("learning", {}).get("runs", ())
    rates = {(run["seed"], run["way"]): run["after"]["sampled"]["rate"] for run in runs}
    both = [(seed, rates[seed, "agent"], rates[seed, "own loop"]) for seed in SEEDS if (seed, "agent") in rates]
    more = f" ({Figure.of_seeds([agent - own for _, agent, own in both]).signed})" if both else ""
    for seed, agent, own in both:
        what = f"nano's arithmetic by an agent, seed {seed}: sampled success after training{more}"
        made.append(Row(what, Figure(agent), "", Figure(own), "our own loop", more_is_better=True))
    return made


def main() -> None:
    parser = parser_of(__doc__, "fewer repetitions, and no training")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure")
    benchmark("gateway", parser, measure, rows)


if __name__ == "__main__":
    main()

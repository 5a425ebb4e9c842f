"""Groups that are carried over to the next step (`carry_over`), alone and with `max_staleness` 1: seconds a step.

    python benchmarks/carry_over.py            # table on the terminal, JSON in benchmarks/results/; 24 minutes
    python benchmarks/carry_over.py --quick    # one round instead of three
    python benchmarks/carry_over.py --simulated        # the simulation alone, in a second

Every run trains nano on 8 groups of 4 episodes a step, of up to 5 turns of 8 sampled tokens; whether a turn calls the tool
and how long that takes is scripted by question and episode (`_rollout_loops.py`), the same for all. `even`: a call takes 0.25
to 0.75 s. `stragglers`: one call in twenty takes ten times as long. Tokens are really sampled, by colocated vLLM, and really
trained on. Each way is a process of its own, and the rounds are interleaved. A step is everything between two optimizer
steps; the first ones of a phase and the last ones of a run are left out.

`simulated` is what a step would take if the engine and the training pass cost nothing but `ENGINE_S` and `TRAIN_S` each and
had the machine for themselves: the same groups, the same rule of admission.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from _reporting import progress, run, save
from _rollout_loops import MAX_TURNS, TOOLS, ScriptedDecisions, _turn, _uid, decision, question
from _rows import Figure, Row

GROUP, GROUPS, TOKENS, LATENCY_S = 4, 8, 8, 0.5
PHASES = ("even", "stragglers")
WARM, MEASURED, LAST = 3, 6, 2
WAYS = {"0": (0, 0.0), "0 + 0.25": (0, 0.25), "1": (1, 0.0), "1 + 0.25": (1, 0.25), "1 + 0.5": (1, 0.5)}
ENGINE_S, TRAIN_S, TURN_S = 0.5, 0.5, 0.05  # of the simulation


def factor_of(uid: int, turn: int, phase: str) -> float | None:
    """The latency of a turn's call, as a multiple of the nominal one; None if it answers."""
    factor = decision(uid, turn)
    if factor is None or phase == "even":
        return factor
    return factor * (10 if random.Random(uid * 31 + turn).random() < 0.05 else 1)


def path_s(uid: int, phase: str) -> float:
    """How long an episode takes."""
    seconds = 0.0
    for turn in range(MAX_TURNS):
        factor = factor_of(uid, turn, phase)
        seconds += TURN_S
        if factor is None:
            break
        seconds += factor * LATENCY_S
    return seconds


def simulated(phase: str, staleness: int, share: float, steps: int = 200) -> float:
    """Seconds a step, by the rule of admission itself."""
    from toolgrpo.signal.admission import Admission
    from toolgrpo.trainer.groups_ahead import Lookahead

    lookahead, plain = Lookahead(staleness, share), Admission.of(GROUPS, max_groups_drawn=1)
    ends: dict[int, float] = {}
    line: list[int] = []
    now = busy = 0.0
    owed = 0
    for step in range(steps):
        rule = lookahead.rule(plain, steps - step)
        for _ in range(GROUPS + rule.beyond - len(line)):
            busy = max(busy, now) + ENGINE_S / GROUPS
            group = len(ends)
            slowest = max(path_s(group * GROUP + member, phase) for member in range(GROUP))
            ends[group] = max(now + slowest, busy)
            line.append(group)
        ended: list[int] = []
        for group in sorted(line, key=lambda one: ends[one]):
            ended.append(line.index(group))
            live = [True if place in ended else None for place in range(len(line))]
            decided = rule.decide(live, ended=ended, owed=owed)
            if decided.admitted is not None:
                break
        assert decided.admitted is not None
        now = max(now, ends[line[ended[-1]]]) + TRAIN_S
        line = [one for place, one in enumerate(line) if place not in decided.admitted]
        owed = decided.owed
    return now / steps


def measure_one(way: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as answer:
        command = [sys.executable, __file__, "--one", way, "--into", answer.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(Path(answer.name).read_text())
    steps = len(PHASES) * (WARM + MEASURED) + LAST
    assert found["episodes"] == GROUP * GROUPS * steps, "each step has its episodes, and no more"
    return found


def train_one(way: str, target: Path) -> None:
    """Run one training and write what its steps took."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.calls import AttemptStatus, CallAttempt
    from toolgrpo.chat import resolve_format
    from toolgrpo.chat.base import ParsedTurn
    from toolgrpo.models import NANO
    from toolgrpo.observe.options import RecordedShare

    staleness, share = WAYS[way]
    plan = [phase for phase in PHASES for _ in range(WARM + MEASURED)] + [PHASES[-1]] * LAST
    measured = [place >= WARM for _ in PHASES for place in range(WARM + MEASURED)] + [False] * LAST
    at = [0]
    seconds: dict[str, list[float]] = defaultdict(list)
    told: dict[str, list[float]] = defaultdict(list)

    class Decisions(ScriptedDecisions):
        """Episodes of a question differ by the order in which they begin."""

        begun: dict[int, int] = defaultdict(int)  # noqa: RUF012

        def prompt(self, messages: Any, schemas: Any, **kwargs: Any) -> list[int]:
            ids = super().prompt(messages, schemas, **kwargs)
            uid = _uid.get()
            _uid.set(uid * GROUP + self.begun[uid] % GROUP)
            self.begun[uid] += 1
            return ids

        def parse(self, ids: Any, **kwargs: Any) -> Any:
            factor = factor_of(_uid.get(), _turn.get(), plan[at[0]])
            _turn.set(_turn.get() + 1)
            if factor is None:
                return ParsedTurn("x", None, (), False)
            attempt = CallAttempt(AttemptStatus.OK, "", "wait", {"seconds": LATENCY_S * factor})
            return ParsedTurn("x", None, (attempt,), False)

    class Timing(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                decisions.begun.clear()
            at[0] = state.global_step
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if measured[at[0]]:
                seconds[plan[at[0]]].append(time.perf_counter() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            for name, value in (logs or {}).items():
                if name.startswith("overlap/"):
                    told[name].append(float(value))

    folder, model = Path(tempfile.mkdtemp()), str(NANO)
    (folder / "wait_tool.py").write_text(TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    decisions = Decisions(resolve_format(tokenizer), lambda: LATENCY_S)
    trainer = ToolGRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 7) / 7 for ids in completion_ids],
        ToolGRPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=GROUP * GROUPS,
            num_generations=GROUP,
            max_completion_length=512,
            max_turns=MAX_TURNS,
            max_turn_tokens=TOKENS,
            max_steps=len(plan),
            max_staleness=staleness,
            carry_over=share,
            vllm_max_model_length=1024,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
            learning_rate=1e-6,
            shuffle_dataset=False,
            record_episodes=RecordedShare(False),
            quiet=True,
        ),
        Dataset.from_list([{"prompt": question(uid)} for uid in range(512)]),
        processing_class=tokenizer,
        tools=folder / "wait_tool.py",
        chat=decisions,
        callbacks=[Timing()],
    )
    with trainer:
        trainer.train()
        target.write_text(json.dumps({"seconds": seconds, "overlap": told, "episodes": trainer.n_episodes}))


def measure(quick: bool) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[float]]] = {way: {phase: [] for phase in PHASES} for way in WAYS}
    staleness: dict[str, float] = {}
    results = {"seconds": seconds, "most_staleness": staleness, "simulated": ideal()}
    rounds = 1 if quick else 3
    for number in range(rounds):
        for way in WAYS:
            progress(f"round {number + 1} of {rounds}, max_staleness + carry_over {way}")
            found = measure_one(way)
            for phase in PHASES:
                seconds[way][phase] += found["seconds"][phase]
            staleness[way] = max(found["overlap"].get("overlap/staleness", [0.0]))
        save("carry_over", results, quick=quick)
    return results


def ideal() -> dict[str, dict[str, float]]:
    """How many times faster than one after the other, by the simulation.

    One after the other is staleness 0 with all episodes of a step begun after the pass of the one before.
    """
    return {
        phase: {way: simulated(phase, 0, 0.0) / simulated(phase, *of) for way, of in WAYS.items()} for phase in PHASES
    }


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    return [
        Row(
            benchmark="carry_over",
            what=f"a step of {GROUPS} groups, {phase} tools, max_staleness {WAYS[way][0]}, carry_over {WAYS[way][1]:g}",
            ours=Figure.of_steps(results["seconds"][way][phase]),
            other=Figure.of_steps(results["seconds"][str(WAYS[way][0])][phase]),
            other_name="carry_over 0",
        )
        for way in WAYS
        if WAYS[way][1]
        for phase in PHASES
    ]


def show(results: dict[str, Any]) -> None:
    print("\nseconds a step (mean), and times faster than staleness 0; in brackets by the simulation")
    print(f"{'staleness + carried':>20} " + " ".join(f"{phase:>28}" for phase in PHASES))
    for way in WAYS:
        cells = []
        for phase in PHASES:
            mean = statistics.fmean(results["seconds"][way][phase])
            faster = statistics.fmean(results["seconds"]["0"][phase]) / mean
            cells.append(f"{mean:>9.2f} s {faster:>6.2f}x [{results['simulated'][phase][way]:.2f}x]")
        print(f"{way:>20} " + " ".join(f"{cell:>28}" for cell in cells))


def show_simulated() -> None:
    for phase, of in ideal().items():
        print(f"{phase:>12}: " + ", ".join(f"{way}: {faster:.2f}x" for way, faster in of.items()))


def hidden_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulated", action="store_true", help="the simulation alone")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(add_help=False)
    hidden_flags(asked)
    known, _ = asked.parse_known_args()
    if known.simulated:
        show_simulated()
    elif known.one is not None:
        from toolgrpo.startup import prepare

        prepare()
        train_one(known.one, known.into)
    else:
        run("carry_over", __doc__, "one round", measure, show, hidden_flags)

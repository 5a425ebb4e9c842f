"""Recording a run and reporting it: what they cost, and how fast the report answers.

    python benchmarks/report.py [--quick] [--run OUTPUT_DIR]

Prints one table and writes benchmarks/results/report.json:

* recording as a share of a step of the embedded job: processor time of the recorder's and the step log's own calls,
  without token records and with the default of 4 episodes a step (4 steps are left out as warm-up);
* the report of 10,000 episodes of the nano run: seconds, peak memory of the process that makes it (beside that of a
  quarter as many and of four times as many), megabytes. With `--run` they are those of a recorded run (`make train` leaves one in outputs/nano),
  without it those of the steps above; either way steps are repeated until there are enough;
* that report in a real Chromium: seconds until it can be used, until the first search is answered right after that,
  and for a later search. Left out where no Chromium is installed;
* the size of the report of the run itself, where one was given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import ROOT
from _reporting import benchmark, parser_of
from _rows import Figure, Row

from toolgrpo.support.process_setup import prepare

prepare()  # before anything imports PyTorch, as in recipes/train.py

BUILD = r"""
import json, re, sys, time
from pathlib import Path
from toolgrpo.report.build import build_report
began, cpu = time.monotonic(), time.process_time()
built = build_report([Path(sys.argv[1])])
peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
spent = {"s": time.monotonic() - began, "processor_s": time.process_time() - cpu}
print(json.dumps({**spent, "mib": peak, "mb": built.n_bytes / 1e6, "n": built.n_shown}))
"""
SEARCH = """
(async () => {
  const field = document.getElementById("find-text");
  field.value = %s;
  const began = performance.now();
  field.dispatchEvent(new Event("input"));
  const before = document.querySelector("p.count");
  await new Promise((done) => {
    const look = () => {
      const count = document.querySelector("p.count");
      if (count !== before && count.dataset.milliseconds !== undefined) done();
      else requestAnimationFrame(look);
    };
    look();
  });
  return performance.now() - began;
})()
"""


class Stopwatch:
    """Adds up the processor time of the main thread in some calls, a step at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, method: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        setattr(owner, method, timed)


def recorded_job(folder: Path, steps: int, record_tokens: int) -> dict[str, float]:
    """Some steps of the embedded job; the share of a step's processor time that recording took."""
    from transformers import TrainerCallback

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.data import load_tasks
    from toolgrpo.models import NANO
    from toolgrpo.rewards import get_reward

    trainer = ToolGRPOTrainer(
        str(NANO),
        [get_reward("accuracy"), get_reward("exact_match")],
        ToolGRPOConfig(
            str(folder),
            record_tokens=record_tokens,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=224,
            max_turn_tokens=64,
            max_turns=5,
            max_steps=steps,
            learning_rate=4e-4,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=load_tasks("arithmetic"),
        tools=str(ROOT / "tools_funcs" / "arithmetic_tools.py"),
    )
    watch = Stopwatch()
    for method in ("batch_done",):
        watch.wrap(trainer.recorder, method)
    for method in ("choose", "hear"):
        watch.wrap(trainer._token_tap, method)
    for method in ("on_log", "on_step_end", "batch_done"):
        watch.wrap(trainer.step_log, method)
    whole: list[float] = []
    own: list[float] = []

    class EachStep(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began, self.before = time.perf_counter(), watch.seconds

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            whole.append(time.perf_counter() - self.began)
            own.append(watch.seconds - self.before)

    trainer.add_callback(EachStep())
    try:
        trainer.train()
    finally:
        trainer.close()
    step_s, record_s = statistics.median(whole[4:]), statistics.median(own[4:])
    return {"step_s": step_s, "record_ms": 1000 * record_s, "share": record_s / step_s}


def repeated(source: Path, target: Path, n: int) -> None:
    """Write `n` training episodes: those of a recording, its steps repeated under new numbers until there are enough."""
    target.mkdir(parents=True)
    (target / "vocabulary.jsonl").write_bytes((source / "vocabulary.jsonl").read_bytes())
    episodes = [line for line in (source / "episodes.jsonl").open(encoding="utf-8") if '"mode": "train"' in line[:60]]
    tokens: dict[int, str] = {json.loads(line)["episode"]: line for line in (source / "tokens.jsonl").open()}
    size = sum('"step": 0,' in line[:40] for line in episodes)
    steps = [line for line in (source / "steps.jsonl").open(encoding="utf-8") if '"kind": "step"' in line]
    with (target / "steps.jsonl").open("w", encoding="utf-8") as log:
        for step in range(-(-n // size)):
            log.write(json.dumps(json.loads(steps[step % len(steps)]) | {"step": step}) + "\n")
    with (target / "episodes.jsonl").open("w", encoding="utf-8") as file, (target / "tokens.jsonl").open("w") as seen:
        for number in range(n):
            record = json.loads(episodes[number % len(episodes)])
            old = record["episode"]
            record |= {"step": number // size, "episode": number, "group": number - number % 8}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            if old in tokens:
                seen.write(json.dumps(json.loads(tokens[old]) | {"step": number // size, "episode": number}) + "\n")


def built(folder: Path) -> dict[str, float]:
    """Make a report in a process of its own."""
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def in_browser(page: Path) -> dict[str, float] | None:
    from tests.support.chromium import Chromium, find_chromium

    if find_chromium() is None:
        return None
    found: dict[str, list[float]] = {"open_s": [], "first_search_s": [], "search_s": []}
    for _ in range(3):
        with Chromium() as browser:
            browser.look(1280, 900)
            found["open_s"].append(browser.open(f"{page.as_uri()}#/find"))
            found["first_search_s"].append(browser.run(SEARCH % '"divide 4"') / 1000)
            for word in ("the answer is 1", "not a tool", "subtract", "zzz"):
                found["search_s"].append(browser.run(SEARCH % json.dumps(word)) / 1000)
    return {name: statistics.median(values) for name, values in found.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    steps, n = (6, 1000) if options.quick else (16, 10_000)
    source: Path | None = options.run
    results: dict[str, Any] = {"episodes": n}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        results["recording"] = {
            name: recorded_job(base / name, steps, record_tokens)
            for name, record_tokens in (("without_tokens", 0), ("with_tokens", 4))
        }
        for name, count in (("quarter", n // 4), ("whole", n), ("four_times", 4 * n)):
            repeated(source or base / "with_tokens", base / name, count)
            results[name] = built(base / name)
        results["browser"] = in_browser(base / "whole" / "report.html")
        if source is not None:
            results["own"] = built(source)
    return results


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for name, goal in (("without_tokens", 1), ("with_tokens", 3)):
        one = results["recording"][name]
        what = f"recording {name.replace('_', ' ')}, share of a step of {one['step_s']:.2f} s"
        made.append(Row(what, Figure(100 * one["share"]), "%", target=f"under {goal} %"))
    for name, n in (("quarter", 1 / 4), ("whole", 1), ("four_times", 4)):
        if name in results:
            report, of = f"report of {n * results['episodes']:,.0f} episodes", results[name]
            made.append(Row(report, Figure(of["s"]), target="under 20 s" if n == 1 else ""))
            made.append(Row(f"{report}: memory", Figure(of["mib"]), "MiB"))
            made.append(Row(f"{report}: size", Figure(of["mb"]), "MB", target="under 30 MB" if n == 1 else ""))
    browser = results.get("browser") or {}
    for name, target in (("open_s", "under 2 s"), ("first_search_s", ""), ("search_s", "under 0.5 s")):
        if name in browser:
            what = f"in Chromium: {name.removesuffix('_s').replace('_', ' ')}"
            made.append(Row(what, Figure(browser[name]), target=target))
    if "own" in results:
        made.append(Row("report of the run itself: size", Figure(results["own"]["mb"]), "MB", target="under 5 MB"))
    return made


def main() -> None:
    parser = parser_of(__doc__, "fewer steps, 1,000 episodes")
    parser.add_argument("--run", type=Path, metavar="OUTPUT_DIR", help="a recorded run of the embedded job")
    benchmark("report", parser, measure, rows)


if __name__ == "__main__":
    main()

"""What `info_gain` costs: its pass without gradient beside the training pass, on the same episodes (a part of `credit.py`).

nano's architecture, and four groups of eight episodes of random tokens in the shape of chains of four calls: a prompt of 330
tokens, five turns of 36 and results of 14. The training pass is forward and backward over all rows, prompts shared; the other
asks for an answer of four tokens at the beginning of each turn. Both are timed in turn, and the fastest of REPEATS counts.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["measure", "show"]

GROUPS, GROUP = 4, 8
PROMPT, TURNS, TURN, RESULT, ANSWER = 330, 5, 36, 14, 4
REPEATS = 5


def measure(quick: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolgrpo.models import folder_of
    from toolgrpo.shared_pass.answers import mean_answer_logps
    from toolgrpo.shared_pass.scoring import SharedPass
    from toolgrpo.trainer.trl_seam import add_fused_head, tune_fused_head

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder_of("nano"))
    model = AutoModelForCausalLM.from_config(config).float()
    add_fused_head(model)
    tune_fused_head(torch.device("cpu"))
    groups, repeats = (1, 1) if quick else (GROUPS, REPEATS)
    width = TURNS * TURN + (TURNS - 1) * RESULT
    prompts = torch.randint(5, config.vocab_size, (groups, 1, PROMPT)).expand(-1, GROUP, -1).reshape(-1, PROMPT)
    rows = torch.cat([prompts, torch.randint(5, config.vocab_size, (groups * GROUP, width))], dim=1)
    answer = list(range(5, 5 + ANSWER))
    questions = [(row[: PROMPT + turn * (TURN + RESULT)].tolist(), answer) for row in rows for turn in range(TURNS)]

    def train() -> None:
        model.train()
        shared = SharedPass(mode="on")
        scored = shared.score_completions(model, rows, torch.ones_like(rows), width, unwrapped=model)
        assert scored is not None
        scored.logps.mean().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        model.zero_grad()

    def ask() -> None:
        mean_answer_logps(model, questions, max_tokens=len(rows) * rows.shape[1])

    times: dict[str, list[float]] = {"training": [], "info_gain": []}
    for _ in range(repeats + 1):  # the first one warms up
        for name, work in (("training", train), ("info_gain", ask)):
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    best = {name: min(of[1:] if len(of) > 1 else of) for name, of in times.items()}
    return {
        "seconds": best,
        "share": best["info_gain"] / best["training"],
        "questions": len(questions),
        "rows": len(rows),
    }


def show(results: dict[str, Any]) -> None:
    seconds = results["seconds"]
    print(
        f"info_gain: {seconds['info_gain']:.3f} s for {results['questions']} questions beside a training pass of "
        f"{seconds['training']:.3f} s over {results['rows']} rows: {100 * results['share']:.0f} %"
    )

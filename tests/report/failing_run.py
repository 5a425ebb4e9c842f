"""A real run in which everything that can go wrong in an episode does: what the report shows at its worst.

The model is tiny, and a script says its turns; tools, workers, loop, rewards, recorder and training pass are real.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from toolgrpo.calls import ToolErrorKind
from toolgrpo.engines.base import SampleRequest
from toolgrpo.testing.engine import Reply, ScriptedEngine, ScriptedReply
from toolgrpo.trajectory import StopReason

__all__ = ["KINDS", "run_with_every_error"]

TOOLS = Path(__file__).parents[1] / "fixtures" / "tools" / "failing_tools.py"
WINDOW = 4096  # a token is a byte here
ANSWER = "The answer is 4."


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_ADD = _call("add", a=2, b=2)
_TURNS: dict[str, list[str]] = {
    # calls that fail
    ToolErrorKind.RAISED: [_call("raises"), ANSWER],
    ToolErrorKind.TIMEOUT: [_call("hangs"), ANSWER],
    ToolErrorKind.DIED: [_call("dies"), ANSWER],
    ToolErrorKind.BAD_RESULT: [_call("not_text"), ANSWER],
    ToolErrorKind.LIMIT: [_ADD + _ADD + _ADD, ANSWER],
    ToolErrorKind.INVALID_JSON: ["<tool_call>\n{'name': add}\n</tool_call>", ANSWER],
    ToolErrorKind.UNCLOSED: ['<tool_call>\n{"name": "add", "argu', ANSWER],
    ToolErrorKind.MISSING_NAME: ['<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>', ANSWER],
    ToolErrorKind.UNKNOWN_TOOL: [_call("divide", a=1, b=2), ANSWER],
    ToolErrorKind.BAD_ARGUMENTS: [_call("add", a="two"), ANSWER],
    ToolErrorKind.UNMARKED: ['```json\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n```', ANSWER],
    "long_result": [_call("long"), ANSWER],
    # ends of an episode; those of tools come first
    StopReason.DROPPED: [_call("drops")],
    StopReason.STOP_TOOL: [_call("finish")],
    StopReason.MAX_TURNS: [_ADD] * 4,
    StopReason.LENGTH: ["I think and think. " * 40],
    StopReason.DEADLINE: ["", ""],
    "says_nothing": [""],
    "wrong": ["The answer is five."],
    StopReason.FINISHED: [_ADD, ANSWER],
}
KINDS = tuple(str(kind) for kind in _TURNS)
_GROUP = 4


def run_with_every_error(folder: Path, *, steps: int = 2) -> Path:
    """Train for some steps on episodes of every kind; return the folder of the run."""
    from tests.support.chat_families import trl_tokenizer
    from toolgrpo import ToolGRPOTrainer
    from toolgrpo.testing.trainers import tiny_config, tiny_qwen3

    tokenizer = trl_tokenizer("qwen3")
    first_turns: dict[str, Any] = defaultdict(itertools.count)

    def speak(request: SampleRequest, number: int) -> Reply:
        said = tokenizer.decode(list(request.ids)).rpartition("Question ")[2]
        question, _, episode = said.partition("?")
        kind = next((kind for kind in KINDS if f"<think>\n{kind}\n" in episode), None)
        turn = episode.count("<|im_start|>assistant") - 1
        if kind is None:
            kind = KINDS[(int(question) * _GROUP + next(first_turns[question]) % _GROUP) % len(KINDS)]
        if kind == StopReason.DEADLINE:
            return ScriptedReply((), stalls=True)
        turns = _TURNS[kind]
        text = f"<think>\n{kind}\n</think>\n\n" * (turn == 0) + turns[min(turn, len(turns) - 1)]
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def right(completions: list[Any], **_: Any) -> list[float]:
        return [float(str(completion[-1]["content"]).endswith("4.")) for completion in completions]

    n_groups = len(KINDS) // _GROUP
    rows = [{"prompt": [{"role": "user", "content": f"Question {n}? Use a tool."}]} for n in range(n_groups)]
    config = tiny_config(
        folder,
        per_device_train_batch_size=n_groups * _GROUP,
        num_generations=_GROUP,
        max_steps=steps,
        max_completion_length=700,
        max_turn_tokens=200,
        max_turns=4,
        max_tool_calls=2,
        max_tool_response_tokens=120,
        tool_timeout=0.5,
        episode_timeout=6.0,
        max_dropped_share=1.0,
        record_tokens=n_groups * _GROUP,
    )
    model = tiny_qwen3()
    model.config.max_position_embeddings = WINDOW
    trainer = ToolGRPOTrainer(
        model,
        right,
        config,
        train_dataset=rows,
        processing_class=tokenizer,
        engine=ScriptedEngine(speak, max_model_len=WINDOW),
        tools=str(TOOLS),
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    return folder

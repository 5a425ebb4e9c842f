"""Recorded training runs of a tiny model, one per way of training, replayed token by token.

A run draws with the transformers engine, one episode at a time, so its draws come in one order. A changed weight,
mask or reward changes the tokens of the next step.

    python -m tests.trainer.test_golden_runs            # records all runs anew, into golden_runs.json

Record only where a change of what is trained on is meant, and say so in the commit.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig

from tests.support.trainings import CREDIT_BY_TURN, STAGES, stage_file, step_logs
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.engines.transformers import ReplicaEngine
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer
from toolgrpo.testing.vllm_stand_in import StandInVLLM
from toolgrpo.trainer.trainer import ToolGRPOTrainer
from toolgrpo.trainer.trl.trainer import iter_named_params

pytestmark = [pytest.mark.e2e, pytest.mark.lock]

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("golden_runs.json")
AGENT = """
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in ("a", "b")}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}}

async def run(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        messages += [message, result]
    return {"turns": len(messages)}
"""


class RandomChat(ByteChat):
    """Reads calls from what a random model says: every fourth id ends a turn, two turns in three are calls."""

    stop_ids = (ByteChat.end, *range(0, ByteChat.end, 4))

    def parse(self, ids: Any, *, before: Any = ()) -> ParsedTurn:
        closed = bool(ids) and ids[-1] in self.stop_ids
        if sum(ids) % 3 == 0:
            return ParsedTurn(str(sum(ids)), None, (), closed)
        return ParsedTurn("", None, (CallAttempt(AttemptStatus.OK, "", "add", {"a": len(ids), "b": 1}),), closed)


class Recorded(ToolGRPOTrainer):
    """Keeps what TRL's loss was asked about."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        nothing = torch.zeros_like(inputs["completion_mask"])
        sampled = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        tensors = [inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
        tensors += [sampled, inputs.get("segment_prompts", nothing), inputs["advantages"]]
        rows = [row_of(*row) for row in zip(*(one.tolist() for one in tensors), strict=True)]
        kept = self.__dict__.setdefault("kept", [])
        kept.append({"step": self.state.global_step + 1, "loss": loss.item(), "rows": rows})
        return loss


def row_of(prompt: Any, read: Any, ids: Any, there: Any, mask: Any, starts: Any, adv: Any) -> dict[str, Any]:
    """Return one row of a batch without its padding; `segments` has where later ones begin, and the size of their prompts."""
    n = sum(there)
    return {
        "prompt": zlib.crc32(repr([i for i, one in zip(prompt, read, strict=True) if one]).encode()),
        "ids": " ".join(map(str, ids[:n])),
        "mask": "".join(map(str, mask[:n])),
        "segments": [[at, size] for at, size in enumerate(starts) if size],
        "advantage": adv[:n] if isinstance(adv, list) else adv,
    }


def reward(completions: list[Any], trajectories: list[Any], **_: Any) -> list[float]:
    return [float((sum(t.ids) * 31 + len(t.turns)) % 4) for t in trajectories]


def often_alike(completions: list[Any], trajectories: list[Any], **_: Any) -> list[float]:
    return [float(sum(t.ids) % 5 == 0) for t in trajectories]


def train(folder: Path, *, rewarded: Callable[..., Any] = reward, **changes: Any) -> dict[str, Any]:
    """Train a tiny model, and return what its loss saw, what was logged, and sums over its weights."""
    parts = {"tools": ScriptedTools({"add": lambda a, b: f"{a + b} " * 8}), **changes.pop("parts", {})}
    settings = {
        **{"engine": "transformers", "max_concurrent_episodes": 1, "max_steps": 3, "max_turns": 4},
        "optim": "sgd",  # which rounds no gradient of almost zero to a whole step
        **{"max_turn_tokens": 16, "learning_rate": 0.1, "lr_scheduler_type": "constant", **changes},
    }
    trainer = tiny_trainer(folder, rewarded, None, chat=RandomChat(), kind=Recorded, parts=parts, **settings)
    if settings["engine"] == "vllm_server":
        trainer._proof._engine = None  # the stand-in's log-probabilities are made up, and no run would begin
    try:
        trainer.train()
        weights = {name: tensor.detach().double().abs().sum().item() for name, tensor in iter_named_params(trainer)}
    finally:
        trainer.close()
    names = ("loss", "grad_norm", "reward", "rollout/turns")
    logs = [{name: log[name] for name in names if name in log} for log in step_logs(trainer)]
    return {"passes": trainer.kept, "logs": logs, "weights": weights}


def by_a_server(folder: Path) -> dict[str, Any]:
    """Draw from a stand-in of vLLM, whose tokens depend on the number of the weights it was given."""

    def draw(body: Mapping[str, Any]) -> list[int]:
        version = server.weight_version.rpartition("-")[2]
        chance = random.Random(repr((body["prompt"], version, len(server.asked))))
        drawn: list[int] = []
        while len(drawn) < body["max_tokens"] and not (drawn and drawn[-1] in body["stop_token_ids"]):
            drawn.append(chance.randrange(256))
        return drawn

    with StandInVLLM(draw=draw, max_model_len=512) as server:
        return train(folder, engine="vllm_server", vllm_server_urls=[server.url])


def by_an_agent(folder: Path) -> dict[str, Any]:
    (folder / "agent.py").write_text(AGENT)
    return train(folder / "run", parts={"tools": None, "agent": folder / "agent.py"})


def with_staleness(folder: Path) -> dict[str, Any]:
    """Episodes end before new weights, as with adapters: the tokens would be others by chance."""
    with mock.patch.object(ReplicaEngine, "takes_weights_while_open", False):
        return train(folder, max_staleness=1, max_steps=4)


def with_stages(folder: Path) -> dict[str, Any]:
    """Record what `--penalty`, `--overlong` and `--void_turns` gave, before these were stages."""
    files = [f"{STAGES}/length_penalty.py", stage_file(folder, "overlong", BUFFER=64), f"{STAGES}/void_turns.py"]
    return train(folder, stage_fn=files)


SEVERAL: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}


def several_steps_with_stages(folder: Path) -> dict[str, Any]:
    files = [stage_file(folder, "length_penalty", WEIGHTS={"calls": 0.2}), *CREDIT_BY_TURN["stage_fn"]]
    return train(folder, advantage="loo", stage_fn=files, max_steps=4, **SEVERAL)


STAGED = [f"{STAGES}/length_penalty.py", *CREDIT_BY_TURN["stage_fn"]]
IN_TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "two_processes": {},
    "stages_in_two_processes": {"per_device_train_batch_size": 2, "stage_fn": STAGED},
}


@cache
def in_two_processes() -> dict[str, dict[str, Any]]:
    """Run this file under `accelerate launch`, one run after the other in the same two processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu_ddp.yaml"),
            *("--main_process_port", "0", "-m", "tests.trainer.test_golden_runs", folder),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return {
            name: {f"rank{rank}": json.loads(Path(folder, f"{name}{rank}.json").read_text()) for rank in range(2)}
            for name in IN_TWO_PROCESSES
        }


ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SPOKEN = [
    {"prompt": f"q{i}", "answer": str(i), "user_turns": ["more", "and more"] if i % 2 else None} for i in range(8)
]
LENGTHY = ScriptedTools({"add": lambda a, b: "result " * 13})
FORGETS: dict[str, Any] = {"context": '{"max_tokens": 210, "keep_last_turns": 1}'}
RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "synchronous": train,
    "lora": lambda folder: train(folder, parts={"peft_config": ADAPTER}),
    "dead_groups_replaced": lambda folder: train(folder, rewarded=often_alike, dynamic_sampling="backfill"),
    "staleness": with_staleness,
    "server": by_a_server,
    "agent": by_an_agent,
    "user_turns": lambda folder: train(folder, rows=SPOKEN),
    "drop_results": lambda folder: train(folder, parts={"tools": LENGTHY}, max_completion_length=600, **FORGETS),
    "several_steps": lambda folder: train(folder, max_steps=8, **SEVERAL),
    "two_processes": lambda folder: in_two_processes()["two_processes"],
    "stage_turn_credit": lambda folder: train(folder, **CREDIT_BY_TURN),
    "stages_lengths_void_turns": with_stages,
    "stages_over_several_steps": several_steps_with_stages,
    "stages_in_two_processes": lambda folder: in_two_processes()["stages_in_two_processes"],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_replayed(name: str, tmp_path: Path) -> None:
    found, expected = RUNS[name](tmp_path), json.loads(RECORDED.read_text())[name]
    of_processes = [(found[one], expected[one]) for one in expected] if "rank0" in expected else [(found, expected)]
    for pair in of_processes:
        check(*pair)


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert [one["step"] for one in found["passes"]] == [one["step"] for one in expected["passes"]]
    for number, (one, other) in enumerate(zip(found["passes"], expected["passes"], strict=True)):
        at = f"pass {number}, in step {other['step']}"
        for key in ("prompt", "ids", "mask", "segments"):
            assert [row[key] for row in one["rows"]] == [row[key] for row in other["rows"]], f"{key} of {at}"
        for row, other_row in zip(one["rows"], other["rows"], strict=True):
            assert row["advantage"] == near(other_row["advantage"]), f"advantages of {at}"
        assert one["loss"] == near(other["loss"]), f"loss of {at}"
    assert found["logs"] == [near(log, 1e-4) for log in expected["logs"]]
    assert found["weights"] == near(expected["weights"])


def near(expected: Any, tolerance: float = 1e-6) -> Any:
    return pytest.approx(expected, rel=tolerance, abs=tolerance)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # one of two processes
        for name, settings in IN_TWO_PROCESSES.items():
            found = json.dumps(train(Path(sys.argv[1], name), **settings))
            Path(sys.argv[1], f"{name}{os.environ['RANK']}.json").write_text(found)
        gc.collect()  # a reducer of DDP that outlives the group may hang (tests/shared_pass/test_hybrids.py)
        torch.distributed.destroy_process_group()
    else:
        runs = {}
        for name, run in RUNS.items():
            with ExitStack() as opened:
                runs[name] = run(Path(opened.enter_context(tempfile.TemporaryDirectory())))
        RECORDED.write_text(json.dumps(runs, indent=0) + "\n")

"""The proof for GPUs, as far as a CPU goes: every part that can run does, in small, and the others say what they need."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu_proof
import pytest
import torch
from _gpu_parts import PARTS
from _gpu_place import Figure, Place
from _gpu_shared_pass import host_calls, one_pass
from gpu_proof import NEEDS, main, prove, run_part
from training_pass import Case, build

from tests.support.flash_kernels import attending

HERE = Place("cpu", tiny=True)
IN_THIS_PROCESS = ("speed", "speed_whole", "kept", "flex", "difference_bf16", "difference_fp32")
WITH_VLLM = ("steps_full", "steps_lora", "memory_financial", "memory_aime")
ALONE = (*WITH_VLLM, "contract_transformers", "nano", "adapter", "overlap", "fsdp2", "zero3", "whole_step")


def test_rows_are_written_as_json_and_as_a_table(tmp_path: Path) -> None:
    proof = prove(["sleep", "nccl", "exactness"], HERE, tmp_path)
    found = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert [row["status"] for row in found["rows"]] == ["ok", "needs 2 GPUs; there is none", "needs a GPU"]
    assert found["tiny"] and found["device"] == "no GPU" and found["stamp"]["versions"]["torch"]
    exact = found["rows"][0]["figures"]
    assert len(exact) == 8 and all(figure["value"] <= figure["at_most"] for figure in exact)
    assert not any(row.failed for row in proof.rows)
    table = (tmp_path / "gpu_proof.md").read_text()
    assert "| Sleep mode | needs a GPU | 0 |  |" in table and "in small" in table
    assert "| Shared pass: exact | ok | " in table and "(at most 0.0001)" in table


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_a_part_in_small(name: str) -> None:
    figures = list(PARTS[name].run(HERE))
    assert figures and not [str(figure) for figure in figures if figure.is_off]


@pytest.mark.slow
@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize("name", ALONE)
def test_a_part_that_starts_others(name: str) -> None:
    row = run_part(name, HERE, 900)
    assert row.status == "ok", row.said


def test_every_part_is_run_or_needs_a_gpu() -> None:
    can_run = {name for name in PARTS if PARTS[name].missing(HERE) is None}
    assert can_run == {*IN_THIS_PROCESS, *ALONE, "exactness", "environment"}


def test_a_part_that_fails_says_so_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "sleep", replace(PARTS["sleep"], gpus=0))
    assert main(["--device", "cpu", "--tiny", "--only", "sleep", "nccl", "--out", str(tmp_path)]) == 1
    after, failed = json.loads((tmp_path / "gpu_proof.json").read_text())["rows"]
    assert failed["status"] == "failed" and "Error" in failed["said"]
    assert after["status"].startswith("needs")
    assert "not as it should be: sleep" in capsys.readouterr().out


def test_a_part_ends_at_its_limit() -> None:
    row = run_part("nano", HERE, 0.2)
    assert row.status == "over its limit of 0 s" and row.failed and row.figures == ()


def test_a_budget_is_kept_and_the_next_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("environment", "sleep", "kept", "flex")

    def statuses(budget_s: float, *names: str) -> dict[str, str]:
        assert not any(row.failed for row in prove(names, HERE, tmp_path, budget_s).rows)
        return {row["part"]: row["status"] for row in json.loads((tmp_path / "gpu_proof.json").read_text())["rows"]}

    late = "not begun: the budget was spent"
    assert statuses(0, *asked) == dict.fromkeys(("environment", "kept", "flex", "sleep"), late)
    assert statuses(600, *asked[:3]) == {"environment": "ok", "kept": "ok", "flex": late, "sleep": "needs a GPU"}
    monkeypatch.setattr(gpu_proof, "LEAST_S", 0)
    assert statuses(0.5, "kept", "flex") == statuses(0, "kept") and statuses(0)["flex"] == "cut short by the budget"
    assert statuses(0)["kept"] == "ok", "what is done is not done again"
    with pytest.raises(SystemExit, match="give --out"):
        prove(asked, replace(HERE, tiny=False), tmp_path, 0)


@pytest.mark.slow
def test_a_part_that_was_cut_short_keeps_its_figures() -> None:
    known = Figure("prompt 120, 4 x 20 full: its host calls, of the padded pass's", 7.0)
    row = run_part("speed", HERE, 900, [known])
    assert row.status == "ok" and row.figures[0] == known
    assert [figure.what.split()[5] for figure in row.figures] == ["full:", *["spread:"] * 4]


def test_a_figure_knows_its_bounds() -> None:
    assert not Figure("x", 1.0).is_off and not Figure("x", 1.0, at_most=1.0, at_least=1.0).is_off
    assert Figure("x", 1.1, at_most=1.0).is_off and Figure("x", 0.9, at_least=1.0).is_off
    assert Figure("x", float("nan")).is_off
    assert replace(PARTS["nano"], modules=("torch", "not_here")).missing(HERE) == "needs not_here, not installed here"
    assert "IT IS NOT" in str(Figure("x", 2.0, "s", at_most=1.0))


@pytest.mark.skipif(Place("cuda", tiny=True).n_gpus > 0, reason="about a machine without a GPU")
def test_without_a_gpu_the_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err == f"{NEEDS}\n"


@pytest.mark.parametrize("lengths", ["spread", pytest.param("full", marks=pytest.mark.slow)])
def test_one_attention_call_a_layer_asks_a_host_for_a_tenth_more_than_trls_pass_at_most(lengths: str) -> None:
    """Of twelve layers; `pytest -s` shows the number."""
    model, ids, mask = build(Case(60, 10, 8, lengths, hidden=128, layers=12, vocabulary=97))
    with torch.autocast("cpu", torch.bfloat16), attending("flash"):
        padded, shared = (host_calls(partial(one_pass, way, model, ids, mask, 10)) for way in ("padded", "shared"))
    print(f"{lengths}: {shared} host calls, {shared / padded:.3f} of the padded pass's {padded}")
    assert shared <= 1.1 * padded

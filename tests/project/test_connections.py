"""Parts are connected by values: no part but TRL's seam and checkpointing reads the trainer, and no config is changed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.lock

PACKAGE = Path(__file__).parents[2] / "toolgrpo"
FILES = sorted(PACKAGE.rglob("*.py"))
FOR_TRLS_OWN = "trainer/rollout_func.py"  # TRL hands its trainer to a `rollout_func`
MAY_TAKE_A_TRAINER = {"trainer/trl/trainer.py", "trainer/checkpointing.py", FOR_TRLS_OWN}
CONFIGS = {"args", "config", "script", "script_args", "model_config", "evaluation"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_a_trainer_of_any_kind_is_taken_by_its_seams_only() -> None:
    found = {
        f"{name_of(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.arg == "trainer" and argument.annotation is not None
        if ast.unparse(argument.annotation) in ("Any", "GRPOTrainer", "CallsOfTRL")
    }
    assert {one for one in found if one.partition(":")[0] not in MAY_TAKE_A_TRAINER} == set()
    assert found, "the seams are still found"


def is_field_of_a_config(target: ast.expr) -> bool:
    """`config.x`, `self.config.x`, `parts.config.x`."""
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value
    return (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)) in CONFIGS


def test_no_config_is_changed_after_it_was_made() -> None:
    """TRL and Transformers read three fields only from the config itself; those are put back.

    The configs of `models/` and `shared_pass/` are those of transformers models.
    """
    found = {
        (name_of(path), target.attr)
        for path in FILES
        if path.relative_to(PACKAGE).parts[0] not in ("models", "shared_pass")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target in (one.elts if isinstance(one, ast.Tuple) else [one])
        if isinstance(target, ast.Attribute) and is_field_of_a_config(target)
    }
    assert found == {
        ("trainer/trl/trainer.py", "use_vllm"),
        ("trainer/checkpointing.py", "save_total_limit"),
        ("trainer/checkpointing.py", "eval_on_start"),
    }

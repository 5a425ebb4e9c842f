"""What is private in TRL, vLLM, PyTorch and Transformers is touched in named files, and nowhere else."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Trainer
from trl import GRPOTrainer

import toolgrpo

pytestmark = pytest.mark.lock

PACKAGE = Path(toolgrpo.__file__).parent
TRL = ("chat/response_template.py", *(f"trainer/trl/{name}.py" for name in ("trainer", "calls", "batch")))
VLLM = ("engines/vllm_seam.py", "engines/server_transfer.py")
VLLM_HTTP = tuple(
    f"engines/{name}.py" for name in ("vllm_http", "server_link", "server_weights", "server_transfer", "vllm_worker")
)
SERVED_BY_US = ("gateway/server.py",)  # the same paths of OpenAI's API, from the other side
TORCH = ("shared_pass/torch_seam.py",)
TRANSFORMERS = ("chat/transformers_seam.py", "shared_pass/recurrent_seam.py")

# Documented names that live in a submodule.
PUBLIC = {
    *("accelerate.utils", "datasets", "peft", "peft.tuners.lora", "peft.tuners.trainable_tokens"),
    *("safetensors.torch", "tokenizers"),
    *("torch.nn", "torch.nn.functional", "torch.utils.checkpoint", "torch.utils.cpp_extension", "accelerate.state"),
    *("torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers.trainer_utils", "transformers.cache_utils", "transformers.integrations", "transformers.utils"),
}
CONFIGS = {"args", "config", "script", "script_args", "model_config", "evaluation"}
ROOTS = ("trl", "vllm", "torch", "transformers", "accelerate", "peft")
PRIVATE = re.compile(
    r"\b(?:torch\.ops\.aten\._\w+|torch\._\w+|\w+\._attn_implementation|Variable\._\w+|(?:trainer|accelerator|args)\._[a-z]\w+)"
)
ENDPOINT = re.compile(
    r"[\"'](/(?:collective_rpc|server_info|weight_info|update_weight_version|reset_prefix_cache|pause|resume|"
    r"init_weight_transfer_engine|start_weight_update|update_weights|finish_weight_update|get_world_size|v1/\w+))"
)


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "testing"):
            continue  # stand-ins for what the libraries would load
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def imports(source: str) -> Iterator[str]:
    """The modules of the libraries that a file imports from."""
    for node in ast.walk(ast.parse(source)):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.partition(".")[0] in ROOTS)


def seam_of(module: str) -> tuple[str, ...]:
    root = module.partition(".")[0]
    return {"trl": TRL, "vllm": VLLM, "torch": TORCH, "transformers": TRANSFORMERS}.get(root, ())


def test_a_file_imports_public_modules_only_unless_it_is_the_seam() -> None:
    for file, source in modules():
        for module in imports(source):
            allowed = module in ROOTS and module != "vllm"
            assert allowed or module in PUBLIC or file in seam_of(module), (
                f"toolgrpo/{file} imports {module}. What is no public name of {module.partition('.')[0]} belongs into "
                f"{' or '.join(seam_of(module)) or 'a seam file of its own'}; a documented one into PUBLIC here."
            )


def test_private_names_and_endpoints_stand_in_their_seams() -> None:
    assert all((PACKAGE / file).is_file() for file in (*TRL, *VLLM, *VLLM_HTTP, *TORCH, *TRANSFORMERS))
    for file, source in modules():
        if file not in (*TORCH, *TRL):
            assert PRIVATE.findall(source) == [], f"toolgrpo/{file}: a private name; its seam is {TORCH} or {TRL}"
        if file not in (*VLLM_HTTP, *SERVED_BY_US):
            assert ENDPOINT.findall(source) == [], f"toolgrpo/{file}: an endpoint of vLLM; these stand in {VLLM_HTTP}"


def test_the_trainer_itself_touches_nothing_private_of_trl() -> None:
    source = "".join(map(inspect.getsource, (GRPOTrainer, Trainer)))
    own = set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", source))  # what TRL's trainer and that below it name so
    touched = set(re.findall(r"(?:self|super\(\))\.(_[A-Za-z]\w*)", (PACKAGE / "trainer/trainer.py").read_text()))
    assert own and touched & own == set(), f"make it a method in one of {TRL}"


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
        (name, target.attr)
        for name, source in modules()
        if not name.startswith(("models/", "shared_pass/"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target in (one.elts if isinstance(one, ast.Tuple) else [one])
        if isinstance(target, ast.Attribute) and is_field_of_a_config(target)
    }
    of_checkpointing = {("trainer/checkpointing.py", name) for name in ("save_total_limit", "eval_on_start")}
    assert found == {("trainer/trl/trainer.py", "use_vllm"), *of_checkpointing}

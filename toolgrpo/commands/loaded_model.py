"""The model that an evaluation asks: its tokenizer, and its weights for the engine.

Where colocated vLLM generates, the weights go from their files into vLLM one by one, and no second
copy is made of them; other engines, adapters, quantized models and older weight formats are loaded
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import unset_hf_deepspeed_config

from toolgrpo.build import Parts, load_tokenizer
from toolgrpo.commands.job import Job, init_kwargs_of
from toolgrpo.engines.base import Engine
from toolgrpo.engines.build import ENGINES, choose_engine
from toolgrpo.engines.policy import Policy
from toolgrpo.errors import ModelError
from toolgrpo.evaluation.run import policy_of_model
from toolgrpo.models import base_of_adapter, is_adapter, merged_adapter, missing_folder
from toolgrpo.models.untrained_markers import weight_files
from toolgrpo.rollout import Player
from toolgrpo.support.offline import settle_hub
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer.assembly import engine_lines
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.hardware import check_backend


def load_model(job: Job, name: str, *, toolbox: ToolProvider | None = None, player: Player | None = None) -> Parts:
    """Load this model, whole in each process, and put the parts around it together. An adapter's folder is loaded with
    its base model.
    """
    init_kwargs, path = init_kwargs_of(job.model), Path(job.model_path(name))
    config = job.config.changed(model_init_kwargs=init_kwargs)
    check_backend(Accelerator(cpu=config.use_cpu))
    unset_hf_deepspeed_config()  # else ZeRO-3 would split the parameters while they are loaded
    without_base = is_adapter(path)
    kwargs = {"trust_remote_code": config.trust_remote_code, **init_kwargs}
    base = base_of_adapter(path) if without_base else str(path)
    settle_hub(base)
    try:
        policy = None if without_base else _policy_of_files(path, kwargs, config)
        policy = policy or _policy_of_whole(path, kwargs, config, without_base=without_base)
    except (OSError, ValueError, ImportError) as error:
        what = f"the model {path} cannot be loaded"
        if without_base:
            what = f"the adapter in {path} cannot be loaded onto its base model {base}"
        raise ModelError(missing_folder(base) or f"{what}: {error}") from error
    tokenizer = load_tokenizer(
        str(path),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        call_markers=config.call_markers,
    )
    parts = Parts.of(config, tokenizer, toolbox=toolbox, player=player, named_model=name, model=str(path))
    return parts.with_model(policy)


def engine_of(parts: Parts, say: Callable[[str], None]) -> Engine:
    """Return the engine of a model that is talked to, and say which it is."""
    built = parts.open_engine()
    for line in engine_lines(parts, built):
        say(line)
    return built.engine


def _policy_of_files(path: Path, kwargs: Mapping[str, Any], config: ToolGRPOConfig) -> Policy | None:
    """Return a policy whose weights are read when the engine gets them; None where it must be whole."""
    options = config.engine_options()
    if not ENGINES[choose_engine(options).name].stands_alone:
        return None
    origin = {"revision": kwargs.get("revision"), "trust_remote_code": kwargs["trust_remote_code"]}
    shape = AutoConfig.from_pretrained(path, **origin)
    if "quantization_config" in kwargs or getattr(shape, "quantization_config", None) is not None:
        return None
    files = weight_files(path, kwargs.get("revision"))
    if not files:
        return None
    policy = policy_of_model(
        model_without_weights(shape, kwargs),
        PartialState(),
        mixed_precision=config.mixed_precision,
        weights=partial(_weights_of, files),
    )
    # A vLLM that is for other devices leaves the work to the transformers engine, which wants a model.
    return policy if ENGINES[choose_engine(options, policy).name].stands_alone else None


def model_without_weights(shape: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the model of this config on the meta device, in the dtype that is asked for."""
    asked = kwargs.get("dtype", "float32")
    dtype = shape.dtype or torch.float32 if asked == "auto" else getattr(torch, str(asked).removeprefix("torch."))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=kwargs["trust_remote_code"])


def _weights_of(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                yield name, opened.get_tensor(name)


def _policy_of_whole(path: Path, kwargs: Mapping[str, Any], config: ToolGRPOConfig, *, without_base: bool) -> Policy:
    if without_base:
        model = merged_adapter(path, **kwargs)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **{"dtype": "float32", **kwargs})
    state = PartialState()
    model = model.to(state.device).eval()
    return policy_of_model(model, state, mixed_precision=config.mixed_precision)

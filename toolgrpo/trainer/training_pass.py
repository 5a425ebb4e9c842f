"""The training pass of a run: how many tokens it reads at a time, and what it keeps. The trainer's constructor opens it.

It goes by the longest rows, by what the model needs for each token (`memory.py`), and by the memory that is free now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

from accelerate.utils import gather_object

from toolgrpo.build import Parts
from toolgrpo.models.adapter_step import join_adapters
from toolgrpo.shared_pass.scoring import SharedPass, most_in_a_pass, unsupported_model
from toolgrpo.shared_pass.torch_seam import attention_name
from toolgrpo.support.process_setup import map_large_blocks
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.memory import Device, PassShape, RunShape, free_bytes, keeps_activations, most_tokens


def open_pass(given: Parts, rows: Any, say: Callable[[str], None]) -> SharedPass:
    """Return the training pass that the config asks for; on a CPU, cut to what fits into memory."""
    args: ToolGRPOConfig = given.config
    policy, free = given.policy, free_bytes()
    if not policy.backend.splits_parameters:
        join_adapters(policy.model)
    shape = PassShape.of(policy.model, checkpointing=args.gradient_checkpointing)
    is_whole = policy.device.type == "cpu" and not policy.backend.splits_parameters
    sizes = PassSizes.of(given, rows) if is_whole else None
    if sizes is None or shape is None or free is None:
        return args.shared_pass()
    if shape.is_large(min(sizes.largest, args.max_tokens_per_pass or sizes.largest)):
        map_large_blocks()
    most = most_tokens(shape, **sizes._asdict(), free=free, given=args.max_tokens_per_pass, say=say)
    return SharedPass(mode=args.prefix_sharing, max_tokens=most)


class PassSizes(NamedTuple):
    """The most tokens of a training pass, those of one row, and whether prompts are shared."""

    largest: int
    of_a_row: int
    shares: bool

    @classmethod
    def of(cls, given: Parts, rows: Any) -> Self | None:
        """Return the sizes for these rows; None for those of a stream."""
        args, limits = given.config, given.config.episode_limits()
        sized = rows if hasattr(rows, "__len__") else ()
        window = given.prompts.window(sized, limits.max_completion_length, given.prompt_room)
        if window is None:
            return None
        whole = args.prefix_sharing == "off" or args.torch_compile or unsupported_model(given.policy.model) is not None
        n_rows, group = args.per_device_train_batch_size, args.num_generations
        n_prompts = n_rows if whole else -(-(n_rows + group - math.gcd(n_rows, group)) // group)
        prompt, completion = window.longest_prompt + window.room, window.max_completion_length
        return cls(n_prompts * prompt + n_rows * completion, prompt + completion, not whole)


def settled_checkpointing(given: Parts, engine: str, rows: Any, say: Callable[[str], None]) -> Parts:
    """Return the parts with `gradient_checkpointing: auto` settled; until here TRL took it for true."""
    if given.config.gradient_checkpointing != "auto":
        return given
    # One for all: processes that differed would make other collective calls in their backward passes.
    keeps = all(gather_object([may_keep_activations(given, engine, rows, say)]))
    return replace(given, config=given.config.changed(gradient_checkpointing=not keeps))


def may_keep_activations(given: Parts, engine: str, rows: Any, say: Callable[[str], None]) -> bool:
    """Return whether a training pass of this process may keep all activations (`gradient_checkpointing: auto`).

    Not where the sizes are not known beforehand: agents, environments, compaction, shared-out weights, experts.
    """
    args, tools, policy = given.config, given.toolbox, given.policy
    config = policy.base_model.config
    grows = given.player or args.context or (isinstance(tools, Toolbox) and tools.has_environment)
    odd = getattr(config.get_text_config(), "num_experts_per_tok", None) or attention_name(config) == "eager"
    is_plain = policy.backend.kind in ("NO", "MULTI_CPU", "MULTI_GPU") and not (grows or odd)
    sizes, n_processes = PassSizes.of(given, rows) if is_plain else None, policy.backend.n_processes
    run, tokens = None, 0
    if sizes is not None:
        tokens = sizes.largest
        if args.prefix_sharing == "auto" and sizes.shares:
            unshared = args.per_device_train_batch_size * sizes.of_a_row
            tokens = min(unshared, most_in_a_pass(policy.device.type, tokens))
        if args.max_tokens_per_pass and sizes.shares and n_processes == 1:
            tokens = min(tokens, max(args.max_tokens_per_pass, sizes.of_a_row))
        asked: dict[str, Any] = {"dtype": policy.dtype, "engine": engine, "at_a_time": args.engine_options().max_rows}
        run = RunShape.of(policy.model, args, context=sizes.of_a_row, **asked)
    free, device = free_bytes(policy.device), Device.here(policy.device)
    return keeps_activations(run, device, tokens=tokens, free=free, n_processes=n_processes, say=say)

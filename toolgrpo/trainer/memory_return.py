"""Long runs on a CPU:
what the allocator keeps without using it goes back to the system, every so many steps.

`toolgrpo.startup` lets the allocator keep what is freed, which makes a step faster. Batches differ
in length from step to step, so without this the kept memory would spread over more and more of the
heap: resident memory would creep up although the memory in use stays the same.

Not covered: memory of accelerators, which PyTorch's own allocator keeps.
"""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.startup import give_memory_back

__all__ = ["MemoryReturn"]

_EVERY_STEPS = 50


class MemoryReturn(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Gives unused memory back at the end of every 50th step, where training runs on the CPU."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step % _EVERY_STEPS == 0 and args.device.type == "cpu":
            give_memory_back()

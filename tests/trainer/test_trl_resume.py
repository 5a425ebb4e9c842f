"""What checkpoints and resuming rely on in TRL, Transformers and accelerate. A failure says what to look at."""

from __future__ import annotations

import inspect

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.trainer.utils import RepeatSampler

from toolgrpo.trainer import checkpointing  # noqa: F401  # registers the device name

pytestmark = pytest.mark.contract


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_the_place_in_a_generation_batch_is_still_two_attributes() -> None:
    text = source(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in text, "see place_in_batch"
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in text, "see restore_place_in_batch"
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in text


def test_the_sampler_still_has_one_generator_for_all_epochs() -> None:
    """If TRL learns to start in a later epoch by itself, `skip_epochs` must go."""
    assert not hasattr(RepeatSampler, "set_epoch")
    first = RepeatSampler(list(range(20)), mini_repeat_count=1, batch_size=2, seed=5)
    epochs = [list(first), list(first)]
    second = RepeatSampler(list(range(20)), mini_repeat_count=1, batch_size=2, seed=5)
    torch.randperm(second.num_samples, generator=second.generator)
    assert list(second) == epochs[1] != epochs[0]


def test_checkpoints_are_still_written_and_rotated_in_one_call() -> None:
    assert list(inspect.signature(GRPOTrainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    text = source(Trainer._save_checkpoint)
    assert "save_total_limit=self.args.save_total_limit" in text, (
        "rotation is put off through this; see Checkpoints.save"
    )
    assert text.index("_save_rng_state") < text.index("rotate_checkpoints(")


def test_random_numbers_are_still_restored_after_the_batch_is_drawn() -> None:
    text = source(Trainer._run_epoch)
    assert text.index("self.get_batch_samples(") < text.rindex("self._load_rng_state(")
    order = source(Trainer._inner_training_loop)
    assert order.index("on_train_begin") < order.index("self._run_epoch("), "the place is restored in on_train_begin"


def test_the_device_of_a_process_on_the_cpu_can_be_loaded_onto() -> None:
    """PyTorch alone cannot load onto `cpu:0`, which accelerate calls it."""
    import io

    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location=torch.device("cpu", 0))["a"].tolist() == [1.0, 1.0]


def test_fsdp_is_still_for_accelerators_only() -> None:
    """If accelerate sets FSDP up on CPUs by itself, `tests.support.fsdp` must go."""
    assert "DistributedType.MULTI_CPU" not in source(AcceleratorState.__init__)
    assert "fsdp_plugin" in inspect.signature(AcceleratorState.__init__).parameters


def test_the_backend_of_trl_says_what_the_walker_asks() -> None:
    for name in ("is_fsdp", "is_zero3", "gather_params"):
        assert hasattr(DistributedBackend, name), f"DistributedBackend.{name} is gone; see iter_named_params"

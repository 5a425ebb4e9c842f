"""TRL's trainer itself: its place in a batch, its weights, its log and its forward pass. Tested with TRL 1.16.0.

What is used, and why (`tests/trainer/test_trl_seam.py` fails with a sentence when one of these
changes):

* `GRPOTrainer.use_vllm` is False while TRL starts, so it starts no engine of its own (what it says then: `calls.py`);
* `GRPOTrainer._metrics[mode][name]` collects values until TRL's next log;
* `GRPOTrainer._get_per_token_logps_and_entropies` is TRL's one forward pass; `_shared_logps` takes its arguments and
  gives its three results;
* `GRPOTrainer._get_train_sampler` is overridden to keep the sampler: its generator makes the order of every epoch, so a
  run that is resumed in a later epoch has to draw the orders before it (`skip_epochs`);
* `_step` and `_buffered_inputs` are a process's place inside a generation batch, which a checkpoint keeps;
* `GRPOTrainer._save_checkpoint` is overridden, to seal what it wrote, `Trainer._push_from_checkpoint` to push only then, and
  `Trainer._determine_best_metric`, which decides over a stop's save too; `Trainer._load_best_model` loads the one that
  `state.best_model_checkpoint` names;
* `Trainer.evaluation_loop` is overridden: `evaluate` logs the metrics that it returns, with TRL's `_metrics["eval"]`;
* `trl.trainer.utils.add_fused_lm_head` gives a model the head that scores labels tile by tile, for supervised training;
  `SFTTrainer.compute_loss` calls `model(labels=..., fused_lm_head=True)` and reads four fields of what it gives
  (`sharing_model`);
* `trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE` and `trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE`, the tokens and the
  words of a tile, and `trl.trainer.utils._use_triton`, which there only says whether tokens without a label are left out:
  made for GPUs, all three cost a CPU memory and time (`tune_fused_head`);
* `trl.trainer.utils.add_fused_lm_head` reads `num_experts` of every model that has a load-balancing loss
  (`aux_loss_enabled`), which models without experts do not have;
* `trl.trainer.utils.generate_model_card`, `_name` and `_paper` of a trainer make the `citations` of a model card;
* `VLLMGeneration._iter_named_params` walks the trainer's parameters under their checkpoint names, gathered and merged
  under DeepSpeed, FSDP and PEFT, as the trainer's `_dist` says; it leaves persistent buffers out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import send_to_device
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from trl.trainer.utils import generate_model_card

from toolgrpo.engines.adapters import merged_parameters, merges_exactly, persistent_buffers
from toolgrpo.engines.policy import Backend, Policy, compute_dtype
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.batch import Mode
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.row_order import Training
from toolgrpo.trainer.stopping import HeldOutWatch, RunIsComplete, is_measured
from toolgrpo.trainer.trl.grpo import GRPOTrainer, SFTTrainer

if TYPE_CHECKING:
    from toolgrpo.trainer.checkpointing import Checkpoints

TESTED_VERSIONS = ("1.16.0",)
_TRL_TILE, _CPU_TILE = (4096, 32768), (256, 4096)  # tokens, and words of the vocabulary


class TrainerOfTRL(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """TRL's trainer, with what is private in it as methods."""

    train_sampler: Any = None
    _buffered_inputs: Any  # TRL's
    _checkpoints: Checkpoints
    heldout_watch: HeldOutWatch
    _shared_pass: SharedPass
    _weights_of_step: int | None  # of the engine

    def __init__(self, args: Any, **kwargs: Any) -> None:
        wanted, args.use_vllm = args.use_vllm, False  # so that TRL starts no engine of its own
        try:
            super().__init__(args=args, **kwargs)
        finally:
            args.use_vllm = wanted
        self.tools = trl_jobs.ToolsElsewhere()
        self.log_completions = False  # TRL's own table has no tools in it
        check_router_loss(self)
        tune_fused_head(self.accelerator.device)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    @property
    def n_steps(self) -> int:
        """Return how many steps a training has, from its beginning."""
        return int(self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the metrics of an evaluation; of several data sets their mean success too, by which the best is kept."""
        metrics: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, dict):
            prefix = kwargs.get("metric_key_prefix", args[1] if len(args) > 1 else "eval")
            rates = [metrics[f"{prefix}_{name}_success"] for name in several]
            metrics[f"{prefix}_success"] = fmean(rates) if all(map(is_measured, rates)) else math.nan
        return metrics

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate in a training, which ends before its first step where nothing is left to learn."""
        metrics = super()._evaluate(*args, **kwargs)
        reason = None if self.state.global_step else self.heldout_watch.reason(self.state)
        if reason is not None:
            raise RunIsComplete(f"{reason} before the first step")
        return metrics

    def prediction_step(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "prediction_step computes a loss, and an evaluation has none here; use evaluate() or measure(rows)"
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._checkpoints.save(partial(super()._save_checkpoint, model, trial))

    def _save_step_before(self) -> None:
        self._checkpoints.save_step_before(partial(super()._save_checkpoint, self.model, None))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._checkpoints.once_sealed = partial(super()._push_from_checkpoint, checkpoint_folder)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether to save, which `save_strategy best` takes from it alone: also where a stop has asked for that.

        An evaluation that could score nothing is no best one.
        """
        if not is_measured(metrics.get(str(self.args.metric_for_best_model), 0.0)):
            return bool(self.control.should_save)
        return bool(super()._determine_best_metric(metrics, trial)) or self.control.should_save

    def _load_best(self) -> None:
        """Load the best checkpoint, as Transformers does at the end of a training."""
        if self.state.best_model_checkpoint is not None:
            self._load_best_model()

    def place_in_batch(self) -> dict[str, Any]:
        """Return where this process is in its generation batch, with what is left of it."""
        per_batch = self.args.steps_per_generation * self.num_iterations
        left_over = self._buffered_inputs if self._step % per_batch else None
        return {"step": self._step, "buffered_inputs": left_over, "layout": self._layout()}

    def restore_place_in_batch(self, place: Mapping[str, Any]) -> bool:
        """Go on in the generation batch of a checkpoint; with other batches, at the beginning of one, and return False."""
        self._step, buffered = place["step"], place["buffered_inputs"]
        before = place.get("layout", self._layout())
        if before != self._layout():
            _, accumulated, per_generation = self._layout()
            whole = math.lcm(accumulated, per_generation)  # micro-batches, which are counted from a batch's first
            self._step = self._step // before[1] * accumulated // whole * whole
            self._buffered_inputs = None
            return False
        self._buffered_inputs = None if buffered is None else send_to_device(buffered, self.accelerator.device)
        return True

    def _layout(self) -> list[int]:
        args = self.args
        per_generation = args.steps_per_generation * self.num_iterations
        return [args.per_device_train_batch_size, args.gradient_accumulation_steps, per_generation]

    def skip_epochs(self, n_epochs: int) -> None:
        """Draw the orders of the epochs before a resumed one:
        TRL's sampler has one generator for all of them.
        """
        sampler = self.train_sampler
        if sampler is not None and getattr(sampler, "shuffle", False):
            for _ in range(n_epochs):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def _epoch_order(self, n_rows: int, epoch: int) -> list[int]:
        """Return the order in which TRL's sampler draws the rows of an epoch."""
        if not self.shuffle_dataset:
            return list(range(n_rows))
        # not TRL's own generator, which must not move when rows are drawn ahead of its sampler
        generator = torch.Generator().manual_seed(self.args.seed)
        for _ in range(epoch):
            torch.randperm(n_rows, generator=generator)
        return torch.randperm(n_rows, generator=generator).tolist()

    def _batches_left(self) -> int:
        """Return how many generation batches are to come, with the one that TRL asks for now."""
        args = self.args
        micro_batches = self.state.max_steps * args.gradient_accumulation_steps - self._step
        return math.ceil(float(micro_batches / (args.steps_per_generation * self.num_iterations)))

    def _training(self, load_weights: Callable[[], int]) -> Training:
        """Return what the queue needs to know of this training."""
        return Training(
            step=lambda: int(self.state.global_step),
            left=self._batches_left,
            weights=self.policy.weights,
            load_weights=load_weights,
            save=self._save_step_before,
            log=self._log_metrics,
        )

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add one value per metric; TRL averages them until its next log."""
        collected = self._metrics[mode_of(self)]
        for name, value in metrics.items():
            collected[name].append(value)

    def _count_tokens(self, n_tokens: int) -> None:
        """Add to TRL's running count of tokens, over all processes."""
        self.state.num_input_tokens_seen += int(self._summed(torch.tensor([n_tokens]))[0])
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _summed(self, counts: torch.Tensor) -> torch.Tensor:
        counts = counts.to(self.accelerator.device)
        total: torch.Tensor = self.accelerator.gather(counts).view(-1, len(counts)).sum(dim=0)
        return total

    def _shared_logps(
        self,
        padded: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **other_inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropies and no auxiliary loss, of a pass that reads shared prompts once; or what
        `padded`, TRL's own, gives where that must or should run.
        """
        scored = None
        odd = sorted(name for name, value in other_inputs.items() if value is not None)
        if compute_aux_loss:
            self._shared_pass.fall_back_to_padded(
                "the load-balancing loss counts every token of every row; set router_aux_loss_coef to 0"
            )
        elif odd:
            self._shared_pass.fall_back_to_padded(f"the batch holds more than text ({', '.join(odd)})")
        elif not _is_compiled(self, self._shared_pass):
            scored = self._shared_pass.score(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                unwrapped=self.accelerator.unwrap_model(model),
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                autocast=self.accelerator.autocast(),
            )
        if scored is not None:
            return scored.logps, scored.entropies, None
        asked: dict[str, Any] = {"batch_size": batch_size, "compute_entropy": compute_entropy, **other_inputs}
        return padded(model, input_ids, attention_mask, logits_to_keep, compute_aux_loss=compute_aux_loss, **asked)


def warn_if_untested() -> None:
    """Warn if the installed TRL is not one this file was tested with."""
    if trl.__version__ not in TESTED_VERSIONS:
        warnings.warn(
            f"toolgrpo was tested with TRL {', '.join(TESTED_VERSIONS)}; {trl.__version__} is installed and may not fit.",
            stacklevel=3,
        )


def add_fused_head(model: Any) -> None:
    """Let `model(..., fused_lm_head=True)` give log-probabilities of labels;
    TRL's trainer does this itself.

    With TRL's own tiles, also after `tune_fused_head`: other tiles round otherwise, and of two
    builds of nano that differ by rounding one may be well above the success that its training is to
    start from.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    utils.add_fused_lm_head(model)
    chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TRL_TILE
    utils._use_triton = chunked_logprob._use_triton


def tune_fused_head(device: torch.device) -> None:
    """Let TRL's fused head, on a CPU, score only tokens that have a label, in small tiles.

    A tile of 4 MiB fits into the CPU's caches, and the allocator keeps it for the next one.

    It would score prompts and padding as well, in tiles of 512 MiB where the vocabulary is that
    large. For this process; what it computes stays the same.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    if device.type == "cpu":
        chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = _CPU_TILE
        utils._use_triton = lambda device: True  # it leaves out tokens without a label


def check_router_loss(trainer: GRPOTrainer) -> None:
    """Refuse a load-balancing loss that TRL's head cannot compute: it would raise in the first training pass."""
    config = trainer.model.config.get_text_config()
    n_experts = getattr(config, "num_experts", None)
    if trainer.aux_loss_enabled and not n_experts:
        raise ConfigError(
            f"{type(trainer.model).__name__} is to be trained with a load-balancing loss (router_aux_loss_coef: "
            f"{trainer.router_aux_loss_coef}), but its configuration names no experts that TRL could balance "
            f"(num_experts: {n_experts}); set router_aux_loss_coef to 0."
        )


def policy_of(trainer: GRPOTrainer, backend: Backend) -> Policy:
    """Return the trainer's model as engines need to know it."""
    accelerator = trainer.accelerator
    return Policy(
        get_model=lambda: accelerator.unwrap_model(trainer.model),
        weights=lambda: iter_named_params(trainer, backend),
        dtype=compute_dtype(trainer.model, accelerator.mixed_precision),
        device=accelerator.device,
        backend=backend,
        process_index=accelerator.process_index,
        wait_for_everyone=accelerator.wait_for_everyone,
    )


def pad_id(trainer: GRPOTrainer) -> int:
    """Return the token that TRL fills up with."""
    return int(trainer.processing_class.pad_token_id)


def mode_of(trainer: GRPOTrainer) -> Mode:
    return "train" if trainer.model.training else "eval"


def group_size(trainer: GRPOTrainer, mode: Mode) -> int:
    """Return how many episodes of a question there are."""
    return int(trainer.args.num_generations if mode == "train" else trainer.num_generations_eval)


def iter_named_params(trainer: GRPOTrainer, backend: Backend | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk the weights under their checkpoint names.

    Every process must walk them to the end: gathering is collective.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    backend = backend or trainer.backend
    if not backend.splits_parameters and merges_exactly(trainer.model):
        yield from merged_parameters(trainer.model)
        return
    walker = VLLMGeneration.__new__(VLLMGeneration)  # its __init__ would start an engine
    walker.model = trainer.model
    walker.accelerator = trainer.accelerator
    walker._dist = trainer._dist
    if not _is_wrapped(trainer):
        walker._dist = SimpleNamespace(is_fsdp=False, gather_params=trainer._dist.gather_params)
    yield from walker._iter_named_params()
    yield from persistent_buffers(trainer.model)


def _is_wrapped(trainer: GRPOTrainer) -> bool:
    """Return whether FSDP, if used, has split the model yet: it does when training begins."""
    if not trainer._dist.is_fsdp:
        return True
    return trainer.model_wrapped is trainer.model and isinstance(trainer.model, FSDPModule | FullyShardedDataParallel)


def _is_compiled(trainer: GRPOTrainer | SFTTrainer, shared_pass: SharedPass) -> bool:
    if trainer.args.torch_compile:
        shared_pass.fall_back_to_padded(
            "torch_compile would compile each batch's layout anew; leave one of the two out"
        )
    return bool(trainer.args.torch_compile)


def sharing_model(trainer: SFTTrainer, shared_pass: SharedPass, model: Any) -> Callable[..., Any]:
    """Return what TRL's supervised loss can call for its model: the same values, with what rows begin with read once."""

    def forward(*, labels: Any = None, fused_lm_head: bool = False, use_cache: bool = False, **inputs: Any) -> Any:
        scored = None
        odd = sorted(inputs.keys() - {"input_ids", "attention_mask"})
        if fused_lm_head and odd:
            shared_pass.fall_back_to_padded(f"the model is asked for more than its text ({', '.join(odd)})")
        elif fused_lm_head and not _is_compiled(trainer, shared_pass):
            unwrapped = trainer.accelerator.unwrap_model(model)
            scored = shared_pass.score(
                model, **inputs, scored_mask=labels != -100, unwrapped=unwrapped, compute_entropy=True
            )
        if scored is None:
            return model(labels=labels, fused_lm_head=fused_lm_head, use_cache=use_cache, **inputs)
        return SimpleNamespace(
            log_probs=scored.logps,
            entropy=scored.entropies,
            is_top1=scored.is_top1,
            label_mask=labels[:, 1:] != -100,
        )

    return forward


def citations(*, supervised: bool) -> str:
    """Return what TRL's own model card asks to cite, for SFT or for GRPO."""
    of = SFTTrainer if supervised else GRPOTrainer
    unknown = dict.fromkeys(("base_model", "hub_model_id", "dataset_name", "wandb_url", "trackio_url"))
    cited = {"trainer_name": of._name, "trainer_citation": of._paper.get("citation")}
    card = generate_model_card(**unknown, model_name="", tags=[], **cited)
    return str(card.text).partition("## Citations\n")[2].strip()

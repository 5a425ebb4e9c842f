"""Supervised training of a chat model on conversations, from arguments to a saved model: what `recipes/sft.py` does.

TRL's `SFTTrainer` trains, on tokens and labels that are made here: the same rendering and the same mask as in reinforcement
learning, so what it brings (bf16, LoRA, gradient checkpointing, several processes, DeepSpeed and FSDP, checkpoints) works.

Not covered: packing several conversations into one sequence, which TRL does with FlashAttention.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from trl import ModelConfig, SFTConfig, get_peft_config

from toolgrpo.build import load_tokenizer, markers_line
from toolgrpo.commands.arguments import TOOL_SOURCES
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import init_kwargs_of, of_revision, shape_of, with_lora_modules
from toolgrpo.commands.plugins import tool_sources
from toolgrpo.commands.run_file import config_of_run, keep_run_config, lies_in, read_run, resume_command, run_text
from toolgrpo.commands.show import recording_in
from toolgrpo.commands.table import SFTArguments, SFTOptions
from toolgrpo.data.load import hub_ids
from toolgrpo.engines.policy import Backend, compute_dtype
from toolgrpo.errors import ChatFormatError, ConfigError, DataError, ModelError, ToolGRPOError
from toolgrpo.models import check_weights, folder_of, name_base_whole
from toolgrpo.models.adapter_step import join_adapters
from toolgrpo.models.untrained_markers import output_rows
from toolgrpo.observe.console import SteadyConsole
from toolgrpo.observe.progress import StepProgress, library_bars_off
from toolgrpo.observe.records import iter_episodes
from toolgrpo.options import Changeable, options_of, with_fields_of
from toolgrpo.rollout.row_parts import thinking_of
from toolgrpo.sft.encoder import ConversationEncoder, Example, Schemas, read_conversations
from toolgrpo.sft.from_run import is_training, offered, run_examples
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.support.plain_text import counted
from toolgrpo.support.process_setup import map_large_blocks
from toolgrpo.support.run_lock import claim_folder
from toolgrpo.support.storage import storage_errors
from toolgrpo.tools.open_toolbox import open_tools
from toolgrpo.trainer.checkpoint_files import BegunRun, checkpoint_folder, seal
from toolgrpo.trainer.checkpointing import begin_together
from toolgrpo.trainer.hardware import precision_line, settled_device
from toolgrpo.trainer.memory import PassShape
from toolgrpo.trainer.model_card import ModelCard, SavesWithCard
from toolgrpo.trainer.stopping import GracefulStop
from toolgrpo.trainer.trl.grpo import SFTTrainer
from toolgrpo.trainer.trl.trainer import sharing_model, tune_fused_head


@with_fields_of(SFTOptions)
class ToolSFTConfig(Changeable, SFTConfig):  # type: ignore[misc]  # TRL ships no types
    """TRL's `SFTConfig`, with nothing cut off in silence and what a CPU wants."""

    def __post_init__(self) -> None:
        self.__dict__.update(settled_device(self.__dict__))
        for name in ("packing", "eval_packing", "padding_free", "assistant_only_loss"):
            if getattr(self, name):
                raise ConfigError(f"{name} belongs to TRL's own tokenization and has no effect here; leave it out")
        if self.chat_template_path:
            raise ConfigError(
                "chat_template_path would be saved with the model and not trained on; write the template into the model's "
                "folder, as chat_template.jinja, and leave it out"
            )
        if self.max_steps == 0:
            self.max_steps: int = -1  # one pass over the conversations, or num_train_epochs
        options_of(self, SFTOptions)
        super().__post_init__()


class CardedSFTTrainer(SavesWithCard, SFTTrainer):  # type: ignore[misc]  # TRL ships no types
    """Writes `card`, and `tools.json` where there are tools, beside each model that it saves, and reads once what the
    conversations of a batch begin with.
    """

    def __init__(self, *, card: ModelCard, args: ToolSFTConfig, **arguments: Any) -> None:
        self.card = card
        self._shared_pass = SharedPass(mode=args.prefix_sharing, max_tokens=args.max_tokens_per_pass)
        super().__init__(args=args, **arguments)
        name_base_whole(self.model)
        tune_fused_head(self.accelerator.device)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(sharing_model(self, self._shared_pass, model), *args, **kwargs)


class _Seals(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Seals each checkpoint, once all processes have written it."""

    def __init__(self, accelerator: Any, run: str | None) -> None:
        self._accelerator, self._run = accelerator, run

    def on_save(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._accelerator.wait_for_everyone()
        folder = checkpoint_folder(Path(args.output_dir), state.global_step)
        if self._accelerator.is_main_process and folder.is_dir():
            seal(folder, step=state.global_step, n_processes=self._accelerator.num_processes, run=self._run)


@dataclass(frozen=True, slots=True)
class SFTResult:
    """The losses that were logged, and where the model is."""

    losses: tuple[float, ...]
    folder: Path
    exit_code: int = 0  # 130 where Ctrl-C ended it before its last step


def run(given: Given) -> int:
    """Run the command."""
    return run_sft(*sft_arguments(given), SteadyConsole(stderr=True, soft_wrap=True), given).exit_code


def sft_arguments(given: Given) -> tuple[SFTArguments, ToolSFTConfig, ModelConfig]:
    """Return the arguments of a supervised training."""
    sft, config, model = given.made((SFTArguments, ToolSFTConfig, ModelConfig))
    return sft, _with_batch(sft, config), model


def _with_batch(sft: SFTArguments, config: ToolSFTConfig) -> ToolSFTConfig:
    """Return the config with our two names for the sizes of a batch read."""
    at_a_time = sft.micro_batch_size or config.per_device_train_batch_size
    if sft.batch_size is None:
        return config.changed(per_device_train_batch_size=at_a_time)
    if sft.micro_batch_size is None:
        at_a_time = max(1, min(at_a_time, sft.batch_size // config.world_size))
    at_once = at_a_time * config.world_size
    if sft.batch_size % at_once:
        raise ConfigError(
            f"batch_size {sft.batch_size} is not a multiple of the {at_once} conversations that "
            f"{config.world_size} process{'' if config.world_size == 1 else 'es'} take at once; change it, or "
            f"--micro_batch_size"
        )
    return config.changed(per_device_train_batch_size=at_a_time, gradient_accumulation_steps=sft.batch_size // at_once)


def run_sft(
    sft: SFTArguments, config: ToolSFTConfig, model: ModelConfig, console: Console, given: Given | None = None
) -> SFTResult:
    """Load, train, save. Meanwhile no other run may write into the output folder.

    What was `given` to the command is kept there for the command that resumes.
    """
    claim = claim_folder(Path(config.output_dir), config.process_index)
    if claim.warning is not None:
        console.print(claim.warning, markup=False)
    try:
        folder, path = Path(config.output_dir), str(folder_of(str(model.model_name_or_path)))
        say = partial(console.print, markup=False, highlight=False)
        text = None if given is None else run_text(given)  # while the files of an earlier run are in place
        begun = begin_together(folder, config.resume_from_checkpoint, say, unsealed=True, model=path)
        if text is not None and config.process_index == 0:
            keep_run_config(text, folder, begun.run)
        with library_bars_off():
            return _run(sft, config, model, console, begun)
    finally:
        claim.release()


def _run(sft: SFTArguments, config: ToolSFTConfig, model: ModelConfig, console: Console, begun: BegunRun) -> SFTResult:
    path = str(folder_of(str(model.model_name_or_path)))
    tokenizer = load_tokenizer(
        path,
        revision=model.model_revision,
        trust_remote_code=config.trust_remote_code,
        call_markers=config.call_markers,
    )
    check_weights(path)
    shape = shape_of(path, model, config.trust_remote_code)
    longest = config.max_length or int(shape.config.get_text_config().max_position_embeddings)
    rate = config.learning_rate or learning_rate_for(sum(parameter.numel() for parameter in shape.parameters()))
    schemas = _schemas(sft)
    encode = ConversationEncoder(tokenizer)
    shown = console if config.process_index == 0 else Console(quiet=True)
    say = partial(shown.print, markup=False, highlight=False)
    examples = _examples(sft, encode, longest, schemas, say)
    source = str(sft.from_run or sft.dataset_id_or_path)
    n_tokens = sum(sum(example.mask) for example in examples)
    config = config.changed(
        learning_rate=rate,
        disable_tqdm=True,
        max_length=None,  # nothing is cut: what is too long was refused
        model_init_kwargs=init_kwargs_of(model),
    )
    progress = StepProgress(shown)
    folder = Path(config.output_dir)
    if model.use_peft:
        model = with_lora_modules(model, lambda: shape)
    labels = [  # -100 where nothing is learnt; TRL takes rows with labels as they are
        [token if learnt else -100 for token, learnt in zip(example.ids, example.mask, strict=True)]
        for example in examples
    ]
    try:
        trainer = CardedSFTTrainer(
            card=ModelCard(
                base_model=str(model.model_name_or_path),
                supervised=True,
                tools=schemas,
                data=f"{Path(source).name if sft.from_run else source}, {len(examples)} conversations",
                datasets=[] if sft.from_run else hub_ids(source, sft.dataset_split),
                system_prompt=sft.system_prompt,
                is_adapter=bool(model.use_peft),
                chat=encode.chat.name,
            ),
            model=path,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": [list(one.ids) for one in examples], "labels": labels}),
            processing_class=tokenizer,
            peft_config=of_revision(get_peft_config(model), model),
            callbacks=[progress],
        )
    except ToolGRPOError:
        raise
    except (ValueError, ImportError, OSError) as error:
        raise ModelError(f"--model_name_or_path {model.model_name_or_path}: {error}") from error
    if not Backend.of(trainer.accelerator).splits_parameters:
        join_adapters(trainer.accelerator.unwrap_model(trainer.model))
    longest_here = max(len(example.ids) for example in examples)
    needed = PassShape.of(trainer.model, checkpointing=config.gradient_checkpointing)
    if needed is not None and needed.is_large(longest_here * config.per_device_train_batch_size):
        map_large_blocks()
    trainer.remove_callback(PrinterCallback)
    passes = f"{config.num_train_epochs:g} pass{'' if config.num_train_epochs == 1 else 'es'}"
    how_long = f"{config.max_steps} steps" if config.max_steps > 0 else passes
    progress.say(
        f"{len(examples)} conversations, {n_tokens} tokens to learn, {how_long} on {trainer.accelerator.device.type}, {trainer.accelerator.mixed_precision} mixed "
        f"precision, {config.world_size} process(es), learning rate {rate:.2g}"
    )
    precision = compute_dtype(trainer.model, trainer.accelerator.mixed_precision)
    head = partial(output_rows, trainer.accelerator.unwrap_model(trainer.model))
    for line in (
        precision_line(precision, trainer.accelerator.device),
        markers_line(tokenizer, encode.chat, head, unmarked_calls="accept"),
    ):
        if line is not None:
            progress.say(line)
    with storage_errors("the trained model", folder):
        resumed = None if begun.checkpoint is None else str(begun.checkpoint)
        if resumed is not None:
            progress.say(f"resuming from {resumed}")
        trainer.add_callback(_Seals(trainer.accelerator, begun.run))
        stop = GracefulStop(trainer.accelerator, progress.say)
        trainer.add_callback(stop)
        try:
            with stop:
                trainer.train(resume_from_checkpoint=resumed)
        finally:
            progress.end()
        trainer.save_model(str(folder))
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    change = f"loss {losses[0]:.3f} to {losses[-1]:.3f}; " if losses else ""
    progress.say(f"{change}the {'adapter' if model.use_peft else 'model'} is in {folder}")
    step = trainer.state.global_step
    exit_code = 0
    if stop.stopped_by is not None and step < trainer.state.max_steps:
        exit_code = 130 if stop.stopped_by is signal.SIGINT else 0
        progress.say(f"stopped by {stop.stopped_by.name} after step {step}, which is saved; resume with")
        progress.say(f"  {resume_command('sft', folder)}")
    return SFTResult(losses, folder, exit_code)


def learning_rate_for(n_parameters: int) -> float:
    """Return a peak learning rate at which a model of this size learns a new form in some hundred steps."""
    return float(min(3e-3, max(2e-5, 2e-5 * (1e9 / n_parameters) ** 0.7)))


def _schemas(sft: SFTArguments) -> Sequence[Mapping[str, Any]]:
    """Return the tools that conversations without their own are rendered with."""
    sources = tool_sources(vars(sft))
    if sft.from_run and not any(sources.values()):
        sources = _tools_of_run(sft.from_run)
    toolbox = open_tools(**sources)
    if toolbox is None:
        return ()
    with closing(toolbox):
        return toolbox.schemas


def _tools_of_run(run: str) -> dict[str, Any]:
    """Return the sources of a run's tools, as `open_tools` takes them; those in its own folder are not run unasked."""
    known = _known_of_run(recording_in(Path(run)))
    named = {name: known[name] for name in TOOL_SOURCES if known.get(name)}
    inside = [f"{spec} ({name})" for name, spec in named.items() if lies_in(Path(run), name, str(spec))]
    if inside:
        raise ConfigError(
            f"the tools of {run} are in that folder itself: {', '.join(inside)}. Read them, and if you trust them name them "
            f"with --tools_script, --environment or --mcp_config"
        )
    return tool_sources(named)


def _known_of_run(folder: Path) -> Mapping[str, Any]:
    """Return what a run was given, as far as its folder says so."""
    with suppress(ConfigError):  # it has no such file
        return read_run(config_of_run(folder))
    return {}


def _plays_held_out_rows(known: Mapping[str, Any]) -> bool:
    """Return whether an evaluation, of which this is known, played other rows than those to train on."""
    rows, asked = known.get("dataset_id_or_path"), known.get("eval_dataset_id_or_path")
    if rows is None or known.get("eval_share"):
        return rows is not None
    split = known.get("dataset_split", "train")
    same_split = known.get("eval_split") == split or (known.get("eval_split") is None and Path(str(asked)).is_file())
    return not (asked in (None, rows) and same_split)


def _examples(
    sft: SFTArguments,
    encode: ConversationEncoder,
    max_length: int,
    schemas: Sequence[Mapping[str, Any]],
    say: Callable[[str], object],
) -> list[Example]:
    if sft.from_run:
        return _examples_of_run(sft, encode, max_length, schemas, say)
    examples, without_tools = [], 0
    for index, row in enumerate(read_conversations(str(sft.dataset_id_or_path), sft.dataset_split)):
        shown = schemas if row["tools"] is None else row["tools"]
        without_tools += not shown and any(message.get("tool_calls") for message in row["messages"])
        try:
            example = _encoded(encode, row, shown, sft.system_prompt)
        except ChatFormatError as error:
            raise ChatFormatError(f"{sft.dataset_id_or_path}: conversation {index + 1}: {error}") from error
        if len(example.ids) > max_length:
            raise DataError(
                f"{sft.dataset_id_or_path}: conversation {index + 1} has {len(example.ids)} tokens, but max_length "
                f"is {max_length}; shorten it, or raise --max_length if the model can take more"
            )
        examples.append(example)
    if without_tools:
        say(
            f"note      {counted(without_tools, 'conversation')} of {sft.dataset_id_or_path} call tools that their prompts do not "
            f"show; name them with --tools_script, --environment or --mcp_config, or give the rows a column `tools`"
        )
    for line in untaught_notes(examples, encode.chat.name):
        say(line)
    return examples


def untaught_notes(examples: Sequence[Example], chat_name: str) -> list[str]:
    """Return a line for each part of assistant turns that the template leaves out, with the number of its conversations."""
    parts = Counter(part for example in examples for part in example.untaught)
    return [
        f"note      {part} in {counted(n, 'conversation')} is not taught: the chat template of the {chat_name} format does not print it"
        for part, n in parts.items()
    ]


def _encoded(encode: ConversationEncoder, one: Mapping[str, Any], schemas: Schemas, system: str | None) -> Example:
    begins = system and one["messages"][0]["role"] not in ("system", "developer")
    opening = [{"role": "system", "content": system}] if begins else []
    n_prompt, thinking = len(opening) + one["n_prompt"], one.get("enable_thinking")
    return encode([*opening, *one["messages"]], schemas or None, n_prompt, enable_thinking=thinking)


def _examples_of_run(
    sft: SFTArguments,
    encode: ConversationEncoder,
    max_length: int,
    schemas: Sequence[Mapping[str, Any]],
    say: Callable[[str], object],
) -> list[Example]:
    """Return the successes of a run in this model's format; those that are too long for it are left out."""
    folder = recording_in(Path(str(sft.from_run)))
    trained, known = is_training(folder), _known_of_run(folder)
    if not trained and _plays_held_out_rows(known):
        say("note      these are episodes of held-out rows; measure the model on others")
    found, examples = run_examples(iter_episodes(folder), of_training=trained), list[Example]()
    calls = any(message.get("tool_calls") for one in found.conversations for message in one["messages"])
    if calls and not schemas:
        raise ConfigError(
            f"the episodes of {folder} call tools, and its run.yaml does not say which; name them with --tools_script, "
            f"--environment or --mcp_config"
        )
    kept = []
    for one in found.conversations:
        thinking = {"enable_thinking": thinking_of(one, known.get("enable_thinking"))}
        example = _encoded(encode, {**one, **thinking}, offered(schemas, one), sft.system_prompt)
        if len(example.ids) <= max_length:
            examples.append(example)
            kept.append(one)
        else:
            found.left_out[f"longer than {max_length} tokens (--max_length)"] += 1
    found.conversations = kept
    if not examples:
        raise DataError(f"{folder} has no example to learn from: {found}")
    say(f"examples  {found}, from {folder}")
    for line in untaught_notes(examples, encode.chat.name):
        say(line)
    return examples

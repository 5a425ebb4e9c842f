"""`toolgrpo export`: merged weights, a GGUF file by an outside converter, and what Ollama is told."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolgrpo import ToolGRPOTrainer
from toolgrpo.commands.export import export_lines, merge, modelfile
from toolgrpo.commands.main import read
from toolgrpo.errors import ConfigError, ModelError, ToolGRPOError
from toolgrpo.models import NANO, adapter_with_base, base_of_adapter, name_base_whole
from toolgrpo.tools import load_tools
from toolgrpo.trainer.model_card import ModelCard, write_beside_model

pytestmark = pytest.mark.e2e
TOKENS = torch.arange(20, 52)[None]
SYSTEM = 'Say "done" at the end.\nUse {{ the }} tool.'
CONVERTER = """\
import pathlib, sys
folder, _, outfile, _, outtype = sys.argv[1:]
if outtype == "bf16":
    sys.exit("Model FooForCausalLM is not supported")
pathlib.Path(outfile).write_text(f"{outtype} of {sorted(one.name for one in pathlib.Path(folder).glob('*.safetensors'))}")
"""
Adapter = tuple[Path, torch.Tensor]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """The output of a LoRA training of nano, and the logits of base model and adapter together."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(NANO), lora).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    with load_tools("tools_funcs/arithmetic_tools.py") as tools:
        card = ModelCard(base_model=str(NANO), tools=tools.schemas, is_adapter=True, system_prompt=SYSTEM, chat="qwen3")
        write_beside_model(folder, card, "calculating")
    with torch.no_grad():
        return folder, model(TOKENS).logits


def test_merged_weights_give_the_logits_of_base_and_adapter_and_bring_tools_and_card(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, logits = adapter
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    to = tmp_path / "Whole"
    said = export(source, "--merge", to, "--gguf", "q8_0")
    assert "%|" not in capsys.readouterr().err, "bars of libraries"
    assert [line.split()[0] for line in said] == ["merged", "gguf", "ollama"] and "ollama create whole -f" in said[-1]
    with torch.no_grad():
        merged, base = (AutoModelForCausalLM.from_pretrained(one)(TOKENS).logits for one in (to, NANO))
    assert (merged - logits).abs().max() < 1e-4 < 1e-2 < (base - logits).abs().max()
    assert (to / "model.safetensors").stat().st_mode == (to / "config.json").stat().st_mode, "only its owner reads it"
    assert (to / "Whole-q8_0.gguf").read_text() == "q8_0 of ['model.safetensors']"
    assert (to / "Modelfile").read_text().startswith("FROM ./Whole-q8_0.gguf\n")
    assert json.loads((to / "tools.json").read_text()) == json.loads((source / "tools.json").read_text())
    card = (to / "README.md").read_text()
    assert "library_name: transformers" in card and "merged into it" in card
    with pytest.raises(ToolGRPOError, match="converter failed: Model FooForCausalLM is not supported"):
        export(to, "--gguf", "bf16")


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_end_of_a_tied_model_is_of_that_end_alone(end: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(NANO)
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    lora = LoraConfig(r=4, target_modules=["q_proj", end], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(NANO).save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "whole")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(TOKENS).logits
        torch.testing.assert_close(merged, model(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_what_the_training_was_told_is_in_each_export(adapter: Adapter, tmp_path: Path) -> None:
    source = Path(shutil.copytree(adapter[0], tmp_path / "source"))
    (source / "run.yaml").write_text("system_prompt: Be brief.\nenable_thinking: false\nreward: accuracy\n")
    export(source, "--merge", tmp_path / "whole")
    first = (tmp_path / "whole/Modelfile").read_text()
    export(tmp_path / "whole")
    assert 'SYSTEM """Be brief."""' in first
    assert (tmp_path / "whole/Modelfile").read_text() == first
    said = modelfile("x", source, {"enable_thinking": False})
    for kwargs in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        assert modelfile("x", source, {"chat_template_kwargs": kwargs}) == said != modelfile("x", source, {})


def export(*words: object) -> list[str]:
    return list(export_lines(read("export", [*map(str, words)])))


def test_a_training_does_not_begin_with_an_adapter(adapter: Adapter) -> None:
    with pytest.raises(ModelError, match=r"LoRA.*--merge"):
        ToolGRPOTrainer(str(adapter[0]), "tool_result")


def test_ollama_prints_what_the_model_saw_in_training(adapter: Adapter) -> None:
    source, _ = adapter
    text = modelfile("x.gguf", source, {"system_prompt": "Use {{ the }} tool."})
    schemas = json.loads((source / "tools.json").read_text())
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    printed = {"tools": schemas, "tokenize": False, "add_generation_prompt": True}
    prompt = AutoTokenizer.from_pretrained(source).apply_chat_template(asked, **printed)
    opening, turn = prompt.split("<|im_start|>user\nQ<|im_end|>\n")
    assert "{{ if .System }}" + opening.replace("\nS\n", "\n{{ .System }}\n") + "{{ else }}" in text
    assert f'{{{{ if ne $role "assistant" }}}}{turn}{{{{ end }}}}' in text
    assert 'SYSTEM """Use {{ the }} tool."""\n' in text and "FROM ./x.gguf\n" in text


def test_the_card_asks_as_the_training_did_and_says_how_an_adapter_is_served(adapter: Adapter) -> None:
    card = (adapter[0] / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(adapter[0])!r}")
    names: dict[str, Any] = {}
    exec(code.partition("reply = ")[0], names)
    asked = names["tokenizer"].decode(names["prompt"]["input_ids"][0])
    assert asked.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools") and '"name": "multiply"' in asked
    assert f"`vllm serve {NANO} --tokenizer FOLDER --enable-lora --lora-modules NAME=FOLDER --enable-auto" in card


@pytest.mark.vllm
@pytest.mark.needs_cpu_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_serves_the_adapter_beside_its_base_model(adapter: Adapter) -> None:
    from tests.support.vllm_process import VLLMServerProcess

    source, logits = adapter
    extra = ["--enable-lora", "--lora-modules", f"calculating={source}"]
    with VLLMServerProcess(NANO, max_model_len=256, extra_args=extra, ready_timeout_s=600) as server:
        said = {}
        for model in ("calculating", str(NANO)):
            asked = {"model": model, "prompt": TOKENS[0].tolist(), "max_tokens": 1, "temperature": 0, "logprobs": 0}
            asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(asked).encode(), headers)
            with urllib.request.urlopen(request, timeout=300) as answer:
                (choice,) = json.load(answer)["choices"]
            said[model] = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
    expected = logits[0, -1].log_softmax(-1)
    token, logprob = said["calculating"]
    assert token == int(expected.argmax()) and abs(logprob - float(expected.max())) < 1e-3
    assert abs(said[str(NANO)][1] - float(expected[said[str(NANO)][0]])) > 1e-2, "the base model is another"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ADAPTER", "--merge"),
        ("ADAPTER --merge .", "is there already and not empty"),
        ("ADAPTER --merge to --gguf q8_0", "git clone https://github.com/ggml-org/llama.cpp"),
        ("recipes", "holds no trained model"),
        (f"{NANO} --merge to", "whole weights already"),
    ],
)
def test_what_cannot_be_exported(words: str, says: str, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=says):
        export(*words.replace("ADAPTER", str(adapter[0])).split())


@pytest.mark.parametrize("broken", ["tokenizer_config.json", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_merged_is_one_sentence(broken: str, adapter: Adapter, tmp_path: Path) -> None:
    source = Path(shutil.copytree(adapter[0], tmp_path / "source"))
    if broken == "adapter_config.json":
        (source / broken).write_text((source / broken).read_text().replace('"r": 4', '"r": 8'))
    elif broken == "tokenizer_config.json":
        for file in (*source.glob("tokenizer*"), source / "chat_template.jinja"):
            file.unlink()
    else:
        (source / broken).write_bytes((source / broken).read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"no tokenizer|cannot be merged|cut short"):
        merge(source, tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())


def named(folder: Path, base: object) -> Path:
    """An adapter's folder that names this base model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def test_a_base_model_is_found_from_any_folder_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, elsewhere = tmp_path / "mine" / "org" / "name", tmp_path / "elsewhere"
    base.mkdir(parents=True)
    elsewhere.mkdir()
    (base / "config.json").touch()
    monkeypatch.chdir(elsewhere)
    beside = named(tmp_path / "mine" / "outputs" / "a", "org/name")
    assert base_of_adapter(beside) == str(base), "relative to a folder above it"
    assert base_of_adapter(named(elsewhere / "b", str(base))) == str(base)
    assert base_of_adapter(named(elsewhere / "c", "owner/name")) == "owner/name", "a hub id stays"
    far = named(elsewhere / "d", "org/name")
    (far / "run.yaml").write_text(f"model_name_or_path: {base}\n")
    assert base_of_adapter(far) == str(base), "as its run has it"
    with adapter_with_base(far) as opened:
        assert json.loads((Path(opened) / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    (far / "run.yaml").write_text(f"model_name_or_path: {tmp_path / 'gone' / 'name'}\n")
    for folder, said in ((far, "gone/name"), (named(elsewhere / "e", "./models/x"), r"\./models/x")):
        with pytest.raises(ModelError, match=rf"{folder.name}.*{said}"):
            base_of_adapter(folder)
    for broken in (None, 3, ""):
        with pytest.raises(ModelError, match="names no base model"):
            base_of_adapter(named(elsewhere / "f", broken))


def test_an_adapter_names_its_base_by_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed, kept in (("org/name", str(tmp_path / "org" / "name")), ("owner/name", "owner/name"), (None, None)):
        config = LoraConfig(base_model_name_or_path=typed)
        name_base_whole(SimpleNamespace(peft_config={"default": config}))
        assert config.base_model_name_or_path == kept

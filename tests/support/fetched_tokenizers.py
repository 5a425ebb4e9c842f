"""Real tokenizers of many families, with the models' own chat templates, where `tests/real_tokenizers/fetch.py` has put them.

A case is a vocabulary, a chat template, and what has to be added to the vocabulary's tokens. It is *real* where all three
are one model's; otherwise the template and the special tokens are a model's own, over another model's merges, which shows
all that matters here but the ids of words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.chat_families import CALLS, CHATML, THINK, VISION, template_text
from tests.support.real_tokenizers import NotAtHand

VOCABULARIES = (
    *("qwen3", "llama3", "gemma3", "deepseek_v3", "gpt_oss", "qwen3_5", "mistral_tekken", "gemma4", "command_r"),
    "smollm2",
)
_QWEN35 = (*CHATML, *VISION, *CALLS, *THINK)
_LFM2 = tuple(f"<|{name}_{side}|>" for name in ("tool_list", "tool_call", "tool_response") for side in ("start", "end"))
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink", *CALLS, *THINK)
_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]"),
    "[/THINK]",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A tokenizer to try: a vocabulary, and where its chat template comes from."""

    vocabulary: str
    template: str  # "own", "trl:NAME", a file of llama.cpp's collection without its ending, or the text itself
    eos: str
    bos: str | None = None
    added: tuple[str, ...] = ()  # special tokens that the vocabulary lacks
    dropped: tuple[str, ...] = ()  # and those that the model lacks
    real: bool = True


_MISTRAL_ENDS: dict[str, Any] = {"eos": "</s>", "bos": "<s>", "added": _MISTRAL}
_DEEPSEEK: dict[str, Any] = {"eos": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>"}
_GEMMA4: dict[str, Any] = {"eos": "<eos>", "bos": "<bos>"}
_LLAMA: dict[str, Any] = {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>"}
_COHERE: dict[str, Any] = {"eos": "<|END_OF_TURN_TOKEN|>", "bos": "<BOS_TOKEN>"}
_LFM: dict[str, Any] = {
    "eos": "<|im_end|>",
    "bos": "<|startoftext|>",
    "added": ("<|startoftext|>", *_LFM2),
    "real": False,
}
_HERMES: dict[str, Any] = {"eos": "<|im_end|>", "bos": "<|begin_of_text|>", "real": False}
_NEMOTRON: dict[str, Any] = {
    "eos": "<|im_end|>",
    "bos": "<s>",
    "added": ("<s>", *CHATML, *CALLS, *THINK),
    "real": False,
}

_PHI4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + "
    "'<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

CASES: dict[str, Case] = {
    "qwen2.5": Case("qwen3", "Qwen-Qwen2.5-7B-Instruct", "<|im_end|>", dropped=(*THINK, *CALLS[2:])),
    "qwen3": Case("qwen3", "own", "<|im_end|>"),
    "qwen3-2507": Case("qwen3", "trl:qwen3_instruct_2507", "<|im_end|>"),
    "qwen3-coder": Case("qwen3", "Qwen3-Coder", "<|im_end|>"),
    "qwq": Case("qwen3", "Qwen-QwQ-32B", "<|im_end|>"),
    "qwen3.5": Case("qwen3_5", "Qwen3.5-4B", "<|im_end|>", added=_QWEN35),
    "qwen3.6": Case("qwen3_5", "trl:qwen3_6", "<|im_end|>", added=_QWEN35),
    "qwen3.8": Case("qwen3_5", "trl:qwen3_8", "<|im_end|>", added=_QWEN35),
    "llama3": Case("llama3", "trl:llama3", **_LLAMA),
    "llama3.1": Case("llama3", "meta-llama-Llama-3.1-8B-Instruct", **_LLAMA),
    "llama3.2": Case("llama3", "meta-llama-Llama-3.2-3B-Instruct", **_LLAMA),
    "llama3.3": Case("llama3", "meta-llama-Llama-3.3-70B-Instruct", **_LLAMA),
    "gpt-oss": Case("gpt_oss", "openai-gpt-oss-120b", "<|return|>"),
    "gemma2": Case("gemma3", "google-gemma-2-2b-it", "<eos>", "<bos>", real=False),
    "gemma3": Case("gemma3", "own", "<end_of_turn>", "<bos>"),
    "gemma4": Case("gemma4", "google-gemma-4-31B-it", **_GEMMA4),
    "gemma4-interleaved": Case("gemma4", "google-gemma-4-31B-it-interleaved", **_GEMMA4),
    "gemma4-first": Case("gemma4", "own", **_GEMMA4),
    "deepseek-v3": Case("deepseek_v3", "own", **_DEEPSEEK),
    "deepseek-r1": Case("deepseek_v3", "llama-cpp-deepseek-r1", **_DEEPSEEK, added=THINK),
    "deepseek-v3.1": Case("deepseek_v3", "deepseek-ai-DeepSeek-V3.1", **_DEEPSEEK, added=THINK),
    "deepseek-r1-qwen": Case("qwen3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", **_DEEPSEEK, added=(), real=False),
    "command-r": Case("command_r", "trl:cohere", **_COHERE),
    "command-r-tool-use": Case("command_r", "CohereForAI-c4ai-command-r-plus-tool_use", **_COHERE),
    "command-r7b": Case("command_r", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", **_COHERE, real=False),
    "mistral-nemo": Case("mistral_tekken", "mistralai-Mistral-Nemo-Instruct-2407", **_MISTRAL_ENDS),
    "mistral-small-3.2": Case("mistral_tekken", "Mistral-Small-3.2-24B-Instruct-2506", **_MISTRAL_ENDS),
    "ministral-3": Case("mistral_tekken", "mistralai-Ministral-3-14B-Reasoning-2512", **_MISTRAL_ENDS),
    "devstral": Case("mistral_tekken", "unsloth-mistral-Devstral-Small-2507", **_MISTRAL_ENDS),
    "smollm2": Case("smollm2", "own", "<|im_end|>", "<|im_start|>"),
    "smollm3": Case("llama3", "HuggingFaceTB-SmolLM3-3B", "<|im_end|>", added=(*CHATML, *THINK, *CALLS), real=False),
    "hermes2-pro": Case("llama3", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", **_HERMES, added=CHATML),
    "hermes3": Case("llama3", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", **_HERMES, added=(*CHATML, *CALLS)),
    "glm-4.6": Case("qwen3", "GLM-4.6", "<|endoftext|>", added=_GLM, real=False),
    "glm-4.7": Case("qwen3", "GLM-4.7-Flash", "<|endoftext|>", added=_GLM, real=False),
    "lfm2": Case("qwen3", "LFM2-8B-A1B", **_LFM),
    "lfm2-v2": Case("qwen3", "trl:lfm2_v2", **_LFM),
    "lfm2.5": Case("qwen3", "LFM2.5-8B-A1B", **_LFM),
    "lfm2.5-instruct": Case("qwen3", "LFM2.5-Instruct", **_LFM),
    "nemotron-3": Case("mistral_tekken", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", **_NEMOTRON),
    "phi-4": Case("gpt_oss", _PHI4, "<|im_end|>", added=(*CHATML, "<|im_sep|>"), real=False),
}


def cache_folder() -> Path:
    named = os.environ.get("TOOLGRPO_TOKENIZERS")
    return Path(named) if named else Path.home() / ".cache" / "toolgrpo" / "tokenizers"


def llama_cpp_templates() -> list[str]:
    """Return the names of the chat templates that were fetched; none where none were."""
    return sorted(path.stem for path in (cache_folder() / "templates").glob("*.jinja"))


def fetched_tokenizer(name: str) -> Any:
    """Return the tokenizer of one of `CASES`, new each time; `NotAtHand` where it was not fetched."""
    from transformers import PreTrainedTokenizerFast

    case = CASES[name]
    backend = _backend(case.vocabulary, case.added, case.dropped)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=case.bos, eos_token=case.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _template(case)
    return tokenizer


def _template(case: Case) -> str:
    if case.template.startswith("{%"):
        return case.template
    if case.template.startswith("trl:"):
        return template_text(case.template.removeprefix("trl:"))
    folder = cache_folder()
    own = folder / case.vocabulary / "chat_template.jinja"
    file = own if case.template == "own" else folder / "templates" / f"{case.template}.jinja"
    if not file.exists():
        raise NotAtHand(f"the chat template {case.template} was not fetched; {_HOW}")
    return file.read_text(encoding="utf-8")


_HOW = "`python tests/real_tokenizers/fetch.py` fetches real tokenizers where there is a network"


@cache
def _read(vocabulary: str) -> str:
    file = cache_folder() / vocabulary / "tokenizer.json"
    if not file.exists():
        raise NotAtHand(f"the vocabulary {vocabulary} was not fetched; {_HOW}")
    return file.read_text(encoding="utf-8")


def _backend(vocabulary: str, added: tuple[str, ...], dropped: tuple[str, ...]) -> Any:
    import json

    from tokenizers import AddedToken, Tokenizer

    text = _read(vocabulary)
    if dropped:
        described = json.loads(text)
        described["added_tokens"] = [entry for entry in described["added_tokens"] if entry["content"] not in dropped]
        text = json.dumps(described)
    backend = Tokenizer.from_str(text)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return backend

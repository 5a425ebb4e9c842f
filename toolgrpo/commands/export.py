"""`toolgrpo export OUTPUT_DIR`: a trained model in the forms that other programs take.

    toolgrpo export outputs/shop --merge shop                 whole weights of a LoRA output, as a hub has them
    toolgrpo export outputs/shop --merge shop --gguf q8_0     and a GGUF file, by llama.cpp's converter
    ollama create shop -f shop/Modelfile                      what it writes for Ollama

The Modelfile prints system message and tools as the chat format of the training does, the tools of `tools.json` word
by word: a model reads another description worse. That is done for ChatML with results in `<tool_response>` (Qwen2.5,
Qwen3 and templates of plain ChatML).

Not covered: what the calls of earlier turns look like, which Ollama prints as compact JSON; other chat formats, for
which a sentence is printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from toolgrpo.chat.base import ChatFormat, tool_message
from toolgrpo.commands.given import RUN_FILE, Given
from toolgrpo.commands.run_file import run_file
from toolgrpo.commands.table import ExportArguments
from toolgrpo.errors import ConfigError, ModelError, ToolGRPOError
from toolgrpo.models import base_of_adapter, check_weights, is_adapter, merged_adapter
from toolgrpo.support.offline import settle_hub
from toolgrpo.support.settings_files import BadSettings, read_yaml
from toolgrpo.support.storage import check_output_folder, share_weights, storage_errors, write_whole
from toolgrpo.trainer.model_card import CARD_FILE, TOOLS_FILE, merged_card

_OF_MODELFILE = ("system_prompt", "enable_thinking", "chat_template_kwargs")
_CONVERTER = "convert_hf_to_gguf.py"
_SYSTEM, _USER, _RESULT = "SYSTEM-MESSAGE", "USER-MESSAGE", "TOOL-RESULT"
_USER_HEAD, _END = "<|im_start|>user\n", "<|im_end|>\n"
_TURNS = (
    '{{ $role := "" }}{{ range .Messages }}'
    '{{ if and (eq $role "tool") (ne .Role "tool") }}<|im_end|>\n{{ end }}'
    '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ $calls := .ToolCalls }}{{ .Content }}'
    "{{ if and .Content $calls }}\n{{ end }}"
    '{{ range $i, $call := .ToolCalls }}<tool_call>\n{"name": "{{ $call.Function.Name }}", "arguments": '
    "{{ $call.Function.Arguments }}}\n</tool_call>{{ if gt (len (slice $calls $i)) 1 }}\n{{ end }}{{ end }}<|im_end|>\n"
    '{{ else if eq .Role "tool" }}{{ if ne $role "tool" }}<|im_start|>user{{ end }}\n'
    "<tool_response>\n{{ .Content }}\n</tool_response>{{ end }}"
    '{{ $role = .Role }}{{ end }}{{ if eq $role "tool" }}<|im_end|>\n{{ end }}'
)


def export_lines(given: Given) -> Iterator[str]:
    """Do what is asked for, and yield a line for each file or folder that was written."""
    (asked,) = given.made((ExportArguments,))
    source, merged = Path(asked.folder), None if asked.merge is None else Path(asked.merge)
    if not (source / "config.json").is_file() and not is_adapter(source):
        raise ConfigError(f"{source} holds no trained model; give the output_dir of a finished training")
    if merged is None and is_adapter(source):
        raise ConfigError(f"{source} holds a LoRA adapter; say where the whole weights go with --merge FOLDER")
    if merged is not None and not is_adapter(source):
        raise ConfigError(f"{source} has whole weights already, so there is nothing to merge; leave --merge out")
    converter = None if asked.gguf is None else _converter()  # missed before a merge, not after it
    folder = source
    if merged is not None:
        folder = merged
        from toolgrpo.observe.progress import library_bars_off  # imports Transformers

        with library_bars_off():
            merge(source, folder, asked.dtype)
        yield f"merged    {folder}"
    weights = "."
    if converter is not None:
        weights = f"{folder.resolve().name}-{asked.gguf}.gguf"
        command = [sys.executable, str(converter), str(folder), "--outfile", str(folder / weights)]
        done = subprocess.run([*command, "--outtype", asked.gguf], capture_output=True, text=True)
        if done.returncode:
            raise ToolGRPOError(f"llama.cpp's converter failed: {done.stderr.strip()[-600:] or 'it says nothing'}")
        yield f"gguf      {folder / weights}"
    try:
        text = modelfile(weights, folder, _config_of(source))
    except ConfigError as error:
        yield f"ollama    no Modelfile: {error}"
        return
    with storage_errors(f"the Modelfile {folder / 'Modelfile'}", folder):
        write_whole(folder / "Modelfile", text)
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._") or "model"
    yield f"ollama    ollama create {name} -f {shlex.quote(str(folder / 'Modelfile'))}"


def merge(source: Path, to: Path, dtype: str = "auto") -> None:
    """Write the adapter in `source` and its base model as one model, with its tokenizer, tools and card."""
    from toolgrpo.build import load_tokenizer

    check_output_folder(to, "the merged model", "--merge")
    base = base_of_adapter(source)
    settle_hub(base)
    check_weights(source)
    tokenizer = load_tokenizer(str(source), call_markers="tokens")  # missed before a merge, not after it
    try:
        model = merged_adapter(source, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError) as error:  # RuntimeError: of another shape
        raise ModelError(f"the adapter in {source} cannot be merged into its base model {base}: {error}") from error
    with storage_errors(f"the merged model {to}", to.parent):
        model.save_pretrained(to)
        share_weights(to)
        tokenizer.save_pretrained(to)
        if (source / TOOLS_FILE).is_file():
            shutil.copy(source / TOOLS_FILE, to)
        with suppress(ConfigError):  # nobody else may read it; what is left out then is told with the Modelfile
            run = _config_of(source)
            if kept := {name: run[name] for name in _OF_MODELFILE if run.get(name) is not None}:
                write_whole(to / RUN_FILE, yaml.dump(kept))  # for the next export
        if (source / CARD_FILE).is_file():
            write_whole(to / CARD_FILE, merged_card((source / CARD_FILE).read_text(encoding="utf-8")))


def modelfile(weights: str, folder: Path, run: Mapping[str, Any]) -> str:
    """Return what `ollama create -f` reads, for these weights and the tokenizer and tools of a folder.

    `run` is what the training was given.
    """
    from toolgrpo.build import load_tokenizer
    from toolgrpo.chat import resolve_format, with_template_arguments

    tokenizer = load_tokenizer(str(folder))
    tools = folder / TOOLS_FILE
    schemas = json.loads(tools.read_text(encoding="utf-8")) if tools.is_file() else []
    arguments = run.get("chat_template_kwargs") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments  # a flag is kept as it was typed
    thinking = arguments.get("enable_thinking", run.get("enable_thinking"))
    chat = resolve_format(with_template_arguments(tokenizer, arguments))
    template = _template(chat, tokenizer, schemas, thinking)
    system = run.get("system_prompt")
    if '"""' in template + (system or ""):
        raise ConfigError(
            'three quotation marks (""") stand in the tools or the system message, which a Modelfile cannot hold'
        )
    return "\n".join(
        [
            f"FROM ./{weights}" if weights != "." else "FROM .",
            f'TEMPLATE """{template}"""',
            *([f'SYSTEM """{system}"""'] if system else []),
            'PARAMETER stop "<|im_end|>"',
            "PARAMETER num_ctx 8192",
            "",
        ]
    )


def _template(chat: ChatFormat, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], thinking: bool | None) -> str:
    """Return Ollama's template, its fixed parts as the chat format renders them."""
    said = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    ids = chat.prompt(said, schemas, enable_thinking=thinking)
    header = str(tokenizer.decode(ids)).partition(_USER)[2].removeprefix(_END)
    call = [*tokenizer.encode('<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>', add_special_tokens=False)]
    asked = [*ids, *call, chat.stop_ids[0]]
    results = [tool_message("x", _RESULT), tool_message("x", _RESULT)]
    after = chat.bridge(asked, results, messages=said, schemas=schemas, enable_thinking=thinking)
    block = f"\n<tool_response>\n{_RESULT}\n</tool_response>"
    if str(tokenizer.decode(after)) != f"\n<|im_start|>user{2 * block}{_END}{header}":
        raise ConfigError(
            f"a Modelfile is written only for ChatML with results in <tool_response> (Qwen2.5, Qwen3, plain ChatML), but this "
            f"is the {chat.name} chat format; Ollama's own template of the base model may do (ollama show --modelfile BASE)"
        )

    def opening(system: bool, shown: Sequence[Mapping[str, Any]]) -> str:
        text = str(tokenizer.decode(chat.prompt(said if system else said[1:], shown, enable_thinking=thinking)))
        fixed = text.partition(_USER)[0].removesuffix(_USER_HEAD).replace("{{", '{{ "{{" }}')
        return fixed.replace(_SYSTEM, "{{ .System }}")

    return (
        f"{{{{ if .Tools }}}}{{{{ if .System }}}}{opening(True, schemas)}{{{{ else }}}}{opening(False, schemas)}{{{{ end }}}}"
        f"{{{{ else if .System }}}}{opening(True, [])}{{{{ else }}}}{opening(False, [])}{{{{ end }}}}"
        f'{_TURNS}{{{{ if ne $role "assistant" }}}}{header}{{{{ end }}}}'
    )


def _config_of(folder: Path) -> Mapping[str, Any]:
    path = run_file(folder)
    try:
        return (read_yaml(path) or {}) if path is not None else {}
    except BadSettings as error:
        raise ConfigError(f"{path} {error}") from error
    except OSError as error:  # only its owner may read it
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _converter() -> Path:
    """Return llama.cpp's script; it comes with llama.cpp, and with no package of Python."""
    of_clone = Path(os.environ.get("LLAMA_CPP", "")) / _CONVERTER
    found = str(of_clone) if "LLAMA_CPP" in os.environ and of_clone.is_file() else shutil.which(_CONVERTER)
    if found is None or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"--gguf needs llama.cpp's {_CONVERTER} on PATH, or LLAMA_CPP=FOLDER of a clone "
            f"(git clone https://github.com/ggml-org/llama.cpp), and the package gguf (pip install gguf)"
        )
    return Path(found)

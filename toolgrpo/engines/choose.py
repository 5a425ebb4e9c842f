"""Which engine a training run uses, and why, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from toolgrpo.engines.base import Engine
from toolgrpo.engines.vllm_seam import vllm_available
from toolgrpo.errors import ConfigError

__all__ = ["EngineChoice", "choose_engine", "given"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    name: str
    why: str


def given(engine: Engine) -> EngineChoice:
    return EngineChoice(engine.name, "given")


def choose_engine(engine: str, *, server_urls: list[str] | None) -> EngineChoice:
    """Resolve `auto`, and refuse what cannot work here."""
    if engine == "auto":
        if server_urls:
            return EngineChoice("vllm_server", "server URLs are configured")
        if vllm_available():
            return EngineChoice("vllm_colocate", "vLLM is installed")
        return EngineChoice("transformers", "vLLM is not installed")
    if engine == "vllm_colocate" and not vllm_available():
        raise ConfigError(
            "engine vllm_colocate needs vLLM, which is not installed: `pip install toolgrpo[cpu]` on a CPU, "
            "`pip install toolgrpo[cuda]` with CUDA, or use --engine transformers."
        )
    if engine == "vllm_server" and not server_urls:
        raise ConfigError(
            "engine vllm_server needs --vllm_server_urls, e.g. http://localhost:8000 (or TRL's --vllm_server_base_url)"
        )
    return EngineChoice(engine, "asked for")

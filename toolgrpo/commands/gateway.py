"""Serve one model by itself, as agents see it in a training: what `toolgrpo gateway` does.

    toolgrpo gateway --model nano --port 8000

For looking, for trying an agent before a training, and for evaluations that others wrote. Every
request stands for itself here, and says how tokens are drawn; nothing is recorded.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from toolgrpo.commands.arguments import GatewayArguments, ScriptArguments, is_missing
from toolgrpo.commands.evaluate import EvaluationConfig
from toolgrpo.commands.given import parse_args
from toolgrpo.commands.loaded_model import load_model
from toolgrpo.commands.parts import RunParts
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.base import Engine
from toolgrpo.errors import ConfigError
from toolgrpo.gateway.agents import MODEL_NAME
from toolgrpo.gateway.openai_forms import ChatRequest, ModelAnswer, TextRequest
from toolgrpo.gateway.server import Endpoint
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner
from toolgrpo.trainer.config import ModelConfig


def parse_gateway_arguments(argv: Sequence[str]) -> tuple[GatewayArguments, EvaluationConfig, ModelConfig]:
    """Read the command line over the YAML file over the defaults."""
    gateway, config, model = parse_args((GatewayArguments, EvaluationConfig, ModelConfig), list(argv))
    if not model.model_name_or_path:
        raise ConfigError(is_missing("model_name_or_path", "gateway"))
    return gateway, config, model


async def answer_alone(shared: EpisodeRunner, request: ChatRequest | TextRequest) -> ModelAnswer:
    """Answer a request in a session of its own."""
    return await GatewaySession(shared, Episode(()), obeys_sampling=True).answer(request)


@dataclass(frozen=True)
class GatewayRun:
    """The arguments of one gateway; `run` serves until it is stopped."""

    gateway: GatewayArguments
    config: EvaluationConfig
    model: ModelConfig
    terminal: Terminal

    def run(self) -> None:
        """Load the model, and answer requests until Ctrl-C or SIGTERM."""
        name = str(self.model.model_name_or_path)
        parts = RunParts(ScriptArguments(), self.config, self.model, self.terminal)
        loaded = load_model(Path(parts.model_path(name)), parts.model_init_kwargs(), self.config)
        built_of = loaded.parts(self.config)
        built = built_of.engine(loaded.policy)
        self.terminal.say(f"engine    {built.choice.name} ({built.choice.why}), {built_of.chat.name} chat format")
        if (line := built_of.markers_line(loaded.head)) is not None:
            self.terminal.say(line)
        limits = EpisodeLimits(max_completion_length=built.engine.max_model_len, max_turns=None)
        shared = EpisodeRunner(replace(built_of.rollouts(built.engine), limits=limits), self.config.sampling_options())
        try:
            built.engine.load_weights(loaded.policy.weights())
            asyncio.run(self._serve(shared, built.engine, [name, *({MODEL_NAME} - {name})]))
        finally:
            built.engine.shutdown()

    async def _serve(self, shared: EpisodeRunner, engine: Engine, names: Sequence[str]) -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, stopped.set)
        gateway = self.gateway
        endpoint = Endpoint(
            names, engine.max_model_len, host=gateway.host, port=gateway.port, everyone=gateway.api_key is None
        )
        await engine.open()
        try:
            endpoint.admit(partial(answer_alone, shared), loop, gateway.api_key or "")
            self.terminal.say(f"serving   {endpoint.url} (models {', '.join(names)}); Ctrl-C ends it. Try:")
            self.terminal.say(_example(endpoint.url, names[0], gateway.api_key))
            await stopped.wait()
            self.terminal.say("stopped")
        finally:
            endpoint.close()
            await engine.close()


def _example(url: str, name: str, key: str | None) -> str:
    body = (
        f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 19 plus 23?"}}], "max_tokens": 64}}'
    )
    shown = f" -H 'authorization: Bearer {key}'" if key else ""
    return f"          curl {url}/chat/completions{shown} -H 'content-type: application/json' -d '{body}'"

"""Serve one model by itself, as agents see it in a training: what `toolgrpo gateway` does.

    toolgrpo gateway --model nano --port 8000

For looking, for trying an agent before a training, and for evaluations that others wrote. Every
request stands for itself here, and says how tokens are drawn; nothing is recorded.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.evaluate import EvaluationConfig
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import Job
from toolgrpo.commands.loaded_model import engine_of, load_model
from toolgrpo.commands.table import GatewayArguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.gateway.agents import MODEL_NAME
from toolgrpo.gateway.openai_forms import ChatRequest, ModelAnswer, TextRequest
from toolgrpo.gateway.server import Endpoint
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner
from toolgrpo.trainer.config import ModelConfig


async def answer_alone(shared: EpisodeRunner, request: ChatRequest | TextRequest) -> ModelAnswer:
    """Answer a request in a session of its own."""
    alone = Episode((), enable_thinking=shared.parts.enable_thinking)
    return await GatewaySession(shared, alone, obeys_sampling=True).answer(request)


def run_gateway(given: Given, terminal: Terminal) -> int:
    """Load the model, and answer requests until Ctrl-C or SIGTERM."""
    gateway, config, model = given.made((GatewayArguments, EvaluationConfig, ModelConfig))
    terminal.console.quiet = terminal.console.quiet or config.quiet
    name = str(model.model_name_or_path)
    parts = load_model(Job(ScriptArguments(), config, model, terminal), name)
    engine = engine_of(parts, terminal.say)
    limits = EpisodeLimits(max_completion_length=engine.max_model_len, max_turns=None)
    shared = EpisodeRunner(replace(parts.rollouts(engine), limits=limits), config.sampling_options())
    try:
        engine.load_weights(parts.policy.weights())
        asyncio.run(_serve(gateway, shared, [name, *({MODEL_NAME} - {name})], terminal))
    finally:
        engine.shutdown()
    return 0


async def _serve(gateway: GatewayArguments, shared: EpisodeRunner, names: Sequence[str], terminal: Terminal) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) is not signal.SIG_IGN:  # as a job in the background ignores Ctrl-C
            loop.add_signal_handler(one, stopped.set)
    engine = shared.parts.engine
    endpoint = Endpoint(
        names, engine.max_model_len, host=gateway.host, port=gateway.port, everyone=gateway.api_key is None
    )
    await engine.open()
    try:
        endpoint.admit(partial(answer_alone, shared), loop, gateway.api_key or "")
        terminal.say(f"serving   {endpoint.url} (models {', '.join(names)}); Ctrl-C ends it. Try:")
        terminal.say(_example(endpoint.url, names[0], gateway.api_key))
        await stopped.wait()
        terminal.say("stopped")
    finally:
        endpoint.close()
        await engine.close()


def _example(url: str, name: str, key: str | None) -> str:
    body = (
        f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 19 plus 23?"}}], "max_tokens": 64}}'
    )
    shown = f" -H 'authorization: Bearer {key}'" if key else ""
    return f"          curl {url}/chat/completions{shown} -H 'content-type: application/json' -d '{body}'"

"""The steps of an update of weights that every route shares: pause, forget, name, resume.

A paused server keeps its requests and computes nothing: those in flight go on with the new weights
where they were. vLLM computes their caches anew, since those of the old weights are forgotten before
the new ones are named. A server whose update failed stays paused, so that nobody draws from half of
it; the next update, of this run or another, resumes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from toolgrpo.engines import server_answers
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import EngineError

_CHUNK_BYTES = 1 << 30
_CACHE_RESET_TRIES = 50

Weights = Iterable[tuple[str, torch.Tensor]]


def pause(server: ServerControl) -> None:
    """Let its requests stay where they are; also where it is paused already."""
    server.post("/pause?mode=keep", read=partial(server_answers.status_is, "paused"))


def resume(server: ServerControl) -> None:
    """Let its requests go on."""
    server.post("/resume", read=partial(server_answers.status_is, "resumed"))


def forget_prefixes(server: ServerControl) -> None:
    """Forget every cached prefix of a paused server, those of requests in flight among them."""
    for _ in range(_CACHE_RESET_TRIES):
        if server.post("/reset_prefix_cache?reset_running_requests=true", read=server_answers.cache_was_emptied):
            return
        time.sleep(0.1)  # a transfer of cached blocks is on its way
    raise EngineError(
        f"the vLLM server at {server.url} could not forget its cached prefixes, which older weights have computed. "
        f"Start it anew, and resume from the last checkpoint."
    )


def name_version(server: ServerControl, version: str) -> None:
    """Name the weights that it holds now."""
    named = partial(server_answers.named_version, version)
    server.post("/update_weight_version", {"new_version": version}, named)


def holds_version(server: ServerControl, version: str) -> bool:
    """Return whether these are the weights that it holds; one that was restarted names others."""
    return bool(server.get("/weight_info", server_answers.version_of_weights) == version)


def for_each(servers: Sequence[ServerControl], action: Callable[[ServerControl], None]) -> None:
    """Do it with all servers at a time."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(action, servers))


def chunks(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of the tensors, about a GiB at a time.

    A gathered tensor lives only until the next one is asked for.
    """
    chunk: dict[str, torch.Tensor] = {}
    n_bytes = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        n_bytes += tensor.nbytes
        if n_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, n_bytes = {}, 0
    if chunk:
        yield chunk

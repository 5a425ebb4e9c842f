"""What every engine refuses, in the same words."""

from __future__ import annotations

from toolgrpo.engines.base import SampleRequest
from toolgrpo.errors import EngineError

__all__ = ["check_request"]


def check_request(request: SampleRequest, max_model_len: int) -> None:
    """Refuse a request that has nothing to continue, asks for nothing, or does not fit the context window."""
    if not request.ids:
        raise EngineError("a request needs at least one token to continue; got none")
    if request.max_tokens < 1:
        raise EngineError(f"a request must ask for at least one token; got max_tokens={request.max_tokens}")
    if len(request.ids) + request.max_tokens > max_model_len:
        raise EngineError(
            f"a request of {len(request.ids)} tokens and max_tokens={request.max_tokens} does not fit the context "
            f"window of {max_model_len}; ask for at most {max_model_len - len(request.ids)} tokens"
        )

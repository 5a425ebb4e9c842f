"""Extension of a `vllm serve` on the CPU:
`--worker-extension-cls toolgrpo.engines.vllm_worker.ToolGRPOWorker`.

vLLM adds the methods of this class to its workers and lets them be called over `/collective_rpc`.
On the CPU a head tied to the embeddings is a packed copy, which vLLM's reload leaves as it was, and
it leaves the experts of a mixture unpacked; without the call below the server would go on drawing
from the old head and from spoilt experts. On GPUs nothing is packed and no extension is needed.
"""

from __future__ import annotations

from typing import Any

from toolgrpo.engines.vllm_seam import pack_experts_again, repack_tied_heads

WORKER_EXTENSION = "toolgrpo.engines.vllm_worker.ToolGRPOWorker"


class ToolGRPOWorker:
    """Mixed into vLLM's worker class by vLLM itself."""

    def toolgrpo_reload_weights(self: Any, weights_path: str) -> None:
        pack_experts_again(self.get_model())
        self.reload_weights(weights_path=weights_path)
        repack_tied_heads(self.get_model())

"""vLLM's NCCL transfer in a server on the CPU, with a store in place of NCCL:
`--worker-extension-cls tests.support.vllm_store_transfer.StoreTransferWorker` and
`--weight-transfer-config '{"backend": "nccl_over_store"}'`.

The meeting, the four phases and their state, and the loading of weights are vLLM's own; each tensor
comes out of the store that the meeting is made over, where NCCL would bring it. To be imported in
such a server alone: it tells torch of a device that is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from toolgrpo.engines.vllm_seam import repack_tied_heads
from toolgrpo.engines.vllm_worker import ToolGRPOWorker


class StoreTransferEngine(NCCLWeightTransferEngine):
    """vLLM's engine for NCCL, but for where the tensors come from."""

    def receive_weights(self, update_info: Any) -> None:
        store = self.model_update_group.group
        for name in update_info.names:
            self.model.load_weights([(name, store.broadcast_obj(None, src=0))])

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        repack_tied_heads(self.model)


class StoreTransferWorker(ToolGRPOWorker):
    """Named, so that the workers import this file before they load their model."""


WeightTransferEngineFactory.register_engine("nccl_over_store", StoreTransferEngine)
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda device=None: None

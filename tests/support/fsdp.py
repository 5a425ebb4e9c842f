"""FSDP2 on a machine without an accelerator, for tests.

accelerate 1.15 sets FSDP up only where it finds a GPU (or the like); on a CPU the same launch becomes plain DDP. PyTorch's
`fully_shard` itself works over gloo. `allow_fsdp_on_cpu` tells accelerate so; everything after that (splitting, gathering,
clipping, saving) is accelerate's and PyTorch's own code.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpu() -> None:
    """Let `ACCELERATE_USE_FSDP=true` mean FSDP in this process from now on, over gloo too."""
    start = AcceleratorState.__init__

    def start_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if wanted and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = start_with_fsdp

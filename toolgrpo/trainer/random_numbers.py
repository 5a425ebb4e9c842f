"""The generators of random numbers of one process, kept and put back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Where Python's, NumPy's and PyTorch's generators were, those of the accelerators too."""

    of_python: Any
    of_numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> Self:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), tuple(cuda))

    def restore(self) -> None:
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

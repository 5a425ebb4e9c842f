"""The matrix products of a training pass, alone: what no pass that computes them can be quicker than.

`recorded` notes every product that PyTorch computes in a block: those of the layers and of the output head as they are, with
their shapes and strides, and those inside its attention kernels (two forward, five backward for every pair of tokens that
see each other; of a causal square one half). `Products.compute` does these and nothing else, into memory that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Products", "recorded"]

_QUERIES, _KEYS = 256, 512
"""Tokens of a block of attention, of which the scores stay in the caches."""


class _Operand(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Operand:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def plain(cls, *shape: int, dtype: torch.dtype) -> _Operand:
        return cls.of(torch.empty(shape, dtype=dtype, device="meta"))

    def turned(self) -> _Operand:
        """The last two dimensions changed over."""
        *others, rows, columns = range(len(self.shape))
        order = (*others, columns, rows)
        return _Operand(tuple(self.shape[i] for i in order), tuple(self.stride[i] for i in order), self.dtype)


class Products:
    """Products that were recorded, and memory of each shape for them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[_Operand, _Operand]] = []
        self._memory: dict[tuple[str, _Operand], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def operations(self) -> int:
        """Multiplications and additions, all together."""
        return sum(2 * left.shape[-1] * math.prod(left.shape[:-1]) * right.shape[-1] for left, right in self._pairs)

    def add(self, left: _Operand, right: _Operand) -> None:
        self._pairs.append((left, right))

    def compute(self) -> None:
        """Compute all of them once."""
        for left, right in self._pairs:
            result = _Operand.plain(*left.shape[:-1], right.shape[-1], dtype=left.dtype)
            torch.matmul(self._tensor("left", left), self._tensor("right", right), out=self._tensor("result", result))

    def _tensor(self, side: str, operand: _Operand) -> torch.Tensor:
        if (side, operand) not in self._memory:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True))
            numbers = torch.randn(reach, dtype=operand.dtype)  # of a widened operand, several places are one
            self._memory[side, operand] = numbers.as_strided(operand.shape, operand.stride)
        return self._memory[side, operand]


@contextmanager
def recorded() -> Iterator[Products]:
    """Note the products that this thread computes in the block, backward passes included."""
    products = Products()
    with _Recorder(products):
        yield products


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = _NOTED.get(func.overloadpacket)
        if note is not None:
            note(self._products, args)
        return func(*args, **(kwargs or {}))


def _product(first: int) -> Callable[[Products, Any], None]:
    """A product whose operands begin with this argument."""

    def note(products: Products, args: Any) -> None:
        products.add(_Operand.of(args[first]), _Operand.of(args[first + 1]))

    return note


def _attention(backward: bool) -> Callable[[Products, Any], None]:
    def note(products: Products, args: Any) -> None:
        query, key = args[1:3] if backward else args[:2]
        causal = args[7] if backward else len(args) > 4 and args[4]
        (_, heads, queries, width), keys = query.shape, key.shape[2]
        of_keys = -(-keys // 2) if causal else keys
        for start in range(0, queries, _QUERIES):
            for begin in range(0, of_keys, _KEYS):
                n, m = min(_QUERIES, queries - start), min(_KEYS, of_keys - begin)
                rows, seen, scores = (
                    _Operand.plain(heads, *shape, dtype=query.dtype) for shape in ((n, width), (m, width), (n, m))
                )
                products.add(rows, seen.turned())  # the scores
                if not backward:
                    products.add(scores, seen)  # what is seen
                else:
                    products.add(rows, seen.turned())  # gradients of the weights
                    products.add(scores, seen)  # of the queries
                    products.add(scores.turned(), rows)  # of the keys
                    products.add(scores.turned(), rows)  # of the values

    return note


_aten = torch.ops.aten
_NOTED: dict[Any, Callable[[Products, Any], None]] = {
    _aten.mm: _product(0),
    _aten.bmm: _product(0),
    _aten.addmm: _product(1),
    _aten.addmm_: _product(1),
    _aten.baddbmm: _product(1),
    _aten.baddbmm_: _product(1),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(backward=False),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(backward=True),
}

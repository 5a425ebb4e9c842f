"""The one file that touches vLLM's weight transfer on the trainer's side. Tested with vLLM 0.31.0.

What is used, and why (`tests/engines/test_vllm_transfer.py` fails with a sentence when one of these
changes):

* `NCCLTrainerWeightTransferEngine` and `IPCTrainerWeightTransferEngine`: `trainer_init` meets the
  servers, `send_weights` sends what `source` walks. One is kept for many sends, each of one chunk of
  a walk: `source`, and with IPC `packed_buffer_size_bytes`, are set before each;
* the client they call (`VLLMWeightSyncClient`), four methods. They call `start_weight_update` and
  `finish_weight_update` around each send, and here an update is made of many: both are said to the
  servers by `server_transfer.py` instead, with the version at the end;
* `WeightSource` and `ParamMeta`, the form of a chunk;
* `PyNcclCommunicator.available`: without NCCL's library a broadcast does nothing, and says nothing.

Invariants: a call ends within its seconds, or as soon as a server has refused its part (NCCL itself
waits for a peer for ever); what ends it is an `EngineError`. The thread that may be left behind is
a daemon.

**NCCL and IPC have not been run by this project's tests: they need GPUs.** What is around them is:
the meeting, the order and the content of what is said, with vLLM's own classes and a real server on
the CPU, whose weights come through a store instead.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from toolgrpo.engines.vllm_http import in_thread
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError

BACKENDS = ("nccl", "ipc")


class ServersOfATransfer(Protocol):
    """The servers' side of a transfer: each call is said to all of them."""

    def meet(self, init_info: dict[str, Any]) -> None: ...

    def take(self, update_info: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where trainer and servers find each other for NCCL, and how many they are; the trainer counts."""

    address: str
    port: int
    world_size: int


class WeightSender:
    """What sends weights to servers that were met; process 0 of the trainer speaks for all."""

    def __init__(
        self,
        backend: str,
        servers: ServersOfATransfer,
        *,
        rank: int,
        device: torch.device,
        timeout_s: float,
        meeting: Meeting | None = None,
    ) -> None:
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._client = _Client(servers)
        self._engine = self._watched("meet its servers", lambda: self._met(rank, meeting))

    def send(self, chunk: Mapping[str, torch.Tensor]) -> None:
        """Send these tensors, which stay as they are until it returns."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize(self._device)  # vLLM reads them on streams of its own
        self._engine.source = _source(chunk)
        if self._backend == "ipc":  # where a tensor larger than the buffer is refused; NCCL's size was agreed on
            self._engine.packed_buffer_size_bytes = sum(tensor.nbytes for tensor in chunk.values())
        self._watched("send weights", self._engine.send_weights)

    def end(self) -> None:
        """Leave the group."""
        self._engine.shutdown()

    def _met(self, rank: int, meeting: Meeting | None) -> Any:
        source = _source({})
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            asked = IPCTrainerInitInfo(rank=rank, packed=True)
            return IPCTrainerWeightTransferEngine.trainer_init(asked, client=self._client, source=source)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        assert meeting is not None
        asked_nccl = NCCLTrainerInitInfo(
            rank=rank,
            master_address=meeting.address,
            master_port=meeting.port,
            world_size=meeting.world_size,
        )
        engine = NCCLTrainerWeightTransferEngine.trainer_init(asked_nccl, client=self._client, source=source)
        if not engine.model_update_group.available:
            raise ConfigError(
                "vLLM finds no library of NCCL in the trainer's environment; install one, or start the servers "
                "without --weight-transfer-config, whereupon weights go through a folder"
            )
        return engine

    def _watched(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what `work` does in a thread, which nobody waits for once a server has refused."""
        number = self._device.index  # a thread begins on the first device
        there: AbstractContextManager[Any] = nullcontext() if number is None else torch.accelerator.device_index(number)

        def there_done() -> Any:
            with there:
                return work()

        outcome = in_thread(there_done)
        wait([outcome, self._client.refusal], self._timeout_s, FIRST_COMPLETED)
        if self._client.refusal.done():
            raise self._client.refusal.result()
        if not outcome.done():
            raise FinalEngineError(
                f"vLLM's {self._backend} weight transfer did not {what} within {self._timeout_s:g} s (--engine_timeout). "
                f"Look at the servers' logs, start them anew, and resume from the last checkpoint."
            )
        error = outcome.exception()
        if error is None or isinstance(error, EngineError | ConfigError):
            return outcome.result()
        raise FinalEngineError(
            f"vLLM's {self._backend} weight transfer could not {what}: {type(error).__name__}: {error}. Start the "
            f"servers anew, and resume from the last checkpoint; without --weight-transfer-config weights go through "
            f"a folder."
        ) from error


class _Client:
    """vLLM's `VLLMWeightSyncClient` over all servers of a transfer."""

    def __init__(self, servers: ServersOfATransfer) -> None:
        self._servers = servers
        self.refusal: Future[Exception] = Future()  # the first, of any call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._said(self._servers.meet, init_info)

    def start_weight_update(self) -> None:
        """Say nothing: one update is made of many sends, and was started before the first."""

    def update_weights(self, update_info: Any) -> None:
        self._said(self._servers.take, _in_json(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Say nothing: it is finished after the last send, with its version."""

    def _said(self, say: Callable[[dict[str, Any]], None], what: dict[str, Any]) -> None:
        try:
            say(what)
        except Exception as error:
            if not self.refusal.done():
                self.refusal.set_result(error)
            raise


def _in_json(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return it with handles of GPU memory as vLLM takes them over HTTP."""
    told = {name: value for name, value in update_info.items() if value is not None}
    if "ipc_handles" in told:
        told["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(told.pop("ipc_handles"))).decode()
    return told


def _source(chunk: Mapping[str, torch.Tensor]) -> Any:
    """Return a chunk as vLLM's `WeightSource`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Chunk(WeightSource):  # type: ignore[misc]  # vLLM is Any to the type checker
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in chunk.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(chunk.items())

    return Chunk()

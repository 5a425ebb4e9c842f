"""A real vLLM server in a process of its own, for tests and benchmarks.

It serves token ids only (no tokenizer is loaded), in fp32 unless told otherwise, in development mode, so that weights can be
replaced. `kill` ends it as a crash would; `start` brings it up again on the same port.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.ports import free_port
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.engines.vllm_worker import WORKER_EXTENSION
from toolgrpo.errors import EngineError

_END_S = 15.0


class VLLMServerProcess:
    """Use as a context manager; `url` is what the engine wants."""

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int,
        dtype: str = "float32",
        extra_args: Sequence[str] = (),
        ready_timeout_s: float = 240.0,
    ) -> None:
        self._arguments = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--skip-tokenizer-init", "--dtype", dtype,
            "--max-model-len", str(max_model_len), "--max-num-seqs", "64", "--enforce-eager",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--worker-extension-cls", WORKER_EXTENSION, "--gpu-memory-utilization", "0.3", *extra_args,
        ]  # fmt: skip
        self._ready_timeout_s = ready_timeout_s
        self._port = free_port()
        self._log = tempfile.NamedTemporaryFile(mode="w+b", prefix="vllm-server-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server, and wait until it is ready; its log is in the error if it does not come up."""
        environment = {
            **os.environ,
            "TRITON_F32_DEFAULT": "ieee",  # fp32 on a GPU is no TF32
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a colocated engine may have set it for itself
        self._process = subprocess.Popen(
            [*self._arguments, "--host", "127.0.0.1", "--port", str(self._port)],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that `kill` also reaches its engine process
        )
        control = ServerControl(self.url)
        try:
            control.wait_ready(self._ready_timeout_s, may_come=self._is_alive)
        except EngineError as error:
            log = Path(self._log.name).read_text(errors="replace")
            raise EngineError(f"{error}\nThe end of the server's log:\n{log[-4000:]}") from error

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def freeze(self) -> None:
        """Let it answer nothing more, not even to SIGTERM, while connections to it still succeed; only `kill` ends it."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it without warning."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Let it end by itself, and kill what is left."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return  # `stop` goes on to SIGKILL

    def __enter__(self) -> VLLMServerProcess:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
        self._log.close()

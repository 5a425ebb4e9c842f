"""`load_tools`: from what a user gives to a running `Toolbox`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.tools.backends import Backend, FunctionBackend
from toolgrpo.tools.outputlog import OutputLog
from toolgrpo.tools.pool import PoolOptions, WorkerPool
from toolgrpo.tools.sources import environment_source, source_of
from toolgrpo.tools.toolbox import Toolbox
from toolgrpo.tools.worker import Limits

__all__ = ["load_tools"]


def load_tools(
    spec: str | Path | ModuleType | Sequence[Callable[..., Any]] | None = None,
    *,
    tool_timeout_s: float = 30.0,
    cache_tools: bool = False,
    workers: int = 4,
    threads_per_worker: int = 64,
    memory_mb: int = 4096,
    max_result_chars: int = 20_000,
    log_path: Path | str | None = None,
    load_timeout_s: float = 120.0,
) -> Toolbox:
    """Load tools and start their workers.

    Args:
        spec: A plugin file, a module or its name, or a list of functions.
        tool_timeout_s: Seconds that one call may take, unless its tool says otherwise.
        cache_tools: Treat every function as pure unless it says otherwise.
        workers: Worker processes.
        threads_per_worker: Calls that one worker runs at the same time.
        memory_mb: Address space of each worker; 0 for no limit.
        max_result_chars: Longer results are cut with a notice.
        log_path: Where what tools print goes; without it, to the logger `toolgrpo.tools.output`.
        load_timeout_s: Seconds that importing the plugin may take.
    """
    for name, value in (("tool_timeout_s", tool_timeout_s), ("workers", workers), ("load_timeout_s", load_timeout_s)):
        if not value > 0:
            raise ConfigError(f"{name} must be positive, got {value!r}")
    tools = None if spec is None else source_of(spec)
    hello = {"tools": tools and asdict(tools), "environment": None}
    limits = Limits(threads_per_worker, memory_mb, max_result_chars)
    options = PoolOptions(workers, limits, load_timeout_s=load_timeout_s)
    pool = WorkerPool(hello, options, OutputLog(None if log_path is None else Path(log_path)))
    return Toolbox([FunctionBackend(pool, pool.spec.functions, tool_timeout_s, cache_all=cache_tools)])

"""Show a training from Python as the command line shows it: what was loaded, one line for each log,
one bar; and nothing of the displays that Transformers brings.

Not covered: what libraries warn of, which goes where it always goes in a program of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from toolgrpo.tools.arguments import signatures_text
from toolgrpo.tools.base import ToolProvider


def take_display(remove: Callable[[Any], object], given: Sequence[Any] = ()) -> None:
    """Remove from a trainer the callbacks that print Transformers' dictionaries and bars,
    but those that the user has given.
    """
    for kind in {PrinterCallback, ProgressCallback, transformers.trainer.DEFAULT_PROGRESS_CALLBACK}:
        if not any(one is kind or type(one) is kind for one in given):
            remove(kind)


@contextmanager
def library_bars_off() -> Iterator[None]:
    """Keep the bars of Transformers (of shards read and written) away from ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def loaded_lines(
    *,
    model: Any,
    n_rows: int | None,
    tools: ToolProvider | None,
    agent: str | None,
    rewards: Mapping[str, str],
    engine: str,
    chat: str,
    context: str | None,
) -> list[str]:
    """Return what was loaded, a line for each part; `rewards` says where each of them is from."""
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    shown = signatures_text([] if tools is None else tools.schemas, indent=" " * 10)
    return [
        f"model     {name}, {n_parameters / 1e6:.3g} M parameters",
        *([] if n_rows is None else [f"data      {n_rows} rows"]),
        *([f"tools     {shown or 'none'}"] if agent is None else [f"agent     {agent}"]),
        *(f"          {notice}" for notice in getattr(tools, "notices", ())),
        *(f"reward    {reward}: {source}" for reward, source in rewards.items()),
        f"engine    {engine}, {chat} chat format",
        *([] if context is None else [f"context   {context}"]),
    ]

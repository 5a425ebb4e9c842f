"""Write a folder to begin with (`toolgrpo init`): a task that is shipped, skills for agents, or rows drawn from tools.

toolgrpo init shop                                       copies a task into shop/
toolgrpo init --skills                                   copies the skills for coding agents
toolgrpo init --tools_script my_tools.py FOLDER          draws rows from tools, which it runs (docs/how-to/data.md)
"""

from __future__ import annotations

import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

from toolgrpo.commands.given import Given
from toolgrpo.commands.table import TASKS, InitArguments
from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.support.plain_text import plain
from toolgrpo.support.shipped_files import nearest_is, page_here, shipped_root
from toolgrpo.support.storage import check_output_folder

_TOOLS = ("tools_script", "environment", "mcp_config")


def init(given: Given) -> int:
    """Write a task to begin with, the skills for coding agents, or rows drawn from tools, into a new folder."""
    words = [given.values[name] for name in ("task", "folder") if name in given.values]
    tools = {name: given.values[name] for name in _TOOLS if given.values.get(name)}
    if tools:
        if len(words) != 1:
            raise ConfigError(
                f"rows drawn from tools go into one folder, got {' and '.join(words) or 'none'}: "
                f"toolgrpo init --{next(iter(tools))} {next(iter(tools.values()))} FOLDER"
            )
        return _draw(Path(words[0]), tools, given)
    for name in ("rows", "hold_out", "allow_writes", "writer", "writer_model"):
        if given.values.get(name):
            raise ConfigError(
                f"--{name} applies to tools to draw rows from, but no tools are named; add --tools_script FILE.py"
            )
    if given.values.get("skills"):
        if len(words) > 1:
            raise ConfigError(f"--skills takes one folder, got {' and '.join(words)}: toolgrpo init --skills [FOLDER]")
        folder = Path(*words or ["skills"])
        check_output_folder(folder, "the skills", "toolgrpo init --skills FOLDER")
        shutil.copytree(shipped_root() / "skills", folder, dirs_exist_ok=True)
        print(f"{folder}/ has {', '.join(sorted(file.name for file in folder.iterdir()))}; each has a SKILL.md")
        print(f"The pages that they name as docs/... are in {shipped_root() / 'docs'}.")
        return 0
    name = given.values.get("task", TASKS[0])
    folder = Path(given.values.get("folder", name))
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}{nearest_is(name, TASKS)}; there is {', '.join(TASKS)}")
    check_output_folder(folder, "the task", f"toolgrpo init {name} FOLDER")
    shutil.copytree(
        shipped_root() / "recipes" / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    print(f"{folder}/ has {', '.join(sorted(file.name for file in folder.iterdir()))}")
    page = page_here(page="docs/tutorials/half_an_hour.md") if name == "shop" else folder / "README.md"
    print(f"Next: read {page}")
    return 0


def _draw(folder: Path, tools: dict[str, str], given: Given) -> int:
    """Draw rows from tools into a new folder, and print what became of each tool."""
    from toolgrpo.commands.plugins import tool_sources
    from toolgrpo.draw.play import DEADLINE_S
    from toolgrpo.draw.rows import draw_rows, write_folder  # brings the tools' weight, which a copy does not need
    from toolgrpo.draw.writer import Writer
    from toolgrpo.tools.open_toolbox import load_tools

    url, model = (given.values.get(name) for name in ("writer", "writer_model"))
    if bool(url) is not bool(model):
        raise ConfigError("--writer URL and --writer_model NAME belong together: the address and the model there")
    new = not folder.exists()
    check_output_folder(folder, "the rows", "toolgrpo init FOLDER")
    n_rows = given.values.get("rows", InitArguments.rows)
    hold_out = [name for name in str(given.values.get("hold_out") or "").split(",") if name]
    live = sys.stderr.isatty()
    sources = tool_sources(tools)
    open_toolbox = partial(load_tools, sources.pop("tools"), **sources, tool_timeout_s=DEADLINE_S)

    def say(text: str) -> None:
        if live:
            print(f"\r\x1b[K{plain(text)}", end="", file=sys.stderr, flush=True)

    writer = Writer(url, model, say) if url and model else None
    try:
        if writer is not None:
            print(plain(writer.look()))
        drawn = draw_rows(
            open_toolbox,
            n_rows=n_rows,
            hold_out=hold_out,
            allow_writes=bool(given.values.get("allow_writes")),
            say=say,
            reword=writer,
        )
        say("")
        for line in [*drawn.table(), *(writer.told() if writer else ())]:
            print(plain(line))
        config = write_folder(drawn, folder, tools, hold_out)
    except ToolGRPOError:
        say("")
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    n = {"train.jsonl": len(drawn.train), "heldout.jsonl": len(drawn.held_out)}
    has = [*(f"{name} ({rows} rows)" for name, rows in n.items()), "worked.jsonl", "config.yaml", "README.md"]
    print(f"{folder}/ has {', '.join(has)}")
    if sum(n.values()) < n_rows:
        print(f"These are fewer than {n_rows}: there are not enough different calls for both files.")
    print(f"Next: toolgrpo check --config {shlex.quote(str(config))}")
    return 0

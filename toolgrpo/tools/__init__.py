"""Load and run tools without risk to the run: schemas, checks, worker processes, environments, MCP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolgrpo.tools.plugin.tool_spec import tool

if TYPE_CHECKING:
    from toolgrpo.tools.open_toolbox import load_tools
    from toolgrpo.tools.open_toolbox import open_tools as open_tools  # ours, and no public name
    from toolgrpo.tools.toolbox import Toolbox, run_tool

__all__ = ["Toolbox", "load_tools", "run_tool", "tool"]

# imported on first use: a worker imports this package and needs none of them
_LAZY = {
    "Toolbox": "toolgrpo.tools.toolbox",
    "load_tools": "toolgrpo.tools.open_toolbox",
    "open_tools": "toolgrpo.tools.open_toolbox",
    "run_tool": "toolgrpo.tools.toolbox",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

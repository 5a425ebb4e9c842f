"""Load the tools and rewards that a command was given; no PyTorch is needed for it.

`config` has the fields of `EpisodeOptions`, `output_dir` and `reward_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.rewards import Reward, check_weights, named_rewards
from toolgrpo.rewards.base import watched
from toolgrpo.tools.arguments import signatures_text
from toolgrpo.tools.base import ToolProvider
from toolgrpo.tools.open_toolbox import open_tools


def tool_sources(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return sources of tools under the names of their flags as `open_tools` takes them."""
    file = named.get("tools_script")  # or the bare name of a shipped one
    return {
        "tools": Path(file) if file else named.get("tool_functions_module"),
        "environment": named.get("environment"),
        "mcp_config": named.get("mcp_config"),
    }


def load_toolbox(script: ScriptArguments, config: Any, terminal: Terminal) -> ToolProvider | None:
    """Return the tools that are asked for, and say which; None if none are."""
    sources = tool_sources(vars(script))
    toolbox = open_tools(
        **sources,
        cache_tools=script.cache_tools,
        workers=script.tool_workers,
        tool_timeout_s=config.tool_timeout,
        log_path=Path(config.output_dir) / "tools.log",
    )
    shown = "none"
    if toolbox is not None:
        signatures = signatures_text(toolbox.schemas, indent=" " * 10)
        shown = f"{signatures} from {', '.join(str(one) for one in sources.values() if one)}"
    terminal.say(f"tools     {shown}")
    return toolbox


def load_rewards(script: ScriptArguments, config: Any, terminal: Terminal) -> list[Reward]:
    """Return the built-in rewards, then those of files, in the order that weights have."""
    given = [*(script.reward or ()), *(Path(path) for path in script.reward_fn or ())]
    found = named_rewards(given, script.reward_function_name or "reward_func")
    rewards: list[Reward] = watched(found, config.reward_timeout, terminal.say)
    check_weights(config.reward_weights, [reward.name for reward in rewards])
    return rewards

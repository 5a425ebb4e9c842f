"""Load the tools and rewards that a command was given; no PyTorch is needed for it.

`config` has the fields of `EpisodeOptions`, `output_dir` and `reward_weights`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.rewards import Reward, get_reward, load_reward
from toolgrpo.rewards.base import check_weights
from toolgrpo.tools import Toolbox, load_tools
from toolgrpo.tools.arguments import signatures_text


def load_toolbox(script: ScriptArguments, config: Any, terminal: Terminal) -> Toolbox | None:
    """Return the tools that are asked for, and say which; None if none are."""
    spec = Path(script.tools_script) if script.tools_script else script.tool_functions_module
    sources = [str(source) for source in (spec, script.environment, script.mcp_config) if source]
    if not sources:
        terminal.say("tools     none")
        return None
    toolbox = load_tools(
        spec,
        environment=script.environment,
        mcp_config=script.mcp_config,
        cache_tools=script.cache_tools,
        workers=script.tool_workers,
        tool_timeout_s=config.tool_timeout,
        log_path=Path(config.output_dir) / "tools.log",
    )
    signatures = signatures_text(toolbox.schemas, indent=" " * 10)
    terminal.say(f"tools     {signatures} from {', '.join(sources)}")
    for notice in toolbox.notices:
        terminal.say(f"          {notice}")
    return toolbox


def load_rewards(script: ScriptArguments, config: Any, terminal: Terminal) -> list[Reward]:
    """Return the built-in rewards, then those of files, in the order that weights have."""
    rewards = [get_reward(name) for name in script.reward or ()]
    files = [load_reward(path, script.reward_function_name or "reward_func") for path in script.reward_fn or ()]
    if len(files) > 1:  # each is logged under its own name
        files = [replace(reward, name=f"{Path(reward.source).stem}.{reward.name}") for reward in files]
    rewards = [replace(reward, timeout_s=config.reward_timeout, say=terminal.say) for reward in (*rewards, *files)]
    check_weights(config.reward_weights, [reward.name for reward in rewards])
    return rewards

"""Load the tools and rewards that a command was given; no PyTorch is needed for it.

`config` has the fields of `EpisodeOptions`, `output_dir` and `reward_weights`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.table import SFTArguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.rewards import Reward, check_weights, get_reward, load_reward
from toolgrpo.tools import Toolbox, load_tools
from toolgrpo.tools.arguments import signatures_text


def open_tools(script: ScriptArguments | SFTArguments, **others: Any) -> Toolbox | None:
    """Return the tools that are asked for; None if none are."""
    spec = _file_or_module(script)
    if not (spec or script.environment or script.mcp_config):
        return None
    return load_tools(spec, environment=script.environment, mcp_config=script.mcp_config, **others)


def load_toolbox(script: ScriptArguments, config: Any, terminal: Terminal) -> Toolbox | None:
    """Return the tools that are asked for, and say which; None if none are."""
    toolbox = open_tools(
        script,
        cache_tools=script.cache_tools,
        workers=script.tool_workers,
        tool_timeout_s=config.tool_timeout,
        log_path=Path(config.output_dir) / "tools.log",
    )
    if toolbox is None:
        terminal.say("tools     none")
        return None
    sources = [str(one) for one in (_file_or_module(script), script.environment, script.mcp_config) if one]
    signatures = signatures_text(toolbox.schemas, indent=" " * 10)
    terminal.say(f"tools     {signatures} from {', '.join(sources)}")
    return toolbox


def _file_or_module(script: ScriptArguments | SFTArguments) -> Path | str | None:
    if script.tools_script:
        return Path(script.tools_script)  # or the bare name of a shipped file
    return script.tool_functions_module if isinstance(script, ScriptArguments) else None


def load_rewards(script: ScriptArguments, config: Any, terminal: Terminal) -> list[Reward]:
    """Return the built-in rewards, then those of files, in the order that weights have."""
    rewards = [get_reward(name) for name in script.reward or ()]
    files = [load_reward(path, script.reward_function_name or "reward_func") for path in script.reward_fn or ()]
    if len(files) > 1:  # each is logged under its own name
        files = [replace(reward, name=f"{Path(reward.source).stem}.{reward.name}") for reward in files]
    rewards = [replace(reward, timeout_s=config.reward_timeout, say=terminal.say) for reward in (*rewards, *files)]
    check_weights(config.reward_weights, [reward.name for reward in rewards])
    return rewards

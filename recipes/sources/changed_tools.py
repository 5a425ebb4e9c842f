"""The same three systems after a change that nobody announced: atlas is now cut short, and beacon stale."""

import source_tools

source_tools.WAYS.update(atlas=source_tools.cut_short, beacon=source_tools.stale)
TOOL_FUNCTIONS = source_tools.TOOL_FUNCTIONS

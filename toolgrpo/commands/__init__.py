"""The commands, their arguments, settings files and terminal output."""

from __future__ import annotations

import sys

from toolgrpo.support.process_setup import ON_WINDOWS

if sys.platform == "win32":
    sys.exit(ON_WINDOWS)  # before the first import of what only Unix has

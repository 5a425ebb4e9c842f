"""Commands: arguments, files of settings, what a terminal shows,
and the commands themselves.
"""

from __future__ import annotations

import sys

from toolgrpo.support.process_setup import ON_WINDOWS

if sys.platform == "win32":
    sys.exit(ON_WINDOWS)  # before the first import of what only Unix has

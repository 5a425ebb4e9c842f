"""The scripts of benchmarks/ find each other beside themselves; tests find them the same way."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

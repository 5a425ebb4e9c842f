"""What a benchmark does around its measurement: read `--quick`, show the table, write the JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(
    name: str,
    doc: str | None,
    quick_means: str,
    measure: Callable[[bool], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    more_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The benchmark's command: results go to the terminal and to results/NAME.json, with the machine they come from."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick_means)
    more_flags(parser)
    quick = parser.parse_args().quick
    results = measure(quick)
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "quick": quick}
    show(results)
    target = Path(__file__).parent / "results" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n")

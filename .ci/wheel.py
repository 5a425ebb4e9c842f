"""Put llms.txt and llms-full.txt into the wheel, beside the pages that they are made of."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Llms(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()  # two builds may run at once
        for name, text in runpy.run_path(str(Path(self.root, ".ci", "llms.py")))["files"]().items():
            path = Path(self._folder.name, name)
            path.write_text(text, "utf-8")
            build_data["force_include"][str(path)] = f"toolgrpo/shipped/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()

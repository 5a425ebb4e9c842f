"""What is known about one tool without its code: the value that crosses processes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as the trainer knows it."""

    name: str
    schema: Mapping[str, Any]  # {"type": "function", "function": {...}}
    timeout_s: float | None = None
    cache: bool | None = None
    isolate: bool = False
    keep_processes: bool = False
    in_process: bool = False
    ends_episode: bool = False
    is_async: bool = False
    unchecked: bool = False

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        return parameters

    @property
    def undescribed(self) -> list[str]:
        """The parameters that the schema says nothing about but their type."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        return [name for name, schema in properties.items() if not schema.get("description")]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ToolSpec:
        return cls(**record)

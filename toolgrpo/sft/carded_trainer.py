"""TRL's trainer of supervised training, with our model card in place of TRL's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trl import SFTTrainer

from toolgrpo.storage import saved_into
from toolgrpo.trainer.model_card import ModelCard, write_beside_model


class CardedSFTTrainer(SFTTrainer):  # type: ignore[misc]  # TRL ships no types
    """Writes `card`, and `tools.json` where there are tools, beside each model that it saves."""

    def __init__(self, *, card: ModelCard, **arguments: Any) -> None:
        self.card = card
        super().__init__(**arguments)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        with saved_into(folder, writes=self.is_world_process_zero()):
            super().save_model(output_dir, _internal_call)
        self._write_card(folder)

    def create_model_card(self, model_name: str | None = None, **_: Any) -> None:
        """Write the card where TRL, at a checkpoint, writes its own."""
        self._write_card(Path(self.args.output_dir), model_name)

    def _write_card(self, folder: Path, name: str | None = None) -> None:
        if self.is_world_process_zero():
            write_beside_model(folder, replace(self.card, steps=self.state.global_step), name or folder.resolve().name)

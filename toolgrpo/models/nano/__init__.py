"""nano: a tiny model with bad habits, built on the spot,
that shows the machinery of tool-use training on a laptop.

`ensure_nano()` builds it once and gives its folder; `python -m toolgrpo.nano` does the same from a
shell.
"""

from toolgrpo.models.nano.cache import cache_folder, ensure_nano, nano_path
from toolgrpo.models.nano.recipe import NanoRecipe

__all__ = ["NanoRecipe", "cache_folder", "ensure_nano", "nano_path", "resolve_model"]


def resolve_model(name_or_path: str) -> str:
    """Return the folder of the built model for `nano`, and every other name as it is."""
    return str(ensure_nano()) if name_or_path == "nano" else name_or_path

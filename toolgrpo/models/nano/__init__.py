"""nano: a tiny model with bad habits, built on the spot,
that shows the machinery of tool-use training on a laptop.

`ensure_nano()` builds it once and gives its folder; `python -m toolgrpo.nano` does the same from a
shell.
"""

from toolgrpo.models.nano.cache import cache_folder, ensure_nano, nano_path
from toolgrpo.models.nano.recipe import NanoRecipe

__all__ = ["NanoRecipe", "cache_folder", "ensure_nano", "nano_path"]

"""Three systems of a wholesaler, and what nobody wrote down about them.

    atlas    stale: it has old prices and old contacts
    beacon   cut short: it shows the first characters of a value
    cedar    right, and each look-up is billed (source_reward.py)

So a price is best asked of beacon, a supplier of atlas, and a contact must be asked of cedar. No question, name or docstring
says so. With SOURCES_CHANGED=1 in the environment atlas is cut short and beacon stale, as if somebody had moved the data.
"""

import os
import random
from typing import Literal

SHOWN = 6  # characters by beacon
COLOURS = (
    *("amber", "black", "blue", "brass", "copper", "cream", "green", "grey", "ivory"),
    *("olive", "pearl", "pink", "plum", "red", "silver", "teal", "white", "yellow"),
)  # fmt: skip
THINGS = (
    *("bench", "bowl", "chair", "clock", "cup", "desk", "easel", "fan", "frame", "globe"),
    *("hook", "jar", "kettle", "lamp", "mirror", "pan", "quilt", "rug", "shelf", "stool"),
)  # fmt: skip
NAMES = (
    *("Adler", "Brandt", "Castle", "Dorsey", "Eklund", "Farrow", "Granger", "Holt"),
    *("Ibarra", "Jansen", "Keller", "Lindqvist", "Moreau", "Novak", "Okafor", "Petrov"),
)
FIRST = (
    *("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Hugo"),
    *("Irene", "Jonas", "Karin", "Louis", "Marta", "Niels", "Olga", "Pablo"),
)
TRADES = ("and Daughters", "Brothers", "Imports", "Manufacture", "Trading", "Works")
MATERIALS = ("brass", "cotton", "glass", "linen", "oak", "pine", "steel", "wool")
ORIGINS = ("Brazil", "Egypt", "France", "Italy", "Japan", "Kenya", "Norway", "Spain")
Field = Literal["price", "supplier", "contact", "material", "origin", "year"]


def _drawn(fixed: random.Random, changing: random.Random) -> dict[str, str]:
    return {
        "price": f"{changing.randint(2, 99)}.{changing.randint(10, 99)}",
        "supplier": f"{fixed.choice(NAMES)} {fixed.choice(TRADES)}",
        "contact": f"{changing.choice(FIRST)} {changing.choice(NAMES)}",
        "material": fixed.choice(MATERIALS),
        "origin": fixed.choice(ORIGINS),
        "year": str(fixed.randint(1980, 2020)),
    }


ARTICLES = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
TODAY = {name: _drawn(random.Random(name), random.Random(f"{name} today")) for name in ARTICLES}
ONCE = {name: _drawn(random.Random(name), random.Random(f"{name} once")) for name in ARTICLES}


def stale(article: str, field: str) -> str:
    return ONCE[article][field]


def cut_short(article: str, field: str) -> str:
    value = TODAY[article][field]
    return value if len(value) <= SHOWN else value[:SHOWN] + "..."


def right(article: str, field: str) -> str:
    return TODAY[article][field]


CHANGED = os.environ.get("SOURCES_CHANGED", "0") != "0"
WAYS = {"atlas": cut_short if CHANGED else stale, "beacon": stale if CHANGED else cut_short, "cedar": right}


def ask(system: str, article: str, field: str) -> str:
    if article not in TODAY:
        raise ValueError(f"there is no article {article!r}; an article is a colour and a thing, like 'red desk'")
    return WAYS[system](article, field)


def atlas(article: str, field: Field) -> str:
    """Look up a field of an article in atlas.

    Args:
        article: Its name.
        field: What to look up.
    """
    return ask("atlas", article, field)


def beacon(article: str, field: Field) -> str:
    """Look up a field of an article in beacon.

    Args:
        article: Its name.
        field: What to look up.
    """
    return ask("beacon", article, field)


def cedar(article: str, field: Field) -> str:
    """Look up a field of an article in cedar.

    Args:
        article: Its name.
        field: What to look up.
    """
    return ask("cedar", article, field)


TOOL_FUNCTIONS = [atlas, beacon, cedar]

"""Questions in plain words, from names, docstrings and drawn values: several wordings, other ones for held-out rows.

Every drawn value stands in the question as a model has to write it, but for those that an earlier call of the row
answers; names lose their underscores, numbers are written out, and a percentage has its sign.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from random import Random
from typing import Any

from toolgrpo.draw.hints import OF_ONE, alternatives, said_of, words_of
from toolgrpo.draw.play import PlayedCall

_VERB = re.compile(
    r"add|analyse|analyze|answer|append|apply|ask|assess|assign|attach|borrow|build|buy|calculate|"
    r"cancel|change|check|choose|classify|collect|combine|compare|compute|concatenate|convert|copy|"
    r"count|create|crop|decode|define|delete|describe|detect|determine|divide|download|draw|edit|"
    r"encode|enumerate|estimate|evaluate|execute|expand|explain|extract|fetch|fill|filter|find|flip|"
    r"format|generate|get|give|group|identify|infer|insert|inspect|invert|join|lend|list|load|"
    r"locate|look|make|map|match|measure|merge|mix|modify|move|multiply|normalize|obtain|parse|pay|"
    r"perform|pick|plan|play|predict|prepare|price|print|produce|project|provide|pull|push|put|"
    r"query|raise|read|recommend|reduce|remove|rename|render|repeat|replace|report|reset|resize|"
    r"resolve|restore|retrieve|return|reverse|rotate|round|run|sample|save|scan|search|select|send|"
    r"show|shuffle|simplify|simulate|slice|solve|sort|split|store|submit|subscribe|subtract|suggest|"
    r"sum|summarize|swap|take|tell|test|tokenize|transform|translate|trim|truncate|turn|undo|unlock|"
    r"update|upload|use|validate|verify|weigh|withdraw|work|wrap|write"
)
_QUESTIONS = ("how", "what", "which", "where", "when", "whether", "who", "if")
_NO_VERBS = ("all", "as", "for", "in", "not", "of", "with", *_QUESTIONS)
_UNIT = re.compile(
    r"years|months|weeks|days|hours|minutes|seconds|shares|units|items|people|lines|pages|points|steps|kg|km"
)
_NO_NOUN = r"(?:what|how|which|if|whether|where|when|by|only|to|for)\b"
_PERCENT = re.compile(r"\bpercent\b|\bper cent\b|in %", re.IGNORECASE)
_BARE = re.compile(r"values?|args?|arguments?|inputs?|data|obj")

_TRAINING = (
    "{Do}: {given}.",
    "{Do}, with {given}.",
    "Please {do}, using {given}.",
    "Given {given}, {do}.",
    "Can you {do}? Use {given}.",
    "This is given: {given}. Please {do}.",
    "With {given}, would you {do}?",
    "There is {given}: now {do}.",
    "Use {given} to {do}.",
    "Taking {given}, {do}.",
)
_HELD_OUT = ("I have {given}. {Do}, please.", "For {given}: {do}.", "Could you {do}, given {given}?")
_WITHOUT = (("{Do}.", "Please {do}.", "Can you {do}?"), ("I would like you to {do}.", "{Do}, please."))
_NEXT = (
    (
        ("First,", "Then"),
        ("Begin with this:", "After that,"),
        ("Start like this:", "Next,"),
        ("Please do some things for me. At first,", "Afterwards,"),
        ("This comes first:", "This comes next:"),
        ("One thing:", "Another thing:"),
    ),
    (("I have several things for you. The first:", "The next:"), ("To begin,", "When that is done,")),
)


def alike_tools(calls: Iterable[PlayedCall]) -> set[str]:
    """Return the tools, one call of each given, that a question would ask for in the same words."""
    words = {call.name: _task_of(call) for call in calls}
    counts = Counter(words.values())
    return {name for name, task in words.items() if counts[task] > 1}


def question(program: Sequence[PlayedCall], rng: Random, *, held_out: bool, alike: Collection[str] = ()) -> str:
    """Return a question that asks for these calls, in one of several wordings; for tools that are `alike` by their names."""
    if len(program) == 1:
        return _asked(program[0], rng, alike, held_out=held_out)
    first, then = rng.choice(_NEXT[held_out])
    parts = []
    for number, call in enumerate(program):
        said = _asked(call, rng, alike, held_out=held_out, plain=True)
        parts.append(f"{then if number else first} {said}")
    return " ".join(parts)


def _task_of(call: PlayedCall) -> str:
    return task_of(call.spec.schema["function"].get("description") or "", call.name)


def _asked(call: PlayedCall, rng: Random, alike: Collection[str], *, held_out: bool, plain: bool = False) -> str:
    do = task_of("", call.name) if call.name in alike else _task_of(call)
    by_description = rng.random() < 0.4
    properties: Mapping[str, Any] = call.spec.parameters.get("properties", {})
    given = _and(
        [
            _told(name, value, properties.get(name, {}), call.links.get(name), by_description=by_description)
            for name, value in call.arguments.items()
        ]
    )
    if plain:  # in the middle of a longer question
        return f"{do}, with {given}." if given else f"{do}."
    form = rng.choice((_HELD_OUT if held_out else _TRAINING) if given else _WITHOUT[held_out])
    return form.format(Do=do[:1].upper() + do[1:], do=do, given=given)


def task_of(description: str, name: str) -> str:
    """Return what a tool does as a request without a full stop: "add two integers"."""
    alone = re.sub(r"\s*\([^)]*\)", "", description).strip()
    sentence = re.split(r"(?<=[.!?:;])\s|\n", alone)[0].strip().rstrip(".!:;")
    sentence = re.sub(r",? (?:as in|e\.g\.|for example) .*|`", "", sentence)
    sentence = re.sub(r"\b\w+_\w+\b", lambda found: " ".join(words_of(found[0])), sentence).strip()
    if not sentence or sentence == name:
        sentence = " ".join(words_of(name))
    first, _, rest = sentence.partition(" ")
    lower = first.lower()
    base = next(
        (one for one in (lower, lower.removesuffix("s"), lower.removesuffix("es")) if _VERB.fullmatch(one)), None
    )
    determined = re.match(r"(?:an?|the|all|some|each|its|two|how|whether|what) ", rest) and lower not in _NO_VERBS
    if base is None and determined:  # a verb that is not in the list, since a noun would have no article after it
        base = lower if re.search("ss$|[^s]$", lower) else lower[:-1]
    base = f"{lower[:-3]}y" if base is None and lower.endswith("ies") else base
    base = {"return": "give me", "say": "tell me"}.get(base or "", base)
    if rest.startswith("of ") or (rest.startswith("for ") and base in ("price", "estimate", "plan", "map", "sample")):
        base = None
    if base is not None and rest:
        return f"{base} {rest}"
    if lower in _QUESTIONS:
        return f"tell me {lower} {rest}"
    start = sentence if first[1:2].isupper() or first == "I" else f"{lower} {rest}".strip()
    if base is not None:  # one verb alone
        return f"{base} it"
    article = "" if lower in ("the", "a", "an", "all", "every", "this") else "the "
    return f"give me {article}{start}"


def _told(name: str, value: Any, schema: Any, link: str | None, *, by_description: bool) -> str:
    """Return a parameter with its value: `principal 12000`, `3 years`, `40 as the integer to divide`."""
    said = str(schema.get("description") or "") if isinstance(schema, Mapping) else ""
    noun = noun_of(name, said, by_description=by_description)
    if link is not None:
        of = f"the {' '.join(words_of(link))} of that result" if link else "that result"
        return f"{of} as the {noun}"
    shown = written(value, schema)
    if isinstance(value, bool):
        return f"{noun}: {shown}"
    if isinstance(value, int | float) and _UNIT.fullmatch(noun.split()[0]):
        return f"{shown} {noun}"
    return (
        f"{shown} as the {noun}" if len(noun.split()) > 2 and not isinstance(value, list | dict) else f"{noun} {shown}"
    )


def noun_of(name: str, said: str, *, by_description: bool) -> str:
    """Return the words for a parameter: of its name, or of what is said of it where the name says little."""
    words = " ".join(words_of(name))
    clause = re.split(r"[.;:(]", said.strip())[0].strip()
    clause = re.sub(r"^(?:an?|the)\s+| in percent\b", "", clause, flags=re.IGNORECASE).replace("`", "")
    short = len(clause.split()) <= 5 and re.fullmatch(rf"(?!{_NO_NOUN})[A-Za-z][A-Za-z' -]*", clause, re.IGNORECASE)
    poor = len(words) < 3 or bool(_BARE.fullmatch(words))
    clause = clause if clause[1:2].isupper() else clause[:1].lower() + clause[1:]
    return clause if short and (poor or by_description) and not alternatives(clause) else words


def written(value: Any, schema: Any = None) -> str:
    """Return a value as a person writes it, in the figures that the call has."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        shown, said = format(Decimal(repr(value)), "f"), said_of(schema)
        return f"{shown} %" if _PERCENT.search(said) and not OF_ONE.search(said) else shown
    if isinstance(value, list):
        inside = [written(one, schema.get("items")) for one in value]
        if any(isinstance(one, dict | list) for one in value):
            return "; ".join(f"({one})" for one in inside)
        return _and(inside) if inside else "nothing"
    if isinstance(value, dict):
        parts, of_data = schema.get("properties", {}), schema.get("type") == "object"  # keys that are none of its parts
        names = {key: written(key) if of_data and key not in parts else " ".join(words_of(str(key))) for key in value}
        return ", ".join(f"{names[key]} {written(one, parts.get(key))}" for key, one in value.items())
    if value is None:
        return "nothing"
    return str(value) if re.fullmatch(r"[\w.@:/+-]*[A-Z\d][\w.@:/+-]*", str(value)) else f'"{value}"'


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)

"""Draw arguments for a tool from what is known of it, and learn from what its calls answer. Pure, but for its seed.

A value comes from the first of these that has one: the file's EXAMPLES, the schema (enum, const, bounds, format), the
text about the parameter ("percent", "between 1 and 10", "as in ..."), errors of earlier calls ("must be at most 100",
"one of ..."), results of earlier calls whose name fits, words for its name. Where several have some, those that led to
answers are drawn more often. A tool that hardly answers is given values that stand in its own code, too.

Not covered: strings with a `pattern`; keys of objects that the schema does not name.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.draw.hints import (
    ANY_WORD,
    AS_IN,
    RANGES,
    SUM,
    WORDS,
    Range,
    about_it,
    alternatives,
    bounds_in,
    dated,
    filled,
    listed_in,
    words_of,
)
from toolgrpo.tools.plugin.tool_spec import ToolSpec

Arguments = dict[str, Any]
_MOST_KEPT = 400  # values of one name
_MOST_READ = 20_000  # characters of a result
_ENDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DEEPEST = 8  # levels of a value, for schemas that refer to themselves
_STUCK = (8, 0.3)  # calls, and the share of answers below which a tool's own code is looked at


class Seen:
    """Values that results returned, by the words under which they came."""

    def __init__(self) -> None:
        self._by_label: defaultdict[str, dict[Any, None]] = defaultdict(dict)

    def add(self, tool: str, content: str) -> None:
        """Keep the short values of a result: under the keys of JSON, and under the tool's own name."""
        for label, value in outputs(content):
            names = [*words_of(label)[-1:], " ".join(words_of(label)), " ".join(words_of(tool))]
            for name in dict.fromkeys(filter(None, names)):
                kept = self._by_label[name]
                if len(kept) < _MOST_KEPT:
                    kept[value] = None

    def of(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the values that fit the name of a parameter."""
        words = [one.removesuffix("s") for one in words_of(name)]
        labels = {label: [one.removesuffix("s") for one in label.split()] for label in self._by_label}
        for fits in (
            lambda of: of == words,
            lambda of: of[-1] == words[-1],
            lambda of: words[-1] in of or (words[-1] in _KEYS and words[0] in of),
        ):
            values = dict.fromkeys(one for label, of in labels.items() if fits(of) for one in self._by_label[label])
            found = [one for one in values if isinstance(one, kind) and not isinstance(one, bool)]
            if found:
                return found
        return []


_KEYS = ("id", "name", "code", "key", "path", "number", "symbol", "slug")


def outputs(content: str) -> Iterator[tuple[str, Any]]:
    """Yield the short values of a result, each with its key; the key of a bare value is empty."""
    pending: deque[tuple[str, Any]] = deque()
    text = content[:_MOST_READ].strip()
    try:
        while text:  # a server may give several values, one after the other
            value, end = json.JSONDecoder().raw_decode(text)
            if type(value) in (int, float) and text[end : end + 1].strip():
                raise ValueError("a date or a code begins with a number")
            pending.append(("", value))
            text = text[end:].lstrip()
    except (ValueError, RecursionError):
        pending = deque(("", line.strip()) for line in content[:_MOST_READ].splitlines()[:20])
    taken = 0
    while pending and taken < 100:
        label, value = pending.popleft()  # what stands inside comes next, as it is read
        if isinstance(value, dict):
            pending.extendleft([(str(key), one) for key, one in value.items()][::-1])
        elif isinstance(value, list):
            pending.extendleft([(label, one) for one in value[:30]][::-1])
        elif (isinstance(value, str) and 0 < len(value) <= 80) or (type(value) in (int, float) and abs(value) < 1e12):
            taken += 1
            yield label, value


@dataclass
class _Learned:
    """Bounds and values that errors named for one parameter, and how often its sources led to an answer."""

    low: float | None = None
    high: float | None = None
    listed: dict[str, None] = field(default_factory=dict)
    tries: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    answers: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class Drawer:
    """Draws arguments for one tool; `learn` tells it what became of them."""

    def __init__(self, spec: ToolSpec, seen: Seen, rng: random.Random) -> None:
        self.spec, self._seen, self._rng = spec, seen, rng
        self.good: list[Arguments] = []
        self.calls = 0
        self._learned: defaultdict[str, _Learned] = defaultdict(_Learned)
        self._used: dict[str, list[tuple[str, str]]] = {}  # of each draw: where its values came from
        self._sources: list[tuple[str, str]] = []
        self._texts: list[str] = []  # of the arguments that are being drawn
        self._sums_to_one = bool(SUM.search(json.dumps(dict(spec.schema))))
        self._length = 2

    def draw(self, fixed: Arguments | None = None) -> Arguments:
        """Draw arguments: anew, or those of a call that was answered with some drawn anew; `fixed` ones stay."""
        rng, parameters = self._rng, self.spec.parameters
        properties: Mapping[str, Any] = parameters.get("properties", {})
        required = parameters.get("required", ())
        self._sources, self._texts, self._length = [], [], rng.choice((2, 2, 3, 3, 4))
        if self.good and len(properties) > 1 and rng.random() < 0.5:
            drawn = dict(rng.choice(self.good))
            self._length = next((len(one) for one in drawn.values() if isinstance(one, list)), self._length)
            for name in rng.sample(list(drawn), min(len(drawn), rng.choice((1, 1, 2)))):
                drawn[name] = self._value(name, properties.get(name, {}))
        else:
            chosen = [
                one for one in properties if one in required or (rng.random() < 0.35 and self._is_told(properties[one]))
            ]
            drawn = {name: self._value(name, properties[name]) for name in chosen}
            free = {one: properties[one] for one in chosen if one not in self.spec.examples}
            _let_rise(drawn, free, numbers=rng.random() < 0.5)
        drawn |= fixed or {}
        self._used[_key(drawn)] = self._sources
        return drawn

    def learn(self, arguments: Arguments, ok: bool, said: str) -> None:
        """Take note of an answer, or of the error instead of one."""
        self.calls += 1
        for name, source in self._used.pop(_key(arguments), ()):
            self._learned[name].tries[source] += 1
            self._learned[name].answers[source] += ok
        if ok:
            self.good.append(arguments)
            return
        self._sums_to_one = self._sums_to_one or bool(SUM.search(said))
        names = sorted(_names_in(self.spec.parameters), key=len, reverse=True)
        places = {name: found.start() for name in names if (found := re.search(rf"\b{re.escape(name)}\b", said))}
        for name, start in places.items():
            end = min([place for place in places.values() if place > start], default=len(said))
            low, high = bounds_in(said[start + len(name) : end])
            known = self._learned[name]
            known.low = known.low if low is None else low if known.low is None else max(low, known.low)
            known.high = known.high if high is None else high if known.high is None else min(high, known.high)
        listed = listed_in(said)
        texts = [name for name, value in arguments.items() if isinstance(value, str)]
        about = (
            [name for name in places if name in texts]
            or [name for name in texts if arguments[name] in said]
            or (texts if len(texts) == 1 else [])
        )
        for name in about:
            self._learned[name].listed |= dict.fromkeys(one for one in listed[:50] if one != arguments[name])

    def advice(self) -> str:
        """Return the line of the tools file that would help, for the first parameter that must be given."""
        names = [*self.spec.parameters.get("required", ()), *self.spec.parameters.get("properties", {})]
        return f'. EXAMPLES = {{"{names[0]}": [...]}} would help' if names else ""

    def _is_told(self, schema: Any) -> bool:
        """Return whether it is known what may stand in an argument: not in an object of any keys."""
        one = self._resolved(schema)
        return one.get("type") != "object" or bool(one.get("properties"))

    # one value

    def _value(self, name: str, schema: Any, depth: int = 0) -> Any:
        if name in self.spec.examples:
            return self._rng.choice(self.spec.examples[name])
        schema = self._resolved(schema) if depth < _DEEPEST else {"type": "null"}
        for key in ("enum", "examples"):
            if schema.get(key):
                return self._rng.choice([one for one in schema[key] if one is not None] or [None])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._rng.choice([one for one in kind if one != "null"] or ["null"])
        if kind == "array" or (kind is None and "items" in schema):
            return self._array(name, schema, depth + 1)
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth + 1)
        if kind == "boolean":
            return self._rng.random() < 0.5
        if kind == "null":
            return None
        return self._number(name, schema, kind) if kind in ("integer", "number") else self._text(name, schema)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema without references and alternatives: one of them is drawn."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return {}
            others = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
            if "$ref" in schema:
                target: Any = self.spec.parameters
                for part in str(schema["$ref"]).removeprefix("#/").split("/"):
                    target = target.get(part, {}) if isinstance(target, Mapping) else {}
                schema = {**target, **others}
            elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
                real = [one for one in alternatives if isinstance(one, Mapping) and one.get("type") != "null"]
                schema = {**self._rng.choice(real or [{}]), **others}
            elif schema.get("allOf"):
                schema = {**{key: value for one in schema["allOf"] for key, value in one.items()}, **others}
            else:
                return schema
        return {}

    def _from_sources(self, name: str, sources: Mapping[str, Sequence[Any]]) -> Any:
        """Draw from one of the sources that have something, those that led to answers more often."""
        there = {source: values for source, values in sources.items() if values}
        known = self._learned[name]
        weights = [(known.answers[one] + 1) / (known.tries[one] + 2) for one in there]
        source = self._rng.choices(list(there), [weight**2 for weight in weights])[0]
        self._sources.append((name, source))
        return self._rng.choice(there[source])

    def _opened(self, name: str, source: str) -> bool:
        """Return whether a source is looked at that is not for every tool: while it hardly answers, or where it helped."""
        stuck = self.calls >= _STUCK[0] and len(self.good) < _STUCK[1] * self.calls
        return stuck or self._learned[name].answers[source] > 0

    def _number(self, name: str, schema: Mapping[str, Any], kind: str) -> Any:
        about = about_it(name, schema)
        meant = next((one for words, one in RANGES if re.search(words, about)), None)
        found = meant or Range(1, 100, 1)
        known, (low, high) = self._learned[name], bounds_in(str(schema.get("description") or ""))
        if low is not None and high is not None and found.step < high - low <= 200:
            found = Range(low, high, found.step)
        ends = [schema[end] for end in _ENDS if schema.get(end) is not None]
        step = schema.get("multipleOf") or (max(1, round(found.step)) if kind == "integer" else found.step)
        lows, highs = [schema.get("minimum")], [schema.get("maximum")]
        beside = 1 if kind == "integer" else min(step, (max(ends) - min(ends)) / 20 or step) if ends else step
        if (least := schema.get("exclusiveMinimum")) is not None:
            lows.append(least + beside)
        if (most := schema.get("exclusiveMaximum")) is not None:
            highs.append(most - beside)
        for told in (((low, known.low), (high, known.high)), ((low,), (high,)), ((), ())):  # an error may be misread
            least = max((one for one in (*lows, *told[0]) if one is not None), default=None)
            most = min((one for one in (*highs, *told[1]) if one is not None), default=None)
            if least is None or most is None or least <= most:
                break
        (low, high), first, last = (least, most), found.low, found.high
        if low is not None and high is not None:
            in_both = min(last, high) - max(first, low)
            if high - low <= 1 or in_both < min(20 * step, (high - low) / 2):  # what is usual is hardly allowed
                first, last = low, high
        first = first if low is None else max(first, low)
        last = last if high is None else min(last, high)
        last = max(last, first + 20 * step) if high is None and last <= first else last
        if low is None and first >= last:
            first = last - 20 * step
        if kind == "number" and last - first < 4 * step:
            step = (last - first) / 20 or 1
        if multiple := schema.get("multipleOf"):
            step, first = multiple, math.ceil(first / multiple - 1e-9) * multiple
            last = max(last, first + 20 * step) if high is None else last
        value = first + step * self._rng.randint(0, max(0, int((last - first) / step + 1e-9)))
        signed = re.search(r"positive\).*negative|negative\)|may be negative|\bpaid \(negative", about)
        value = -value if signed and self._rng.random() < 0.5 else value
        drawn = _plain(value, integer=kind == "integer")
        type_ = int if kind == "integer" else (int, float)
        seen = self._seen.of(name, type_) if words_of(name)[-1] in _KEYS or self._opened(name, "seen") else []
        own = [one for one in self.spec.literals if isinstance(one, type_) and abs(one) > 2 and meant is None]
        return self._from_sources(
            name, {"range": [drawn], "seen": seen, "code": own if self._opened(name, "code") else []}
        )

    def _text(self, name: str, schema: Mapping[str, Any]) -> str:
        rng, about = self._rng, about_it(name, schema)
        said = str(schema.get("description") or "")
        if (made := dated(about, schema, rng)) is not None:
            return made
        alone = list(self.spec.parameters.get("required", ())) == [name]  # the only one that must be given
        own = f"{said} {self.spec.schema['function'].get('description', '')}" if alone else said
        named = [one for one in listed_in(own, AS_IN) if "..." not in one] or alternatives(said)
        words = [words for pattern, words in WORDS if re.search(pattern, " ".join(words_of(name)))] or [
            words for pattern, words in WORDS if re.search(pattern, about)
        ]
        sources = {
            "listed": list(self._learned[name].listed),
            "seen": self._seen.of(name, str),
            "named": [_other_numbers(one, rng) if re.search(r"\d.*[-+*/]", one) else one for one in named],
            "words": [filled(one, rng) for one in (words or [ANY_WORD])[0]],
            "code": [str(one) for one in self.spec.literals if isinstance(one, str)] if self._opened(name, "code") else [],
            "inside": [word for text in self._texts for word in text.split()] if self._opened(name, "inside") else [],
        }  # fmt: skip
        self._texts.append(text := str(self._from_sources(name, sources)))
        return text

    def _array(self, name: str, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if schema.get("prefixItems"):
            return [self._value(name, one, depth) for one in schema["prefixItems"]]
        n = max(schema.get("minItems", 0), min(self._length, schema.get("maxItems", self._length)))
        items, about = self._resolved(schema.get("items", {})), about_it(name, schema)
        if items.get("type") == "array" and re.search("correlation|covariance|symmetric|distance", about):
            return self._symmetric(n, -0.3 if "correlation" in about else 1, 0.8 if "correlation" in about else 40)
        drawn = [
            self._value(name, items, depth) for _ in range(n if depth < _DEEPEST // 2 else schema.get("minItems", 0))
        ]
        if self._sums_to_one:
            drawn = self._normalised(drawn, re.search("weight|share|fraction|allocation|probabilit", about))
        return list({_key(one): one for one in drawn}.values()) if schema.get("uniqueItems") else drawn

    def _symmetric(self, n: int, low: float, high: float) -> list[list[Any]]:
        own = 1 if high < 1 else 0
        above = {(i, j): _plain(low + (high - low) * self._rng.randint(0, 10) / 10) for j in range(n) for i in range(j)}
        return [[own if i == j else above[min(i, j), max(i, j)] for j in range(n)] for i in range(n)]

    def _normalised(self, drawn: list[Any], alone: Any) -> list[Any]:
        """Let weights, alone or as a field of objects, sum to one."""
        parts = [self._rng.randint(1, 10) for _ in drawn]
        cut = [round(20 * part / sum(parts)) / 20 or 0.05 for part in parts]
        cut = [_plain(one) for one in (*cut[:-1], 1 - sum(cut[:-1]))]
        for place, (one, weight) in enumerate(zip(drawn, cut, strict=True)):
            if isinstance(one, dict):
                drawn[place] = {
                    key: weight if re.search("weight|share$|fraction|alloc", key) else value
                    for key, value in one.items()
                }
            elif alone and isinstance(one, int | float):
                drawn[place] = weight
        return drawn

    def _object(self, schema: Mapping[str, Any], depth: int) -> Arguments:
        properties, required = schema.get("properties") or {}, schema.get("required", ())
        drawn = {
            name: self._value(name, one, depth)
            for name, one in properties.items()
            if name in required or self._rng.random() < 0.5
        }
        if properties and not drawn:  # nothing at all would read badly in a question
            name = self._rng.choice(list(properties))
            drawn = {name: self._value(name, properties[name], depth)}
        _let_rise(drawn, {name: properties[name] for name in drawn}, numbers=False)
        more = schema.get("additionalProperties")
        if not properties and more is not False:
            drawn = {key: self._value(key, more if isinstance(more, Mapping) else {"type": "string"}, depth)
                     for key in self._rng.sample(ANY_WORD, self._length)}  # fmt: skip
        return drawn


_BOUNDED = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "anyOf"}


def _let_rise(drawn: Arguments, properties: Mapping[str, Any], *, numbers: bool) -> None:
    """Put days, and numbers of one kind, in rising order: a start before an end, an age before another."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name, schema in properties.items():
        value = drawn[name]
        if not isinstance(schema, Mapping) or _BOUNDED & schema.keys():
            continue
        if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d.*", value):
            kinds["day"].append(name)
        elif numbers and type(value) in (int, float):
            about = about_it(name, schema)
            kinds[next((words for words, _ in RANGES if re.search(words, about)), "any")].append(name)
    for names in kinds.values():
        drawn |= dict(zip(names, sorted(drawn[name] for name in names), strict=True))


def _names_in(schema: Any) -> set[str]:
    """Return the names of all parameters and fields of a schema."""
    found: set[str] = set()
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            found |= set(one.get("properties") or ()) if isinstance(one.get("properties"), Mapping) else set()
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    return found


def _other_numbers(text: str, rng: random.Random) -> str:
    return re.sub(
        r"(?<![\w.])\d{1,3}(?![\w.])", lambda found: str(rng.randint(2, 30)) if found[0] != "2" else "2", text
    )


def _plain(value: float, *, integer: bool = False) -> int | float:
    """Return a number as a person writes it: whole where it is, without the noise of binary fractions."""
    value = round(value, 4)
    return int(value) if integer or value == int(value) else value


def _key(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)

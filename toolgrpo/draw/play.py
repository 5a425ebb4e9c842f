"""Play tools with drawn arguments, in their own workers: what answers, what it answers, and whether it does so again.

A program is a list of calls that run one after the other in a session of its own, so that an environment begins anew.
`explore` draws arguments for every tool until enough calls are answered; `link` lets one call use the result of
another; `replayed` runs programs once more, in workers that know nothing of the first time.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from toolgrpo.draw.arguments import Arguments, Drawer, Seen, outputs
from toolgrpo.draw.hints import words_of
from toolgrpo.episode.dropped import DropEpisode, EnvironmentLost
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.toolbox import Toolbox

DEADLINE_S = 10.0  # of one call
LONGEST = 600  # characters of a result that a row can have as its answer
_AT_ONCE = 32  # programs
_A_ROUND = 8  # calls of a tool
_HANGS = 3  # calls without an end, and none with one, after which a tool is left alone
_TRIES = 3  # likewise, of a check
_HOPELESS = 12  # rounds without an answer that is new
_SLOW_S, _BIG = 1.0, 100_000

_BUSY = (ToolErrorKind.TIMEOUT, ToolErrorKind.DIED, ToolErrorKind.DROPPED)
_NOTHING = re.compile(
    r"\s*(?:no(?:thing|ne|t found| results?\b| such\b| match)|unknown\b|null\s*$|\[\]\s*$|\{\}\s*$|error\b|n/a\b|\[status [45]"
    r'|\{\s*"(?:error|detail)"|.{0,60}\bnot found\b|.{0,40}\bno results?\b|.{0,40}\binvalid\b|$)',
    re.IGNORECASE,
)
_PAGE = re.compile(r"\s*(?:\[status \d+\]\s*)?<(?:!doctype html|html)\b", re.IGNORECASE)
_BUGS = (
    *("AttributeError", "NameError", "UnboundLocalError", "TypeError", "ImportError", "ModuleNotFoundError"),
    *("RecursionError", "MemoryError", "SystemExit", "NotImplementedError", "AssertionError", "SyntaxError"),
)


@dataclass(frozen=True, slots=True)
class PlayedCall:
    """A call with what it answered.

    `links` says which parameters have a value of the call before, each with the key of that value in the result.
    """

    spec: ToolSpec
    arguments: Arguments
    result: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def as_gold(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}


Program = tuple[PlayedCall, ...]


@dataclass
class Played:
    """The calls of one tool that were answered, and the faults of the others."""

    drawer: Drawer
    good: dict[str, PlayedCall] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    out: str = ""  # why its calls make no rows
    stale: int = 0  # rounds since a call was answered that was not before

    @property
    def spec(self) -> ToolSpec:
        return self.drawer.spec


def run_programs(
    toolbox: Toolbox, programs: Sequence[Sequence[PlayedCall]], row: Mapping[str, Any]
) -> list[list[ToolResult]]:
    """Run programs many at a time; return the results of each, which end with its first error."""

    async def run(program: Sequence[PlayedCall], free: asyncio.Semaphore) -> list[ToolResult]:
        results: list[ToolResult] = []
        try:
            async with free, toolbox.session(row) as session:
                for call in program:
                    attempt = CallAttempt(AttemptStatus.OK, "", call.name, call.arguments)
                    results += await session.call([attempt])
                    if not results[-1].ok:
                        break
        except (DropEpisode, EnvironmentLost) as error:
            results.append(ToolResult(f"Error: {error}", error=ToolErrorKind.DROPPED))
        return results

    async def run_all() -> list[list[ToolResult]]:
        free = asyncio.Semaphore(_AT_ONCE)
        return await asyncio.gather(*(run(program, free) for program in programs))

    return toolbox.wait_for(run_all())


def may_be_played(spec: ToolSpec, *, allow_writes: bool) -> bool:
    """Return whether a tool may be called with drawn arguments.

    A function of the user's own runs in training anyway. An MCP server must mark its tool `readOnlyHint`.
    """
    return allow_writes or spec.read_only is not False


NOT_READ_ONLY = "its server does not mark it readOnlyHint; --allow_writes calls it anyway"


def fault_of(result: ToolResult) -> str:
    """Return why a result is no answer; an empty text for one that is."""
    if not result.ok:
        return " ".join(result.content.removeprefix(f"Error: {result.name}: ").split(". Usage: ")[0].split())[:160]
    if _PAGE.match(result.content):
        return "it answers HTML, a page for people"
    return f"it answers {result.content.strip()[:60]!r}" if _NOTHING.match(result.content) else ""


def explore(
    toolbox: Toolbox,
    rng: random.Random,
    *,
    wanted: int,
    budget_s: float,
    allow_writes: bool,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Played]:
    """Draw calls of every tool until `wanted` different ones of each are answered, or the time is over."""
    seen, ends = Seen(), time.monotonic() + budget_s
    played = {name: Played(Drawer(known.spec, seen, rng)) for name, known in toolbox.tools.items()}
    for one in played.values():
        if not may_be_played(one.spec, allow_writes=allow_writes):
            one.out = NOT_READ_ONLY
    tried: set[str] = set()
    while time.monotonic() < ends:
        programs = [
            (PlayedCall(one.spec, arguments),)
            for one in played.values()
            if not one.out and one.stale < _HOPELESS and len(one.good) < wanted
            for arguments in _new(one, tried)
        ]
        if not programs:
            break
        for (call,), results in zip(programs, run_programs(toolbox, programs, {}), strict=True):
            _note(played[call.name], call, results[-1], seen)
        say(
            f"{sum(one.drawer.calls for one in played.values())} calls, {sum(len(one.good) for one in played.values())} answered"
        )
    today = {datetime.now(UTC).date().isoformat(), datetime.now().date().isoformat()}
    for one in played.values():
        if any(day in call.result and day not in str(call.arguments) for call in one.good.values() for day in today):
            one.out = "its answers have today's date, and would be wrong tomorrow"
        if not one.out and not one.good:
            (why, n), *_ = one.errors.most_common(1) or [("it was not called in time", 0)]
            one.out = f"none of {one.drawer.calls} calls was answered, most often ({n}): {why}{one.drawer.advice()}"
    return played


def _new(one: Played, tried: set[str]) -> list[Arguments]:
    """Draw arguments that were not tried before; a tool that has no more is done."""
    drawn: dict[str, Arguments] = {}
    for _ in range(4 * _A_ROUND):
        arguments = one.drawer.draw()
        key = f"{one.spec.name} {json.dumps(arguments, sort_keys=True, default=str)}"
        if key not in tried and len(drawn) < _A_ROUND:
            drawn[key] = arguments
    tried.update(drawn)
    one.stale += 1
    return list(drawn.values())


def _note(one: Played, call: PlayedCall, result: ToolResult, seen: Seen) -> None:
    fault = fault_of(result)
    one.drawer.learn(call.arguments, not fault, result.content)
    if fault:
        alike = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", re.sub(r"\d[\d.]*", "N", fault))  # whatever the values were
        one.errors[fault if result.error is ToolErrorKind.TIMEOUT else alike] += 1
        if result.error is ToolErrorKind.TIMEOUT and one.errors[fault] >= _HANGS and not one.good:
            one.stale = _HOPELESS
        return
    seen.add(call.name, result.content)
    if len(result.content) > LONGEST or result.truncated:
        one.errors[f"it answers at length ({len(result.content):,} characters); {LONGEST} fit an answer"] += 1
        return
    one.stale = 0
    one.good[json.dumps(call.as_gold, sort_keys=True)] = replace(call, result=result.content)


# Calls that use the result of the call before.


def linked(programs: Sequence[Program], played: Mapping[str, Played], rng: random.Random, most: int) -> list[Program]:
    """Return programs, each with one more call that takes a value of its last result; nothing of them has run."""
    there = [one for one in played.values() if one.good and not one.out]
    by_pair: defaultdict[tuple[str, str], list[Program]] = defaultdict(list)
    for program in programs:
        values = _named_values(program[-1])
        for one in there:
            fits = [
                (name, said, value)
                for name, schema in one.spec.parameters.get("properties", {}).items()
                if name not in one.spec.examples
                for said, value in values.items()
                if _fits(name, schema, said, value, program[-1])
            ]
            if fits:
                name, said, value = rng.choice(fits)
                call = PlayedCall(one.spec, one.drawer.draw({name: value}), links={name: said})
                by_pair[program[-1].name, one.spec.name].append((*program, call))
    share = max(2, 2 * most // max(1, len(by_pair)))
    found = [program for some in by_pair.values() for program in rng.sample(some, min(len(some), share))]
    return rng.sample(found, min(len(found), most))


def _named_values(call: PlayedCall) -> dict[str, Any]:
    """Return the values of a result, each with words for it: the first of several is said to be that."""
    found: defaultdict[str, dict[Any, None]] = defaultdict(dict)
    for label, value in outputs(call.result):
        found[label][value] = None
    return {
        (f"first {label}" if len(values) > 1 else label): next(iter(values))
        for label, values in list(found.items())[:12]
        if label or len(values) == 1
    }


def _fits(name: str, schema: Any, said: str, value: Any, call: PlayedCall) -> bool:
    """Return whether a parameter can mean a value of a result, by its kind and its name."""
    if not isinstance(schema, Mapping) or "enum" in schema or value in call.arguments.values():
        return False
    kind = "string" if isinstance(value, str) else "integer" if isinstance(value, int) else "number"
    if schema.get("type") not in (kind, "number" if kind == "integer" else kind):
        return False
    words, labels = words_of(name), words_of(said or call.name)
    if words[-1] in labels or (words[0] in labels and len(words) > 1):
        return True
    return kind != "string" and not said and len(name) <= 2 and abs(value) < 1e6  # a bare number, and `a`, `x`, `n`


def answered(toolbox: Toolbox, programs: Sequence[Program]) -> list[Program]:
    """Run programs; return those of which every call is answered, with the results."""
    good = []
    for program, results in zip(programs, run_programs(toolbox, programs, {}), strict=True):
        done = tuple(replace(call, result=one.content) for call, one in zip(program, results, strict=False))
        as_before = all(new.result == old.result for new, old in zip(done[:-1], program, strict=False) if old.result)
        fine = len(results) == len(program) and not any(map(fault_of, results)) and len(results[-1].content) <= LONGEST
        if fine and (as_before or not any(call.links for call in program)):
            good.append(done)
    return good


# Once more, elsewhere.


def replayed(
    toolbox: Toolbox, programs: Sequence[Program], rng: random.Random, row: Mapping[str, Any]
) -> tuple[list[Program], dict[str, str]]:
    """Run programs again, in another order; return those with the same results, and which tools gave others, and how."""
    order = list(programs)
    rng.shuffle(order)
    same: list[Program] = []
    changing: dict[str, str] = {}
    for program, results in zip(order, run_programs(toolbox, order, row), strict=True):
        for call, result in zip(program, results, strict=False):
            if result.error in _BUSY:
                break  # it may be the machine's doing: this row is not kept, and others may be
            if result.content != call.result:
                differs = next(
                    (n for n, (a, b) in enumerate(zip(call.result, result.content, strict=False)) if a != b), 0
                )
                some = slice(max(0, differs - 15), differs + 25)
                changing.setdefault(call.name, f"{call.result[some]!r} and then {result.content[some]!r}")
                break
        else:
            same.append(program)
    kept = [program for program in same if not any(call.name in changing for call in program)]
    return kept, {name: f"it does not answer the same twice: {how}" for name, how in changing.items()}


# What `toolgrpo check` says.


@dataclass(frozen=True, slots=True)
class ToolFault:
    """A fault of a tool, whatever its arguments are."""

    tool: str
    kind: str
    said: str


@dataclass(frozen=True, slots=True)
class Tried:
    """Findings of a random agent: faults, how many calls of each tool were answered, and the tools that it may not call."""

    faults: Sequence[ToolFault]
    answered: Mapping[str, int]
    not_called: Sequence[str]


def try_tools(first: Toolbox, again: Toolbox, row: Mapping[str, Any], *, seed: int, allow_writes: bool) -> Tried:
    """Play each tool a little, as in an episode of this row; ask `again` what was answered."""
    rng, seen = random.Random(seed), Seen()
    specs = [known.spec for known in first.tools.values()]
    drawers = {one.name: Drawer(one, seen, rng) for one in specs if may_be_played(one, allow_writes=allow_writes)}
    faults: dict[tuple[str, str], ToolFault] = {}
    answered = dict.fromkeys(drawers, 0)
    good: list[Program] = []
    for _ in range(2):  # the second time with what the first has seen
        programs = [(PlayedCall(one.spec, one.draw()),) for one in drawers.values() for _ in range(_TRIES)]
        for (call,), results in zip(programs, run_programs(first, programs, row), strict=True):
            result, fault = results[-1], fault_of(results[-1])
            for kind, said in _faults(call, result).items():
                faults.setdefault((call.name, kind), ToolFault(call.name, kind, said))
            drawers[call.name].learn(call.arguments, not fault, result.content)
            if not fault:
                seen.add(call.name, result.content)
                answered[call.name] += 1
                good.append((replace(call, result=result.content),))
    for name, how in replayed(again, good, rng, row)[1].items():
        faults.setdefault((name, "changes"), ToolFault(name, "changes", how))
    return Tried(tuple(faults.values()), answered, [one.name for one in specs if one.name not in drawers])


def _faults(call: PlayedCall, result: ToolResult) -> dict[str, str]:
    """Return the faults of an answer, by kind."""
    found, given = {}, json.dumps(call.arguments, ensure_ascii=False, default=str)[:120]
    kind = re.match(r"\w+", result.content.removeprefix(f"Error: {call.name}: "))
    if result.error is ToolErrorKind.TIMEOUT:
        found["hangs"] = f"{fault_of(result)} to {given}"
    elif result.error in (ToolErrorKind.DIED, ToolErrorKind.BAD_RESULT):
        found["dies"] = f"{fault_of(result)}, of {given}"
    elif result.error is ToolErrorKind.RAISED and kind is not None and kind[0] in _BUGS:
        found["raises"] = f"{fault_of(result)}, of {given}"
    elif result.ok and _PAGE.match(result.content):
        found["page"] = f"it answers HTML, a page for people, to {given}"
    if result.duration_s > _SLOW_S and "hangs" not in found:
        found["slow"] = f"{result.duration_s:.1f} s for {given}"
    if len(result.content) + result.left_out > _BIG:
        found["big"] = f"{(len(result.content) + result.left_out) / 1000:,.0f} kB for {given}"
    return found

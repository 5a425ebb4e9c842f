"""Questions about a company, each with one short answer that two different queries agree on.

A question is a measure (how many, how much, when, who) and filters (of whom, for what, when, with which status). Each has
its words and its SQL over the tables as they are. It also has its SQL over `_plain`, the database as it would be without
splits and traps, which gives the second query. Where it meets a trap, `unseen` is the SQL of somebody who does not see it:
that must give another answer.
"""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import dataclass

from sql_companies import YEARS, Company, plural

TIERS = ("one table", "join", "trap", "chain")
AXES = ("who", "what", "year", "status", "size")  # of filters, in the order of words
_LEAST = 32  # of a number that is counted: smaller ones are guessed too easily, and stand in dates


@dataclass(frozen=True)
class Filter:
    axis: str  # two filters of one axis are not combined
    words: str
    where: str
    plain: str
    joins: tuple[str, ...] = ()
    unseen: str = ""
    first: str = ""  # a query whose result is the {} of `where`: a chain
    first_plain: str = ""
    few: bool = False  # it leaves a handful of rows


@dataclass(frozen=True)
class Measure:
    words: str
    said: str
    form: str  # number, money, name or date
    select: str
    plain: str  # a whole query; {} is its condition
    joins: tuple[str, ...] = ()
    order: str = ""
    unseen: str = ""
    axes: tuple[str, ...] = AXES  # of the filters that fit
    few: bool = False  # wants exactly one filter, which leaves a handful of rows


@dataclass(frozen=True)
class Asked:
    question: str
    answer: str
    said: str  # the answer in a sentence
    tables: tuple[str, ...]
    steps: tuple[str, ...]  # the queries that answer it; {} in the second is the result of the first
    unseen: str  # the query of somebody who does not see the trap, where there is one


def ask(c: Company, database: sqlite3.Connection, tier: str, rng: random.Random) -> Asked | None:
    """Draw a question about a company and its database; None if it is of another tier, or its answer is not sure."""
    table, source = rng.choices(((c.event, _deals), (c.staff, _staff), (c.item, _items)), (6, 2, 1))[0]
    measures, filters = source(c, rng)
    measure = rng.choice(measures)
    fitting = [one for one in filters if one.axis in measure.axes and one.few >= measure.few]
    plain, heads = ([one for one in fitting if bool(one.first) is chained] for chained in (False, True))
    n_filters = (tier != "chain") if measure.few else rng.choice((0, 1, 1, 1, 2))
    picked = rng.sample(plain, min(n_filters, len(plain)))
    if tier == "chain" and heads:
        picked = [*picked[:1], rng.choice(heads)]
    chosen = {one.axis: one for one in picked}
    if table == c.staff and c.gone:
        chosen["gone"] = filters[0]
    used = sorted(chosen.values(), key=lambda one: (bool(one.first), measure.axes.index(one.axis)))
    pieces: list[Measure | Filter] = [measure, *used]
    joins = [sql for name, sql in _joins(c).items() if any(name in piece.joins for piece in pieces)]
    n_traps = sum(bool(piece.unseen) for piece in pieces)
    if _tier(n_traps, used, joins) != tier or n_traps > 1 or (measure.few and not used):
        return None

    def query(select: str, where: list[str]) -> str:
        parts = [f"SELECT {select} FROM {table}", *joins, *(["WHERE " + " AND ".join(where)] if where else [])]
        sql = " ".join([*parts, measure.order]).strip()
        return sql if joins else sql.replace(f"{table}.", "")

    where = " AND ".join(one.plain for one in used) or "1"
    last = query(measure.select, [one.where for one in used])
    check = _plain(c) + measure.plain.format(where)
    unseen = query(measure.unseen or measure.select, [one.unseen or one.where for one in used]) if n_traps else ""
    question = measure.words.format("".join(_with_comma(one, place) for place, one in enumerate(used)))
    steps: tuple[str, ...] = (last,)
    if tier == "chain":
        head = next(one for one in used if one.first)
        found = _only(database, head.first)
        if f"ORDER BY {measure.select} " in head.first:  # one query has both
            return None
        if found is None or found != _only(database, _plain(c) + head.first_plain):
            return None
        steps, last = (head.first, last), last.format(found)
    answer = _sure_answer(database, measure.form, last, check, unseen)
    if answer is None or _guessable(measure.form, answer, question):
        return None
    tables = (table, *(join.split()[1] for join in joins))
    return Asked(question, answer, measure.said.format(answer), tables, steps, unseen)


def _with_comma(one: Filter, place: int) -> str:
    return f"{',' if place or one.axis == 'gone' else ''} {one.words}"


def _tier(n_traps: int, used: list[Filter], joins: list[str]) -> str:
    if n_traps:
        return "trap"
    return "chain" if any(one.first for one in used) else "join" if joins else "one table"


def _sure_answer(database: sqlite3.Connection, form: str, sql: str, check: str, unseen: str) -> str | None:
    """Return the answer if both queries give it, and the one that misses the trap does not."""
    found, again = (_written(form, _only(database, one)) for one in (sql, check))
    return found if found == again and not (unseen and _written(form, _only(database, unseen)) == found) else None


def _guessable(form: str, answer: str, question: str) -> bool:
    if form == "number":
        return int(answer) < _LEAST or answer in re.findall(r"\d+", question)
    return answer.lower() in question.lower()


def _only(database: sqlite3.Connection, sql: str) -> object:
    rows = database.execute(sql).fetchmany(2)
    return rows[0][0] if len(rows) == 1 else None


def _written(form: str, value: object) -> str | None:
    if isinstance(value, int | float):
        return f"{value:.2f}" if form == "money" else f"{value:.0f}"
    return None if value is None else str(value)


def _plain(c: Company) -> str:
    """Return the database without splits and traps, as the beginning of a query: tables `deal`, `worker` and `thing`."""
    euros = f"/ {100.0 if c.has('unit') else 1.0}"
    codes = c.codes and c.codes.table.format(c.status)
    state = c.codes and f"(SELECT {c.codes.meaning} FROM {codes} WHERE {c.codes.code} = {c.status}{c.of_status()})"
    city, group = (
        f"(SELECT {c.label} FROM {split.table} s WHERE s.{c.key} = t.{split.column})" if split.table else split.column
        for split in (c.cities, c.groups)
    )
    second = c.second if c.has("date") else "NULL"
    return (
        f"WITH thing AS (SELECT {c.key} AS id, {c.label} AS what, {group} AS family, {c.price} {euros} AS euros FROM {c.item} t), "
        f"buyer AS (SELECT {c.key} AS id, {c.label} AS who, {city} AS place FROM {c.party} t), "
        f"deal AS (SELECT what, family, who, place, {c.quantity} AS pieces, {c.quantity} * euros AS worth, "
        f"{state or c.status} AS state, {c.first} AS early, {second} AS late FROM {c.event} "
        f"LEFT JOIN thing ON thing.id = {c.item_ref} LEFT JOIN buyer ON buyer.id = {c.party_ref}), "
        f"worker AS (SELECT {c.label} AS who, {c.branch} AS place, {c.wage} AS euros FROM {c.staff}"
        + (f" WHERE {c.gone.column} {c.gone.counts}) " if c.gone else ") ")
    )


def _most(of: str, by: str, when: str = "1") -> str:
    """Return the query over `_plain` for whom or what has the most."""
    groups = f"FROM deal WHERE {when} GROUP BY {of}"
    return f"SELECT {of} {groups} HAVING {by} = (SELECT MAX(n) FROM (SELECT {by} AS n {groups}))"


def _joins(c: Company) -> dict[str, str]:
    """Return the joins behind the table of events, or of items, in the order in which they can stand."""
    codes = c.codes and c.codes.table.format(c.status)
    made = {
        "party": f"JOIN {c.party} ON {c.event}.{c.party_ref} = {c.party}.{c.key}",
        "item": f"JOIN {c.item} ON {c.event}.{c.item_ref} = {c.item}.{c.key}",
        "cities": f"JOIN {c.cities.table} ON {c.party}.{c.cities.column} = {c.cities.table}.{c.key}",
        "groups": f"JOIN {c.groups.table} ON {c.item}.{c.groups.column} = {c.groups.table}.{c.key}",
    }
    return {**made, "codes": f"JOIN {codes} ON {c.event}.{c.status} = {codes}.{c.codes.code}"} if c.codes else made


def _deals(c: Company, rng: random.Random) -> tuple[list[Measure], list[Filter]]:
    deal, deals, party, item, e = c.kind.event, plural(c.kind.event), c.kind.party, c.kind.item, c.event
    quantity, total = f"{e}.{c.quantity}", f"{e}.{c.total}" if c.has_total else f"{e}.{c.quantity} * {c.item}.{c.price}"
    dates = [(c.kind.first, c.first, c.second, "early"), (c.kind.second, c.second, c.first, "late")]
    dates = dates if c.has("date") else dates[:1]
    measures = [
        Measure(
            f"What is the number of {deals}{{}}?",
            *(f"There are {{}} {deals}.", "number", "COUNT(*)", "SELECT COUNT(*) FROM deal WHERE {}"),
        ),
        Measure(
            f"What is the total quantity of all {deals}{{}}?",
            *("The total quantity is {}.", "number", f"SUM({quantity})", "SELECT SUM(pieces) FROM deal WHERE {}"),
        ),
        Measure(
            f"What is the worth in euros of all {deals}{{}}?",
            *("They are worth {} euros.", "money"),
            f"SUM({total}) / 100.0" if c.has("unit") else f"ROUND(SUM({total}), 2)",
            "SELECT SUM(worth) FROM deal WHERE {}",
            () if c.has_total else ("item",),
            unseen=f"SUM({total})" if c.has("unit") else "",
        ),
        Measure(
            *(f"Which {party} has the most {deals}{{}}?", f"The {party} is {{}}.", "name", f"{c.party}.{c.label}"),
            *(_most("who", "COUNT(*)", "{0}"), ("party",)),
            f"GROUP BY {c.party}.{c.key} ORDER BY COUNT(*) DESC LIMIT 1",
            axes=("what", "year", "status", "size"),
        ),
        Measure(
            *(f"Which {item} has the largest total quantity in all {deals}{{}}?", f"The {item} is {{}}.", "name"),
            *(f"{c.item}.{c.label}", _most("what", "SUM(pieces)", "{0}"), ("item",)),
            f"GROUP BY {c.item}.{c.key} ORDER BY SUM({quantity}) DESC LIMIT 1",
            axes=("who", "year", "status", "size"),
        ),
    ]
    measures += [
        Measure(
            *(f"On which date was the {rank} {deal}{{}} {verb}?", f"It was {verb} on {{}}.", "date"),
            *(f"{function}({e}.{column})", f"SELECT {function}({plain}) FROM deal WHERE {{}}"),
            unseen=f"{function}({e}.{other})" if c.has("date") else "",
            axes=("who", "what"),
            few=True,
        )
        for verb, column, other, plain in dates
        for rank, function in (("latest", "MAX"), ("first", "MIN"))
    ]
    name, thing, state = rng.choice(c.parties), rng.choice(c.items), rng.choice(c.states)
    year, size, (verb, column, other, plain) = rng.choice(YEARS), rng.randrange(5, 36), rng.choice(dates)
    is_named, has_state = f"{c.party}.{c.label} = '{name}'", f"{e}.{c.status} = '{state}'"
    filters = [
        Filter(
            *("who", f"of the {party} {name}"),
            f"{c.party}.{c.label} LIKE '%{name}%'" if c.around_names else is_named,
            f"who = '{(c.around_names or '{}').format(name)}'",
            ("party",),
            unseen=is_named if c.around_names else "",
            few=True,
        ),
        _of_split(c, "who", f"of {plural(party)} from {{}}", c.party, "place", rng),
        Filter("what", f"for the {thing}", f"{c.item}.{c.label} = '{thing}'", f"what = '{thing}'", ("item",), few=True),
        _of_split(c, "what", f"for {{}} {plural(item)}", c.item, "family", rng),
        Filter(
            *("year", f"{verb} in {year}", f"{e}.{column} LIKE '{year}-%'"),
            f"{plain} BETWEEN '{year}-01-01' AND '{year}-12-31'",
            unseen=f"{e}.{other} LIKE '{year}-%'" if c.has("date") else "",
        ),
        Filter("size", f"with a quantity above {size}", f"{quantity} > {size}", f"pieces > {size}"),
        Filter(
            *("status", f"with the status {state}"),
            f"{c.codes.table.format(c.status)}.{c.codes.meaning} = '{state}'{c.of_status()}" if c.codes else has_state,
            f"state = '{state}'",
            ("codes",) if c.codes else (),
            unseen=has_state if c.codes else "",
        ),
        *(
            _most_of(c, axis, f"{of} with the {most}", by)
            for axis, of in (("who", f"of the {party}"), ("what", f"for the {item}"))
            for most, by in (
                (f"most {deals} overall", "COUNT(*)"),
                ("largest total quantity overall", f"SUM({quantity})"),
            )
        ),
        *(
            Filter(
                *("what", f"for the {rank} {item}", f"{c.item}.{c.label} = '{{}}'"),
                *(f"what = ({first})", ("item",)),
                first=f"SELECT {c.label} FROM {c.item} ORDER BY {c.price} {order} LIMIT 1",
                first_plain=first,
                few=True,
            )
            for rank, function, order in (("most expensive", "MAX", "DESC"), ("cheapest", "MIN", "ASC"))
            for first in [f"SELECT what FROM thing WHERE euros = (SELECT {function}(euros) FROM thing)"]
        ),
    ]
    return measures, filters


def _most_of(c: Company, axis: str, words: str, by: str) -> Filter:
    """Return the filter by whom or what has the most."""
    table, join = (c.party, "party") if axis == "who" else (c.item, "item")
    first = _most(axis, by.replace(f"{c.event}.{c.quantity}", "pieces"))
    return Filter(
        *(axis, words, f"{table}.{c.label} = '{{}}'", f"{axis} = ({first})", (join,)),
        first=f"SELECT {table}.{c.label} FROM {c.event} {_joins(c)[join]} GROUP BY {table}.{c.key} "
        f"ORDER BY {by} DESC LIMIT 1",
        first_plain=first,
        few=True,
    )


def _of_split(c: Company, axis: str, words: str, table: str, plain: str, rng: random.Random) -> Filter:
    """Return the filter by a city or a group, which may stand in a table of its own."""
    split, name = (c.cities, "cities") if axis == "who" else (c.groups, "groups")
    value, joined = rng.choice(split.values), "party" if axis == "who" else "item"
    where = f"{split.table}.{c.label} = '{value}'" if split.table else f"{table}.{split.column} = '{value}'"
    return Filter(
        axis, words.format(value), where, f"{plain} = '{value}'", (joined, name) if split.table else (joined,)
    )


def _staff(c: Company, rng: random.Random) -> tuple[list[Measure], list[Filter]]:
    person, place = c.kind.staff, rng.choice(c.cities.values)
    best = "SELECT place FROM worker WHERE euros = (SELECT MAX(euros) FROM worker)"
    average = Measure(
        *(
            f"To two decimals, how many euros does a {person} earn on average{{}}?",
            f"On average a {person} earns {{}} euros.",
            "money",
        ),
        *(f"ROUND(AVG({c.wage}), 2)", "SELECT SUM(euros) * 1.0 / COUNT(*) FROM worker WHERE {}"),
        axes=("where", "best", "gone"),
    )
    highest = Measure(
        *(f"Which {person} earns the most{{}}?", f"The {person} is {{}}.", "name", c.label),
        "SELECT who FROM worker WHERE {0} AND euros = (SELECT MAX(euros) FROM worker WHERE {0})",
        order=f"ORDER BY {c.wage} DESC LIMIT 1",
        axes=("where", "gone"),
    )
    filters = [
        Filter("where", f"in {place}", f"{c.branch} = '{place}'", f"place = '{place}'"),
        Filter(
            *("best", f"where the best-paid {person} works", f"{c.branch} = '{{}}'"),
            f"place = ({best})",
            first_plain=best,
            first=f"SELECT {c.branch} FROM {c.staff} ORDER BY {c.wage} DESC LIMIT 1",
        ),
    ]
    if c.gone:
        filters.insert(0, Filter("gone", c.gone.words, f"{c.gone.column} {c.gone.counts}", "1", unseen="1"))
    return [highest] if c.has("unit") else [average, highest], filters  # no amount whose unit could be meant two ways


def _items(c: Company, rng: random.Random) -> tuple[list[Measure], list[Filter]]:
    item, price = c.kind.item, f"{c.item}.{c.price}"
    seen, unseen = (f"{price} / 100.0", price) if c.has("unit") else (price, "")
    thing, only = rng.choice(c.items), f"{c.item}.{c.label}"
    measures = [
        Measure(
            *(
                "What is the price in euros{}?",
                "The price is {} euros.",
                "money",
                seen,
                "SELECT euros FROM thing WHERE {}",
            ),
            unseen=unseen,
            axes=("what",),
            few=True,
        ),
        Measure(
            *(f"Which {item} is the most expensive{{}}?", f"The {item} is {{}}.", "name", only),
            "SELECT what FROM thing WHERE {0} AND euros = (SELECT MAX(euros) FROM thing WHERE {0})",
            order=f"ORDER BY {price} DESC LIMIT 1",
            axes=("what",),
        ),
    ]
    in_group = _of_split(c, "what", f"of {{}} {plural(item)}", c.item, "family", rng)
    own = tuple(join for join in in_group.joins if join != "item")
    return measures, [
        Filter("what", f"of the {thing}", f"{only} = '{thing}'", f"what = '{thing}'", few=True),
        Filter("what", in_group.words, in_group.where, in_group.plain, own),
    ]

"""Small companies as SQLite databases. A company is drawn from its name alone: `Company("hotel-2")` is the same everywhere.

Drawn are the names of tables and columns, what is split into tables of its own, and three of five traps: amounts in cents,
two dates of which a question means one, codes for a status, entries that do not count any more, names with something
around them. The split "heldout" shares no kind of company, table, column, name or form of a trap with the split "train".
"""

from __future__ import annotations

import random
import sqlite3
from datetime import date, timedelta
from typing import Any, NamedTuple

TRAPS = ("unit", "date", "code", "gone", "like")
YEARS = (2021, 2022, 2023, 2024)


class Kind(NamedTuple):
    """The words of a kind of company: who buys what, what a deal is called and what happens to it, and who works there."""

    party: str
    item: str
    event: str
    first: str
    second: str
    staff: str


def _kinds(text: str) -> dict[str, Kind]:
    return {name: Kind(*words) for name, *words in map(str.split, text.strip().splitlines())}


KINDS = {
    "train": _kinds("""
        bakery       customer   cake    preorder     ordered      delivered baker
        hotel        guest      room    booking      booked       paid      porter
        gym          member     course  signup       registered   billed    trainer
        bicycles     buyer      bicycle sale         sold         invoiced  mechanic
        brewery      pub        beer    shipment     packed       unloaded  brewer
        library      reader     book    loan         lent         returned  librarian
        garage       driver     tyre    purchase     purchased    fitted    fitter
        florist      client     bouquet request      requested    collected gardener
        farm         retailer   crop    delivery     loaded       weighed   farmhand
        cinema       viewer     film    ticket       reserved     printed   usher
        print_shop   publisher  leaflet job          commissioned bound     typesetter
        school       pupil      lesson  enrolment    enrolled     approved  teacher
        theatre      subscriber play    subscription renewed      mailed    actor
        boat_hire    skipper    boat    charter      chartered    settled   sailor
        tailor       wearer     jacket  fitting      measured     altered   cutter
        dairy        grocer     cheese  consignment  dispatched   received  milker
        joinery      reseller   chair   invoice      issued       cleared   joiner
        nursery      grower     shrub   pickup       announced    labelled  florist
        travel       traveller  tour    reservation  held         confirmed guide
        bindery      author     volume  commission   accepted     shipped   binder
    """),
    "heldout": _kinds("""
        pharmacy     patient      remedy    prescription prescribed dispensed   pharmacist
        airline      passenger    route     itinerary    quoted     ticketed    steward
        vineyard     importer     wine      pallet       bottled    exported    vintner
        law_firm     plaintiff    service   mandate      instructed argued      lawyer
        ski_school   skier        slope     rental       rented     refunded    instructor
        insurer      policyholder tariff    claim        filed      reimbursed  adjuster
        scrapyard    collector    metal     haul         tipped     smelted     welder
        radio        advertiser   jingle    spot         recorded   aired       editor
        zoo          breeder      animal    exchange     arranged   quarantined warden
        shipyard     shipowner    engine    overhaul     docked     launched    rigger
        observatory  astronomer   telescope session      planned    observed    technician
        caterer      host         menu      banquet      contracted served      cook
    """),
}
_WORDS = {
    "train": {
        "key": "id nr",
        "name": "name label title",
        "city": "city town",
        "group": "category kind",
        "price": "price list_price",
        "quantity": "quantity qty",
        "total": "total amount",
        "status": "status state",
        "wage": "wage salary",
        "branch": "branch office",
        "date": "{}_on date_{}",
        "first names": "Anna Boris Clara David Emma Felix Greta Hugo Ida Jonas Karla Leon",
        "last names": """
            Adler Brandt Carter Dietz Ellis Fischer Garner Hansen Ibsen Jansen Keller Lorenz Mercer Nolan Ostrow Pohl
            Quinn Reuter Sander Thorne Ulrich Vogel Winter Yates Ziegler Becker Collins Dreyer Easton Fuchs Graham Huber
            Ivers Jordan Kessler Lindner Marlow Neumann Osborn Prior""",
        "cities": "Aachen Bremen Cork Dijon Essen Florence Ghent Hull Kiel Leeds Malmo Nantes",
        "brands": """
            Amber Birch Cedar Comet Delta Ember Falcon Garnet Harbor Indigo Juniper Kestrel Lotus Maple Nimbus Onyx Pebble
            Quartz Raven Sierra""",
        "groups": "basic standard premium seasonal",
        "states": "open waiting cancelled closed urgent",
    },
    "heldout": {
        "key": "ref uid",
        "name": "designation caption called",
        "city": "place location",
        "group": "family tier",
        "price": "rate charge",
        "quantity": "pieces units",
        "total": "gross due",
        "status": "stage phase",
        "wage": "pay stipend",
        "branch": "site base",
        "date": "{}_at when_{}",
        "first names": "Alma Bruno Celia Dario Elena Fabio Gilda Henri Irma Jules Kira Luca",
        "last names": """
            Abbott Bertram Castell Duval Engel Farrow Gilbert Holm Ingram Jasper Kramer Lavigne Moreau Norden Olsen Petrov
            Rossi Sorensen Tanner Urban Verdi Walsh Xavier Ypsilon Zimmer Arnaud Bellini Crane Delgado Eklund Fontaine Greco
            Hidalgo Iversen Juarez Kowalski Lombard Mancini Novak Orsini""",
        "cities": "Arles Basel Cadiz Dover Exeter Graz Haarlem Innsbruck Jena Lugano Mons Novara",
        "brands": """
            Acorn Basalt Cobalt Dune Echo Fjord Glacier Heron Iris Jade Koala Lynx Meadow Nova Opal Pine Quill Reef Saffron
            Tundra""",
        "groups": "bronze silver golden heritage",
        "states": "pending resolved void disputed parked",
    },
}
WORDS = {split: {what: words.split() for what, words in of.items()} for split, of in _WORDS.items()}


class Codes(NamedTuple):
    """A table of codes: its name ({} is the coded column), its columns, and the codes. One may explain several columns."""

    table: str
    code: str
    meaning: str
    codes: str
    of: str | None = None


class Gone(NamedTuple):
    """A column that marks entries which do not count any more: its name and type, the values of the others and of them."""

    column: str
    type: str
    here: Any
    gone: Any
    counts: str  # the condition on the column for those that count
    words: str


UNITS = {  # the column's name, what its comment says, and what a table of remarks says
    "train": [("{}_cents", "", ""), ("{}", "in cents", "")],
    "heldout": [("{}", "100 make a euro", ""), ("{}", "", "hundredths of a euro")],
}
CODES = {
    "train": [
        Codes("{}_codes", "code", "meaning", "1 2 3 4"),
        Codes("{}_list", "letter", "stands_for", "A B C D"),
    ],
    "heldout": [
        Codes("legend", "token", "explanation", "10 20 30 40", of="field"),
        Codes("{}_key", "mark", "reads", "I II III IV"),
    ],
}
GONE = {
    "train": [
        Gone("deleted", "INTEGER", 0, 1, "= 0", "not counting deleted ones"),
        Gone("deleted_on", "TEXT", None, "2024-05-31", "IS NULL", "not counting deleted ones"),
    ],
    "heldout": [
        Gone("active", "INTEGER", 1, 0, "= 1", "counting only active ones"),
        Gone(
            "valid_until", "TEXT", "9999-12-31", "2023-06-30", "> '2024-12-31'", "counting only those valid after 2024"
        ),
    ],
}
AROUND_NAMES = {"train": ["{} GmbH", "{} & Sons"], "heldout": ["Messrs {}", "The {} Holding"]}


def plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


class Company:
    """A company: the names of its tables and columns, its traps, and the SQL and the rows of its database."""

    def __init__(self, name: str) -> None:
        self.name, (kind_name, _, _) = name, name.partition("-")
        self.split = next((split for split, kinds in KINDS.items() if kind_name in kinds), "")
        if not self.split:
            known = ", ".join(kind for kinds in KINDS.values() for kind in kinds)
            raise ValueError(f"a database is named like hotel-1, got {name!r}; there are the kinds {known}")
        self.kind, self.words = KINDS[self.split][kind_name], WORDS[self.split]
        self._rng = rng = random.Random(name)  # a text seeds by its bytes, not by its hash
        self.traps = rng.sample(TRAPS, 3)
        column = {what: rng.choice(self.words[what]) for what in list(self.words)[:11]}
        style = rng.choice(["{0}", "{1}", "all_{1}"])
        nouns = (self.kind.party, self.kind.item, self.kind.event, self.kind.staff)
        self.party, self.item, self.event, self.staff = (style.format(noun, plural(noun)) for noun in nouns)
        self.key, self.label, self.quantity = column["key"], column["name"], column["quantity"]
        self.party_ref, self.item_ref = f"{self.kind.party}_{self.key}", f"{self.kind.item}_{self.key}"
        self.status, self.wage, self.branch = column["status"], column["wage"], column["branch"]
        self.first, self.second = (column["date"].format(verb) for verb in (self.kind.first, self.kind.second))
        self.cities = self._split(column["city"], rng.sample(self.words["cities"], 3))
        self.groups = self._split(column["group"], rng.sample(self.words["groups"], 3))
        self.states = rng.sample(self.words["states"], 4)
        unit, self._unit, self._remark = rng.choice(UNITS[self.split]) if self.has("unit") else ("{}", "", "")
        self.price, self.total = (unit.format(column[what]) for what in ("price", "total"))
        self.has_total = rng.random() < 0.7
        self.codes = rng.choice(CODES[self.split]) if self.has("code") else None
        self.gone = rng.choice(GONE[self.split]) if self.has("gone") else None
        self.around_names = rng.choice(AROUND_NAMES[self.split]) if self.has("like") else None
        self.parties = rng.sample(self.words["last names"], 40)
        if not self.around_names:
            self.parties = [f"{rng.choice(self.words['first names'][:6])} {last}" for last in self.parties]
        self.items = [f"{brand} {self.kind.item}" for brand in rng.sample(self.words["brands"], 14)]
        self._tables = [*self._people_and_items(), *self._events()]

    def has(self, trap: str) -> bool:
        return trap in self.traps

    def of_status(self) -> str:
        """Return the condition that a table of codes of several columns wants, to be put behind another."""
        return f" AND {self.codes.of} = '{self.status}'" if self.codes and self.codes.of else ""

    def connect(self) -> sqlite3.Connection:
        """Return a new database in memory, filled. Several threads may use it, one after the other."""
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        for create, rows in self._tables:
            database.execute(create)
            if rows:
                places = ", ".join("?" * len(rows[0]))
                database.executemany(f"INSERT INTO {create.split()[2]} VALUES ({places})", rows)
        return database

    def _split(self, column: str, values: list[str]) -> Split:
        """Decide whether the values of a column stand in a table of their own."""
        if self._rng.random() < 0.5:
            return Split(column, values, None)
        return Split(f"{column}_{self.key}", values, plural(column))

    def _people_and_items(self) -> list[Table]:
        rng, key = self._rng, f"{self.key} INTEGER PRIMARY KEY, {self.label} TEXT"
        shown = [(self.around_names or "{}").format(name) for name in self.parties]
        parties = [(number, name, self.cities.drawn(rng)) for number, name in enumerate(shown, 11)]
        cents = [rng.randrange(150, 9900) for _ in self.items]
        self._cents = cents
        amounts = [self._amount(one) for one in cents]
        items = [(number, *of) for number, of in enumerate(zip(self.items, self._groups(), amounts, strict=True), 101)]
        made = [split.as_table(self.key, self.label) for split in (self.cities, self.groups) if split.table]
        made += [
            (f"CREATE TABLE {self.party} ({key}, {self.cities.declared})", parties),
            (
                f"CREATE TABLE {self.item} ({key}, {self.groups.declared}, {self._declared(self.price)})",
                items,
            ),
        ]
        lasts = rng.sample(self.words["last names"], 30)
        names = [f"{rng.choice(self.words['first names'][6:])} {last}" for last in lasts]
        wages = rng.sample(range(1800, 5200), 30)
        staff: list[tuple[Any, ...]] = [
            (number, name, rng.choice(self.cities.values), wage)
            for number, (name, wage) in enumerate(zip(names, wages, strict=True), 1)
        ]
        declared = f"{key}, {self.branch} TEXT, {self.wage} INTEGER"
        if self.gone:
            declared += f", {self.gone.column} {self.gone.type}"
            staff = [(*one, self.gone.gone if rng.random() < 0.4 else self.gone.here) for one in staff]
        return [*made, (f"CREATE TABLE {self.staff} ({declared})", staff)]

    def _groups(self) -> list[Any]:
        return [self.groups.drawn(self._rng) for _ in self.items]

    def _events(self) -> list[Table]:
        rng, made = self._rng, list[Table]()
        codes: dict[str, Any] = {state: state for state in self.states}
        declared = "TEXT"
        if self.codes:
            written = self.codes.codes.split()
            declared = "INTEGER" if written[0].isdigit() else "TEXT"
            codes = {
                state: int(code) if code.isdigit() else code for state, code in zip(self.states, written, strict=True)
            }
            made.append(self._code_table(codes, declared))
        if self._remark:
            of = [self.price, *([self.total] if self.has_total else [])]
            made.append(("CREATE TABLE remarks (about TEXT, remark TEXT)", [(one, self._remark) for one in of]))
        columns = [
            f"{self.key} INTEGER PRIMARY KEY",
            f"{self.party_ref} INTEGER REFERENCES {self.party}",
            f"{self.item_ref} INTEGER REFERENCES {self.item}",
            f"{self.quantity} INTEGER",
            *([self._declared(self.total)] if self.has_total else []),
            f"{self.status} {declared}",
            f"{self.first} TEXT",
            *([f"{self.second} TEXT"] if self.has("date") else []),
        ]
        rows = []
        for number in range(1001, 1001 + rng.randrange(180, 320)):
            item, quantity = rng.randrange(len(self.items)), rng.randrange(1, 40)
            on = date(YEARS[0], 1, 1) + timedelta(rng.randrange(365 * len(YEARS)))
            later = on + timedelta(rng.randrange(10, 300))
            total = [self._amount(quantity * self._cents[item])] if self.has_total else []
            dates = [on.isoformat(), later.isoformat()][: 1 + self.has("date")]
            party, state = rng.randrange(11, 11 + len(self.parties)), codes[rng.choice(self.states)]
            rows.append((number, party, 101 + item, quantity, *total, state, *dates))
        return [*made, (f"CREATE TABLE {self.event} ({', '.join(columns)})", rows)]

    def _code_table(self, codes: dict[str, Any], declared: str) -> Table:
        assert self.codes
        table, columns = (
            self.codes.table.format(self.status),
            f"{self.codes.code} {declared}, {self.codes.meaning} TEXT",
        )
        rows: list[tuple[Any, ...]] = [(code, state) for state, code in codes.items()]
        if self.codes.of:  # the codes of another column, in the same table
            columns = f"{self.codes.of} TEXT, {columns}"
            others = zip(codes.values(), reversed(self.states), strict=True)
            rows = [(self.status, *row) for row in rows] + [("payment", code, state) for code, state in others]
        return f"CREATE TABLE {table} ({columns})", rows

    def _amount(self, cents: int) -> float:
        return cents if self.has("unit") else cents / 100

    def _declared(self, column: str) -> str:
        return f"{column} {'INTEGER' if self.has('unit') else 'REAL'}" + (f" /* {self._unit} */" if self._unit else "")


Table = tuple[str, list[tuple[Any, ...]]]
"""How a table is made, and its rows."""


class Split(NamedTuple):
    """A column with a few values, which may stand in a table of their own."""

    column: str
    values: list[str]
    table: str | None

    def drawn(self, rng: random.Random) -> Any:
        place = rng.randrange(len(self.values))
        return place + 1 if self.table else self.values[place]

    @property
    def declared(self) -> str:
        return f"{self.column} INTEGER REFERENCES {self.table}" if self.table else f"{self.column} TEXT"

    def as_table(self, key: str, label: str) -> Table:
        rows: list[tuple[Any, ...]] = list(enumerate(self.values, 1))
        return f"CREATE TABLE {self.table} ({key} INTEGER PRIMARY KEY, {label} TEXT)", rows

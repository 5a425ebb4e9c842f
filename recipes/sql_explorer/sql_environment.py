"""An unknown SQLite database as an environment: `list_tables`, `describe` and `query`, which only read.

Each episode has a database of its own, in memory, drawn from the row's `database` (sql_companies.py). The row's `rung` says
what the model is told at the start: `schema` (tables and columns), `tables` (their names) or `nothing`.

A query is bounded: SQLite itself refuses what writes, attaches or loads (an authorizer), what is too long or too deep, what
wants too much memory and what takes too many steps. The model reads SQLite's own sentence, and the episode goes on.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sql_companies import Company

MOST_ROWS = 20  # shown of a result
MOST_CHARACTERS = 80  # of a value
MOST_SECONDS = 5.0
MOST_STEPS = 10_000_000  # of SQLite's machine, about two seconds; unlike the clock they are the same everywhere
MOST_HEAP = 64 << 20  # bytes, for all of SQLite in this process: an episode has a process of its own
_BETWEEN = 10_000  # steps from one look at the clock to the next
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 20_000,  # bytes of a value or a row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
}
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_READING_PRAGMAS = ("table_info", "table_list", "foreign_key_list")


def _authorize(action: int, first: str | None, second: str | None, *where: str | None) -> int:
    reads = action in _READS or (action == sqlite3.SQLITE_FUNCTION and second != "load_extension")
    reads = reads or (action == sqlite3.SQLITE_PRAGMA and first in _READING_PRAGMAS and second != "writable_schema")
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


class SqlExplorer:
    """One episode."""

    def reset(self, database: str, rung: str, **row: Any) -> str | None:
        if rung not in ("schema", "tables", "nothing"):
            raise ValueError(f"the column rung must be schema, tables or nothing, got {rung!r}")
        self._database = Company(database).connect()
        self._database.execute("PRAGMA temp_store = MEMORY")  # else a large sort fills the disk
        self._database.execute(f"PRAGMA hard_heap_limit = {MOST_HEAP}")
        for limit, most in _LIMITS.items():
            self._database.setlimit(limit, most)
        self._database.set_progress_handler(self._is_over, _BETWEEN)
        self._begin()
        tables = dict(self._database.execute("SELECT name, sql FROM sqlite_master").fetchall())
        self._database.set_authorizer(_authorize)
        if rung == "nothing":
            return None
        return "\n\nTables:\n" + "\n".join(tables if rung == "tables" else tables.values())

    def list_tables(self) -> str:
        """List the tables of the database."""
        self._begin()
        return "\n".join(name for (name,) in self._database.execute("SELECT name FROM sqlite_master").fetchall())

    def describe(self, table: str) -> str:
        """Show the columns of a table.

        Args:
            table: Its name.
        """
        self._begin()
        found = self._database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        if found is None:
            raise ValueError(f"no such table: {table}")
        return str(found[0])

    def query(self, sql: str) -> str:
        """Run one SELECT; shows at most 20 rows.

        Args:
            sql: The query, in SQLite's SQL.
        """
        self._begin()
        try:
            cursor = self._database.execute(sql)
            rows = cursor.fetchmany(MOST_ROWS + 1)
        except MemoryError:
            raise ValueError("out of memory: the query needs too much; ask for less") from None
        except sqlite3.OperationalError as error:
            if str(error) != "interrupted":
                raise
            raise ValueError("interrupted: the query takes too long; ask for less") from None
        if cursor.description is None:
            raise ValueError("this is no query; write one SELECT")
        lines = [" | ".join(_shown(name) for name, *_ in cursor.description)]
        lines += [" | ".join(map(_shown, row)) for row in rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            lines.append(f"(the first {MOST_ROWS} rows; there are more)")
        return "\n".join(lines if rows else [*lines, "(no rows)"])

    def close(self) -> None:
        self._database.close()

    def _begin(self) -> None:
        self._steps, self._deadline = 0, time.monotonic() + MOST_SECONDS

    def _is_over(self) -> bool:
        self._steps += _BETWEEN
        return self._steps > MOST_STEPS or time.monotonic() > self._deadline


def _shown(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.12g}"  # 0.1 + 0.2 is 0.3
    text = " ".join(str(value).split())
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."


ENVIRONMENT = SqlExplorer

"""A rich console that never hides the cursor.

A live bar hides it and shows it again when it stops. A process that is killed meanwhile (a second
Ctrl-C, a crash in native code) cannot, and leaves a terminal without a cursor.
"""

from __future__ import annotations

from rich.console import Console


class SteadyConsole(Console):
    """Rich's console, but the cursor stays where it is seen."""

    def show_cursor(self, show: bool = True) -> bool:
        return False

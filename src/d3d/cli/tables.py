"""Tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from d3d.lab.report.tables import Table, shown

WIDTH = 240
"""Width of a printed table, in characters: a narrower terminal wraps its lines instead of cutting
figures."""


def print_table(table: Table, *, error: bool = False, names: int = 2) -> None:
    """Print to standard output, or standard error. names: number of left-aligned columns."""
    printed = RichTable(title=Text(table.title))
    for place, heading in enumerate(table.headings):
        printed.add_column(
            Text(heading), justify="left" if place < names else "right", no_wrap=True
        )
    for row in table.rows:
        printed.add_row(*(Text(shown(cell)) for cell in row))
    Console(stderr=error, width=max(Console().width, WIDTH)).print(printed, crop=False)

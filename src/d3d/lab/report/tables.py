"""Tables as data: a report prints each of them as Markdown and as HTML, and puts them beside the
pictures that are drawn from them."""

from __future__ import annotations

from dataclasses import dataclass, field

Cell = str | int | float | None

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """Headings and rows; numbers are shown as they are given, so whoever makes a table formats
    them."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What a reader has to know to read it."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError(f"table {self.title!r}: each row needs {len(self.headings)} cells")


@dataclass(frozen=True)
class Picture:
    """An SVG and the table that holds its data."""

    name: str
    svg: str = field(repr=False)
    data: Table


@dataclass(frozen=True)
class Section:
    """A heading with text, tables and pictures below it, in this order."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


def shown(cell: Cell) -> str:
    return MISSING if cell is None else str(cell)


def markdown(table: Table) -> str:
    """A Markdown table with its title and note."""
    lines = [f"**{_escaped(table.title)}**", ""]
    if table.note:
        lines += [table.note, ""]
    if not table.rows:
        return "\n".join([*lines, "Nothing to show.", ""])
    lines.append(_line(table.headings))
    lines.append("|" + "---|" * len(table.headings))
    lines += [_line(row) for row in table.rows]
    return "\n".join([*lines, ""])


def _line(cells: tuple[Cell, ...]) -> str:
    return "| " + " | ".join(_escaped(shown(cell)) for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def milliseconds(seconds: float | None, digits: int = 1) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.{digits}f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def gibibytes(count: int | None) -> str | None:
    return None if count is None else f"{count / (1 << 30):.2f}"

"""Tables and pictures as data, and reports of them as Markdown and as one HTML page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TypeVar

from d3d.files import FileKind, alone_with, write_whole
from d3d.lab.report.plots import PICTURE

Cell = str | int | float | None
T = TypeVar("T")

MISSING = "-"
WRITTEN_BY = "<!-- written by d3d -->"
REPORT = FileKind("a report", marker=WRITTEN_BY)
MARKDOWN_FILE, HTML_FILE, PICTURES = "report.md", "report.html", "pictures"


@dataclass(frozen=True)
class Table:
    """Headings and rows. Numbers are printed as they are, so format them first."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """Explains the figures."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError(f"table {self.title!r}: each row needs {len(self.headings)} cells")


@dataclass(frozen=True)
class Picture:
    """An SVG and the table of its data."""

    name: str
    svg: str = field(repr=False)
    data: Table


@dataclass(frozen=True)
class Section:
    """A heading, then text, tables and pictures, in this order."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


def tabulate(
    title: str, items: Iterable[T], columns: Mapping[str, Callable[[T], Cell]], note: str = ""
) -> Table:
    """A row for each item. columns: heading -> cell of an item."""
    rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(title, tuple(columns), rows, note)


def shown(cell: Cell) -> str:
    return MISSING if cell is None else str(cell)


def number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def milliseconds(seconds: float | None, digits: int = 1) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.{digits}f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def gibibytes(count: int | None) -> str | None:
    return None if count is None else f"{count / (1 << 30):.2f}"


def markdown(table: Table) -> str:
    """A Markdown table with its title and note."""
    lines = [f"**{_escaped(table.title)}**", ""]
    if table.note:
        lines += [table.note, ""]
    if not table.rows:
        return "\n".join([*lines, "Nothing to show.", ""])
    return "\n".join([*lines, *markdown_lines(table), ""])


def markdown_lines(table: Table) -> list[str]:
    """Headings and rows only."""
    return [
        _line(table.headings),
        "|" + "---|" * len(table.headings),
        *(_line(row) for row in table.rows),
    ]


def _line(cells: tuple[Cell, ...]) -> str:
    return "| " + " | ".join(_escaped(shown(cell)) for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def write_report(directory: Path, title: str, sections: Sequence[Section]) -> tuple[Path, Path]:
    """Write report.md with its pictures, and report.html, into a directory; return both files.
    Raises InvalidRequest if other files have these names, or another process writes them;
    CantWrite."""
    markdown_file, html_file = directory / MARKDOWN_FILE, directory / HTML_FILE
    drawn = [picture for section in sections for picture in section.pictures]
    pictures = {directory / PICTURES / f"{each.name}.svg": each.svg for each in drawn}
    with alone_with(markdown_file, "d3d bench report"):
        check_report(directory)
        for file in pictures:
            PICTURE.check(file)
        for file, svg in pictures.items():
            write_whole(file, PICTURE, svg)
        write_whole(markdown_file, REPORT, markdown_report(title, sections))
        write_whole(html_file, REPORT, html_report(title, sections))
    return markdown_file, html_file


def check_report(directory: Path) -> None:
    """Raise InvalidRequest if a report in a directory would replace files that are not ours."""
    REPORT.check(directory / MARKDOWN_FILE)
    REPORT.check(directory / HTML_FILE)


def markdown_report(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}", "", WRITTEN_BY, ""]
    for section in sections:
        parts += [f"## {section.title}", ""]
        parts += [line for text in section.text for line in (text, "")]
        parts += [markdown(table) for table in section.tables]
        for picture in section.pictures:
            image = f"![{picture.data.title}]({PICTURES}/{picture.name}.svg)"
            parts += [image, "", markdown(picture.data)]
    return "\n".join(parts)


def html_report(title: str, sections: Sequence[Section]) -> str:
    """A page with embedded pictures; all text is escaped."""
    from jinja2 import Environment

    template = resources.files("d3d").joinpath("assets/report.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    environment.filters["data_uri"] = lambda svg: (
        "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    )
    return environment.from_string(template).render(title=title, sections=sections)

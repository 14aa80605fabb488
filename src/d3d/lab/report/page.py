"""A report as Markdown with its pictures as files, and as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from d3d.lab.report.tables import Section, markdown, shown

MARKDOWN_FILE, HTML_FILE, PICTURES = "report.md", "report.html", "pictures"


def write_report(directory: Path, title: str, sections: Sequence[Section]) -> tuple[Path, Path]:
    """Both forms, into `directory`. Returns their files."""
    pictures = directory / PICTURES
    drawn = [picture for section in sections for picture in section.pictures]
    if drawn:
        pictures.mkdir(exist_ok=True)
    for picture in drawn:
        (pictures / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")
    files = directory / MARKDOWN_FILE, directory / HTML_FILE
    files[0].write_text(markdown_report(title, sections), encoding="utf-8")
    files[1].write_text(html_report(title, sections), encoding="utf-8")
    return files


def markdown_report(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}", ""]
    for section in sections:
        parts += [f"## {section.title}", ""]
        parts += [line for text in section.text for line in (text, "")]
        parts += [markdown(table) for table in section.tables]
        for picture in section.pictures:
            parts += [
                f"![{picture.data.title}]({PICTURES}/{picture.name}.svg)",
                "",
                markdown(picture.data),
            ]
    return "\n".join(parts)


def html_report(title: str, sections: Sequence[Section]) -> str:
    """Pictures are embedded; whatever the rows hold is escaped."""
    template = (
        resources.files("d3d").joinpath("assets/report.html.jinja").read_text(encoding="utf-8")
    )
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    environment.filters["data_uri"] = lambda svg: (
        "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    )
    return environment.from_string(template).render(title=title, sections=sections)

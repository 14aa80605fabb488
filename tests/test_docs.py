"""Every relative link in README, docs and recipes leads to a file, and to a heading in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])


def prose(page: Path) -> str:
    """The text without code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", lambda code: code.group().replace("](", "] ("), text)


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        earlier = sum(re.sub(r"-\d+$", "", name) == slug for name in found)
        found.append(f"{slug}-{earlier}" if earlier else slug)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} in {page.name}"
        if anchor:
            assert anchor in anchors(target), f"{link} in {page.name}"


def test_each_page_is_reached_from_the_index() -> None:
    seen, waiting = set(), [ROOT / "docs" / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", prose(page))
        waiting += [page.parent / link for link in links if "://" not in link]
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= seen


def test_generated_pages_are_up_to_date() -> None:
    script = ROOT / "docs" / "reference" / "generate.py"
    checked = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, f"{checked.stdout}{checked.stderr}run python {script}"

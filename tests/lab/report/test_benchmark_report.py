"""A report tells the rows' figures in Markdown and HTML, with the data beside every picture, and
what to beware of."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from d3d.engine.round import Round
from d3d.errors import InvalidRequest, MissingExtra
from d3d.lab.bench.answers import Setting
from d3d.lab.bench.results import load_run
from d3d.lab.bench.rows import Identity, Row
from d3d.lab.report.benchmark import UNSUSPICIOUS, comparison, report, warnings
from d3d.lab.report.figures import figures_of
from d3d.lab.report.run_pictures import pictures
from d3d.lab.report.tables import (
    Section,
    Table,
    html_report,
    markdown,
    markdown_report,
    write_report,
)
from support.bench_rows import example_rows, row, write_run


def batched(one: Row) -> Row:
    return one.model_copy(update={"setting": one.setting.model_copy(update={"batch": 2})})


def full_rows() -> list[Row]:
    """Another set, a faster peer, longer prompts and a larger batch besides."""
    rows = example_rows()
    rows += [
        row("llama_cpp", one.prompt_id, [(0.1, 1), (0.15, 4)], token_ids=None)
        for one in rows
        if one.method == "plain"
    ]
    rows += [one.model_copy(update={"set_name": "other", "prompt_tokens": 300}) for one in rows]
    return rows + [batched(one) for one in rows if one.method != "llama_cpp"]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "small", full_rows())


def test_markdown_holds_the_figures(run_directory: Path) -> None:
    text = markdown_report("Small", report(load_run(run_directory), with_pictures=False))
    assert (
        "| tiny | serial 2 | 16 | 1 | 1.50 [1.00, 2.00] | 1.00 / 1.50 / 2.00 | llama_cpp | 0.19"
        in text
    )
    assert "| tiny | plain | 16 | 1 | - | - | llama_cpp | 0.12" in text
    rounds = "3 | 2.00 | 2.00 | 1.00 | 60 % | 0.67 0.33 | 1 1 1 | 40 % | 55 %"
    assert f"| tiny | serial 2 | 16 | 1 | {rounds} |" in text
    assert "| all | serial 2 | 16 | 1 | 6 | 2.00" in text
    assert "| tiny | serial 2 | 16 | 1 | 13.3 | 1.50 [1.00, 2.00] | 0.19 | 2.00 | 2/2 |" in text
    assert "d3d bench run x\\|y" in text
    assert UNSUSPICIOUS in text


def test_each_picture_has_its_data_beside_it(run_directory: Path) -> None:
    pytest.importorskip("matplotlib")
    sections = report(load_run(run_directory))
    files = write_report(run_directory, "Small", sections)
    pictures = next(section.pictures for section in sections if section.title == "Pictures")
    assert [picture.name for picture in pictures] == [
        "speed_up",
        "acceptance_at",
        "round_times",
        "context",
        "batch",
    ]
    text, page = files[0].read_text(), files[1].read_text()
    for picture in pictures:
        assert picture.data.rows
        assert picture.svg.startswith("<?xml")
        place = text.index(f"](pictures/{picture.name}.svg)")
        assert text.index(f"**{picture.data.title}**") > place
        assert (run_directory / "pictures" / f"{picture.name}.svg").read_text() == picture.svg
    assert page.count("data:image/svg+xml;base64,") == 5
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing from elsewhere
    assert "Tiny &lt;set&gt;" in page
    assert "<set>" not in page
    again = write_report(run_directory, "Small", report(load_run(run_directory)))
    assert again[1].read_text() == page


def test_speed_against_batch_compares_the_same_prompts_at_the_length_that_has_most_batches(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    rows = example_rows()
    far = [
        one.model_copy(
            update={
                "set_name": "other",
                "timing": rows[0].timing.model_copy(update={"batch_s": 50.0}),
            }
        )
        for one in rows
    ]
    long = [
        one.model_copy(update={"setting": one.setting.model_copy(update={"max_tokens": 999})})
        for one in rows
    ]
    run = load_run(write_run(tmp_path / "run", [*rows, *far, *long, *map(batched, rows)]))
    (picture,) = (one for one in pictures(figures_of(run.groups)) if one.name == "batch")
    assert "at most 16 tokens" in picture.data.title
    # 8 tokens in 0.8 s: the other set, which was not asked in batches, is left out
    assert [cells[:2] for cells in picture.data.rows] == [
        ("plain", 1),
        ("plain", 2),
        ("serial 2", 1),
        ("serial 2", 2),
    ]
    assert picture.data.rows[0] == ("plain", 1, "10.0", 2)


def test_speed_against_output_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    deliveries = [(0.1 * place, 1) for place in range(1, 41)] + [
        (4.0 + 0.2 * place, 1) for place in range(1, 31)
    ]
    run = load_run(write_run(tmp_path / "run", [row("plain", "a", deliveries)]))
    (picture,) = (one for one in pictures(figures_of(run.groups)) if one.name == "output")
    assert picture.data.rows[0] == ("plain", "1 to 31", 31, "100.00")
    assert [cells[1] for cells in picture.data.rows] == ["1 to 31", "32 to 63", "64 to 127"]
    assert picture.data.rows[2] == ("plain", "64 to 127", 6, "200.00")


def test_without_matplotlib_the_line_that_installs_it_is_told(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"pip install 'd3d-decoding\[bench\]'"):
        report(load_run(run_directory))
    assert report(load_run(run_directory), with_pictures=False)


def test_what_takes_meaning_from_figures_is_told(tmp_path: Path) -> None:
    mistake = Identity(identical=False, by="ids", plain_tokens=5, position=3, gap=0.5)
    rows = [
        *example_rows()[:1],
        row(
            "serial",
            "a",
            [(0.1, 1)],
            [],
            identity=mistake,
            repeats=True,
            warnings=["drafting stopped: ill"],
        ),
        row("transformers", "a", [(0.1, 1), (0.2, 1)], identity=mistake),
    ]
    run = load_run(write_run(tmp_path / "bad", rows, dtype="bfloat16", ignore_eos=True))
    run.provenance["sessions"][0]["machine"]["load_at_start"] = 1.5
    found = "\n".join(warnings(run))
    for words in (
        "was at work",
        "--ignore-eos",
        "bfloat16",
        "end in a loop",
        "a mistake in the program",
        "not one round",
        "drafting stopped: ill",
    ):
        assert words in found
    assert "transformers on tiny" not in found
    text = markdown_report("Bad", report(run, with_pictures=False))
    assert "| tiny | serial | a, turn 1 | 1 / 5 | 3 | 5.0e-01 | other |" in text


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    faster = [
        one.model_copy(
            update={
                "timing": one.timing.model_copy(
                    update={
                        "batch_s": one.timing.ttft_s + (one.timing.batch_s - one.timing.ttft_s) / 2
                    }
                )
            }
        )
        for one in example_rows()
    ]
    extra = row(
        "lookup",
        "a",
        [(0.1, 1), (0.2, 1)],
        [Round(2, 0, 1, 0.0, 0.1)],
        setting=Setting(max_tokens=16, draft_length=3),
    )
    a, b = (
        load_run(write_run(tmp_path / "a", example_rows())),
        load_run(write_run(tmp_path / "b", [*faster, extra], dtype="bfloat16")),
    )
    text = markdown_report("Both", comparison(a, b))
    assert "| tiny | serial 2 | 16 | 1 | 13.3 | 20.0 | 2.00 | 2.00 | 2.00 | 100 % |" in text
    assert "| dtype | float32 | bfloat16 |" in text
    assert "| b | lookup 3 on tiny |" in text
    assert "| target |" not in text


def test_directories_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"holds no provenance\.json"):
        load_run(tmp_path)
    with pytest.raises(InvalidRequest, match="no rows yet"):
        load_run(
            write_run(tmp_path / "empty", []).joinpath("results.jsonl").unlink()
            or tmp_path / "empty"
        )


def test_tables_escape_what_they_hold() -> None:
    table = Table("A|B", ("x", "y"), (("a|b", None), ("<b>", 1)))
    assert "| a\\|b | - |" in markdown(table)
    page = html_report("T", [Section("S", ("<i>",), (table,))])
    assert "&lt;b&gt;" in page
    assert "&lt;i&gt;" in page
    with pytest.raises(ValueError, match="2 cells"):
        Table("T", ("x", "y"), (("a",),))
    assert "Nothing to show." in markdown(Table("T", ("x",), ()))

"""Fill the README's results from the files of runs:

    python studies/readme_results.py [--results DIR] [--readme FILE]

Uses the runs `bench` (make bench), `identity` (d3d bench identity) and `qwen2.5-coder-1.5b`, if
present."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from d3d.lab.bench.results import load_run
from d3d.lab.report.published import beside_published, identity_line, replaced, summary

ROOT = Path(__file__).parents[1]


def block(results: Path) -> str:
    parts = []
    if (results / "bench" / "results.jsonl").is_file():
        parts.append(beside_published(load_run(results / "bench")))
    identity = results / "identity" / "identity.json"
    if identity.is_file():
        parts.append(identity_line(json.loads(identity.read_text(encoding="utf-8"))))
    if (results / "qwen2.5-coder-1.5b" / "results.jsonl").is_file():
        parts.append(summary(load_run(results / "qwen2.5-coder-1.5b")))
    missing = "Not measured yet: `make bench DATA=DIR`, then `python studies/readme_results.py`."
    return "\n".join(parts) or missing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    options.readme.write_text(
        replaced(options.readme.read_text(encoding="utf-8"), block(options.results)),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()

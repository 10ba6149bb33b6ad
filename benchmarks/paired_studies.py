"""What pairing by seed is worth: the variances of differences in finished studies.

    python -m benchmarks.paired_studies runs/studies/*/scores.json

prints a table in Markdown. A ratio of 0.25 means: without pairing, the same interval takes four
times as many seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def ratios(scores: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yields for each measure the paired variance over the unpaired one, of each arm.

    Args:
        scores: scores.json of a study. Arms whose seeds do not vary are left out.
    """
    measures = dict.fromkeys(row["measure"] for row in scores["rows"])
    for measure in measures:
        rows = {row["arm"]: row for row in scores["rows"] if row["measure"] == measure}
        baseline = rows.get(scores["baseline"])
        found = []
        for row in rows.values():
            paired = (row["difference"] or {}).get("deviation")
            if paired is None or baseline is None:
                continue
            unpaired = row["mean"]["deviation"] ** 2 + baseline["mean"]["deviation"] ** 2
            if unpaired:
                found.append(paired**2 / unpaired)
        if found:
            yield measure, found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scores", nargs="+", type=Path, help="scores.json of studies")
    lines = [
        "| study | measure | differences | paired variance / unpaired: median | lowest | highest |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for file in parser.parse_args(arguments).scores:
        scores = json.loads(file.read_text(encoding="utf-8"))
        for measure, found in ratios(scores):
            shown = " | ".join(f"{value:.2f}" for value in (median(found), min(found), max(found)))
            lines.append(f"| {scores['study']} | {measure} | {len(found)} | {shown} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

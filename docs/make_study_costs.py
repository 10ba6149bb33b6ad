"""Writes the table of docs/studies/costs.md from the pages of the studies.

python docs/make_study_costs.py
"""

from __future__ import annotations

from pathlib import Path

_STUDIES = Path(__file__).parent / "studies"
PAGE = _STUDIES / "costs.md"
BEGIN, END = "<!-- costs -->\n", "<!-- /costs -->\n"
_ROW = "| all, each job once |"


def render() -> str:
    """The page with a new table."""
    rows: dict[str, list[float]] = {}
    for page in sorted(_STUDIES.glob("*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith(_ROW):
                rows[page.stem] = [float(cell) for cell in line.strip("| ").split("|")[1:]]
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [
        "| study | jobs | FLOPs | CPU time, h | kWh | CO2, g |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, (jobs, flops, _, cpu, energy, carbon) in rows.items():
        title = name if name == "all" else f"[{name}]({name}.md)"
        lines.append(
            f"| {title} | {jobs:.0f} | {flops:.2e} | {cpu:.2f} | {energy:.4f} | {carbon:.1f} |"
        )
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

"""`make fuzz`: fuzzes every target in turn, and writes what was tried to docs/security.md.

`python -m tests.fuzz.run --seconds 3600` continues with the seeds behind those of earlier calls.
`python -m tests.fuzz.run --reproduce TARGET FOLDER` reads the files of a failure again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.fuzz import data, models, runs, tokenizers, trial

TARGETS = {
    target.name: target for module in (data, models, runs, tokenizers) for target in module.TARGETS
}
PAGE = Path("docs/security.md")
BEGIN, END = "<!-- begin: written by make fuzz -->\n", "<!-- end -->"
_WORK = Path("build/fuzz")
_BATCH = 300  # examples of a target before the next one has its turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--only", action="append", metavar="TARGET", choices=TARGETS)
    parser.add_argument("--reproduce", nargs=2, metavar=("TARGET", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.reproduce:
        name, folder = arguments.reproduce
        os.chdir(folder)
        sys.stdout.write(f"{TARGETS[name].read(Path.cwd())}\n")
        return 0
    counts = _fuzz(time.monotonic() + arguments.seconds, arguments.only or list(TARGETS))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + render(counts) + END + rest.partition(END)[2], encoding="utf-8"
    )
    return int(any(each["failed"] for each in counts.values()))


def _fuzz(until: float, names: list[str]) -> dict[str, dict[str, int]]:
    """Gives each target a batch of examples in turn; returns the sums of this and earlier calls."""
    _WORK.mkdir(parents=True, exist_ok=True)
    state = _WORK / "counts.json"
    counts: dict[str, dict[str, int]] = json.loads(state.read_text()) if state.exists() else {}
    while True:
        for name, target in ((name, TARGETS[name]) for name in names):
            if time.monotonic() > until:
                return counts
            sums = counts.setdefault(name, {"accepted": 0, "refused": 0, "failed": 0})
            seed = sum(sums.values()) + 10**6  # the tests have the lower ones
            outcome = trial.run(target, _BATCH, _WORK / name.replace(" ", "-") / str(seed), seed)
            sums["accepted"] += outcome.accepted
            sums["refused"] += outcome.refused
            sums["failed"] += len(outcome.failures)
            for what, folder in outcome.failures.items():
                sys.stdout.write(
                    f"{name}: {what}\n    python -m tests.fuzz.run --reproduce '{name}' {folder}\n"
                )
            state.write_text(json.dumps(counts))
            sys.stdout.flush()


def render(counts: dict[str, dict[str, int]]) -> str:
    """The table."""
    rows = "".join(
        f"| {name} | {sum(each.values()):,} | {each['accepted']:,} | {each['refused']:,} | "
        f"{each['failed']:,} |\n"
        for name, each in counts.items()
    )
    return (
        "| files | tried | read | refused | failures |\n|---|---|---|---|---|\n"
        f"{rows}\n{datetime.now(UTC):%Y-%m-%d}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

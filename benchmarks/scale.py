"""How costs grow: starts with shards, checkpoints and steps with ranks, elastic runs with machines.

    python -m benchmarks.scale                        # a few minutes
    python -m benchmarks.scale --full --plots FOLDER  # up to 100,000 shards and 1,024 ranks
    python -m benchmarks.scale --only data

Prints a Markdown table for each subject, with the exponent e of cost = c * size**e over the last
three sizes that were measured. Sizes that would take too long are extrapolated, and marked "~".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks import scale_checkpoints, scale_data, scale_ranks, scale_runs
from benchmarks.growth import Growth, plot, table
from benchmarks.pairing import hardware, versions

PARTS = ("data", "checkpoints", "runs", "ranks")
_C4 = (25_000, 14_600)  # shards of the default size, and documents of one


@dataclass(frozen=True)
class Sizes:
    """What is measured, and for how long at most.

    Attributes:
        shards: of a dataset.
        like_c4: shards with as many documents as those of C4.
        ranks: that write a checkpoint.
        tensors: of a checkpoint.
        rows: of the files of a run.
        machines: of an elastic run.
        nodes: of a job.
        worlds: ranks of a run.
        processes: of a run, on this machine; the last confirms what the others predict.
        seconds: for one size, as far as smaller ones predict it.
    """

    shards: tuple[int, ...]
    like_c4: tuple[int, ...]
    ranks: tuple[int, ...]
    tensors: tuple[int, ...]
    rows: tuple[int, ...]
    machines: tuple[int, ...]
    nodes: tuple[int, ...]
    worlds: tuple[int, ...]
    processes: tuple[int, ...]
    seconds: float


QUICK = Sizes(
    shards=(100, 1000, 10_000),
    like_c4=(25, 250),
    ranks=(4, 16, 64, 256),
    tensors=(100, 300, 1000),
    rows=(1000, 10_000, 30_000),
    machines=(2, 8, 32, 128),
    nodes=(1, 32, 1024),
    worlds=(8, 64, 256),
    processes=(2, 4, 8, 16),
    seconds=20.0,
)
FULL = Sizes(
    shards=(100, 1000, 10_000, 100_000),
    like_c4=(25, 250, 2500, _C4[0]),
    ranks=(1, 4, 16, 64, 256, 1024),
    tensors=(10, 100, 1000, 10_000),
    rows=(1000, 10_000, 100_000, 1_000_000),
    machines=(2, 8, 32, 128, 512),
    nodes=(1, 8, 64, 512, 1024),
    worlds=(8, 16, 32, 64, 256, 1024),
    processes=(4, 8, 16, 32),
    seconds=120.0,
)


def measured(sizes: Sizes, parts: Sequence[str]) -> Iterator[tuple[str, list[Growth]]]:
    """Yields a title and the costs of each subject."""
    if "data" in parts:
        title = f"Starts with shards of {scale_data.DOCUMENTS:,} documents"
        yield title, scale_data.costs(sizes.shards, sizes.seconds)
        title = f"Starts with shards of {_C4[1]:,} documents; C4 has {_C4[0]:,}"
        yield title, scale_data.costs(sizes.like_c4, sizes.seconds, _C4[1])
    if "checkpoints" in parts:
        yield from scale_checkpoints.costs(sizes.ranks, sizes.tensors, sizes.seconds)
    if "runs" in parts:
        yield from scale_runs.costs(sizes.rows, sizes.machines, sizes.nodes, sizes.seconds)
    if "ranks" in parts:
        yield from scale_ranks.costs(sizes.worlds, sizes.processes, sizes.seconds)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="large sizes: half an hour or more")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="measure these")
    parser.add_argument("--plots", type=Path, help="also draw each table, in this folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(given)
    found = {}
    for title, growths in measured(FULL if args.full else QUICK, args.only):
        print(f"\n### {title}\n\n{table(growths)}", flush=True)
        found[title] = [dataclasses.asdict(each) for each in growths]
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            name = "".join(letter if letter.isalnum() else "_" for letter in title.lower())
            plot(title, growths, args.plots / f"{name}.png")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    conditions = {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "system": platform.system(),
        "load average": load,
        "versions": versions(),
    }
    print("\n" + "\n".join(f"{name}: {value}" for name, value in conditions.items()))
    if args.json:
        args.json.write_text(json.dumps({**conditions, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

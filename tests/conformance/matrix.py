"""`make conformance`: the full same-step matrix, written to docs/conformance.md."""

from __future__ import annotations

import itertools
import platform
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from tests.conformance.worker import Case, Record, run_cases
from tests.conftest import make_dataset, write_experiment
from tests.processes import run_ranks

STEPS, BATCHES, RELATIVE = 30, 201, 1e-5
SETTINGS = (MICRO_BATCHES, THREADS, PACKINGS) = ((1, 4, 8), (0, 1, 3), ("concat", "best_fit"))
STRATEGIES = {
    1: ("single", "ddp", "fsdp"),
    2: ("ddp", "fsdp", "hsdp"),
    3: ("ddp", "fsdp"),
    4: ("ddp", "fsdp", "hsdp"),
    5: ("ddp", "fsdp"),
}


def compare(case: Case, ranks: list[Record], reference: Record) -> float:
    """The largest relative difference of a loss from the single process's; infinity when any batch differs."""
    digests = np.sum([record.digests for record in ranks], axis=0, dtype=np.uint64)
    if not np.array_equal(digests, reference.digests) or len(ranks[0].losses) != STEPS:
        return float("inf")
    return float(np.max(np.abs(np.array(ranks[0].losses) / np.array(reference.losses) - 1)))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = write_experiment(make_dataset(Path(folder, "dataset")), Path(folder, "experiment.yaml"))
        singles = [Case(1, "single", 8, 1, packing) for packing in PACKINGS]
        (records,) = run_ranks(1, run_cases, file, singles, STEPS, BATCHES, folder)
        references = {case.packing: record for case, record in zip(singles, records, strict=True)}
        groups = [(size, strategy) for size, strategies in STRATEGIES.items() for strategy in strategies]
        worst: dict[tuple[int, str], list[float]] = {}
        for size, strategy in track(groups, "conformance", console=Console(stderr=True)):
            cases = [Case(size, strategy, *setting) for setting in itertools.product(*SETTINGS)]
            ranks = run_ranks(size, run_cases, file, cases, STEPS, BATCHES, folder, timeout=1200)
            worst[size, strategy] = [
                compare(case, [records[i] for records in ranks], references[case.packing])
                for i, case in enumerate(cases)
            ]
    Path("docs/conformance.md").write_text(render(worst), encoding="utf-8")
    passed = sum(value <= RELATIVE for values in worst.values() for value in values)
    total = sum(map(len, worst.values()))
    sys.stdout.write(f"{passed} of {total} cases equal the single process; see docs/conformance.md\n")
    return 0 if passed == total else 1


def render(worst: dict[tuple[int, str], list[float]]) -> str:
    """The page: one row for each world size and strategy."""
    rows = [
        f"| {size} | {strategy} | {sum(value <= RELATIVE for value in values)} of {len(values)} | {max(values):.1e} |"
        for (size, strategy), values in worst.items()
    ]
    return f"""# Conformance: the same step everywhere

Written by `make conformance`. Every case runs the real loader and the real trainer (a BERT of 2 layers, fp32, dropout
0.1, a global batch of 10) in real processes that talk over gloo, and is compared with a single process:

- **batches**: digests of the global batches 0 to {BATCHES - 1} (tokens, masks, labels, dropout keys) are equal;
- **losses**: each of {STEPS} training losses agrees within {RELATIVE:g} relative.

A row covers micro-batches of at most {_join(MICRO_BATCHES)} examples; {_join(THREADS)} loader threads; the packings
{_join(PACKINGS)}. `hsdp` is FSDP2 in two replicas.

| processes | strategy | cases that agree | largest relative difference of a loss |
|---|---|---|---|
{chr(10).join(rows)}

{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, CPU ({platform.machine()}).
"""


def _join(values: Iterable[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"


if __name__ == "__main__":
    sys.exit(main())

"""`make conformance`, second part: bitwise runs in all pairs of settings, with their digests.

A covering array: not all combinations, but every pair of a task, precision, number of processes,
strategy and number of loader threads is in some case (as far as it can be). Written to
docs/conformance_bitwise.md; cases that are done are kept in build/conformance, as by `matrix`.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track

from samestep.terminal import Console
from tests.conformance.exact import run, task
from tests.conformance.matrix import code_digest
from tests.conformance.worker import TEXT_TASKS
from tests.conftest import make_dataset, write_experiment, write_t5_experiment
from trainer.training.compute.arithmetic import processor

PAGE = Path("docs/conformance_bitwise.md")
SCATTERED = "fsdp, reduce_each_micro_batch"
STRATEGIES = {SCATTERED: "{kind: fsdp, reduce_each_micro_batch: true}"}
FACTORS = (
    ("mlm", "mlm_lamb", "span_corruption", "causal_lm"),
    ("fp32", "bf16"),
    (1, 2, 3, 4, 5, 6, 7),
    ("single", "ddp", "fsdp", SCATTERED, "hsdp"),
    (0, 3),
)
STEPS, MORE_STEPS, LONG_CASES = 20, 200, 12


class Case(NamedTuple):
    """One way of running a run."""

    task: str
    precision: str
    processes: int
    strategy: str
    threads: int
    steps: int = STEPS

    @property
    def is_possible(self) -> bool:
        if self.strategy == "single":
            return self.processes == 1
        return self.strategy != "hsdp" or (self.processes % 2 == 0 and self.processes > 2)

    @property
    def reference(self) -> Case:
        """The same run in one process."""
        return Case(self.task, self.precision, 1, "single", 0, self.steps)


def cases() -> list[Case]:
    """A covering array, built greedily; then some of its cases again, with more steps."""
    possible = [
        case for case in itertools.starmap(Case, itertools.product(*FACTORS)) if case.is_possible
    ]
    missing = set().union(*map(pairs, possible))
    found = []
    while missing:
        best = max(possible, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        found.append(best)
    several = [case for case in found if case.processes > 1]
    return found + [case._replace(steps=MORE_STEPS) for case in several[:LONG_CASES]]


def pairs(case: Case) -> set[tuple[tuple[int, object], ...]]:
    """The pairs of settings in a case, each setting with the number of its factor."""
    return set(itertools.combinations(list(enumerate(case[:-1])), 2))


def main() -> int:
    chosen = cases()
    kept = Path("build/conformance", code_digest())
    kept.mkdir(parents=True, exist_ok=True)
    references = sorted({case.reference for case in chosen})
    digests: dict[Case, str] = {}
    bert, t5 = experiments(kept / "exact-data")
    with tempfile.TemporaryDirectory() as folder:
        every = dict.fromkeys([*references, *chosen])
        for case in track(every, "bitwise", console=Console(stderr=True)):
            file = kept / f"exact-{'-'.join(map(str, case))}.json".replace(", ", "-")
            if not file.exists():
                experiment = t5 if case.task in TEXT_TASKS else bert
                file.write_text(json.dumps(compute(case, experiment, Path(folder, file.stem))))
            digests[case] = json.loads(file.read_text())
    failed = [case for case in chosen if digests[case] != digests[case.reference]]
    for case in failed:
        sys.stdout.write(f"{case}: other bits than in one process\n")
    sys.stdout.write(f"{len(chosen) - len(failed)} of {len(chosen)} bitwise cases are equal\n")
    if not failed:
        PAGE.write_text(render(chosen, digests), encoding="utf-8")
        sys.stdout.write(f"wrote {PAGE}\n")
    return 1 if failed else 0


def experiments(folder: Path) -> tuple[str, str]:
    """The experiments of a BERT and a T5; their datasets are kept, as are the results.

    Another dataset would give other digests.
    """
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        make_dataset(made / "words")
        make_dataset(made / "texts", "unigram")
        made.rename(folder)
    folder = folder.resolve()
    bert = write_experiment(folder / "words", folder / "bert.yaml")
    return bert, write_t5_experiment(folder / "texts", folder / "t5.yaml")


def compute(case: Case, file: str, output: Path) -> str:
    """SHA-256 of weights and optimizer state after the run."""
    settings = [
        *task(case.task, case.precision),
        f"training.steps={case.steps}",
        f"training.log_every={case.steps}",
        f"data.threads={case.threads}",
    ]
    strategy = STRATEGIES.get(case.strategy, case.strategy)
    digest, *_ = run(file, output, case.processes, strategy, *settings)
    return digest


def render(chosen: Sequence[Case], digests: dict[Case, str]) -> str:
    rows = []
    for reference in sorted({case.reference for case in chosen}):
        same = [case for case in chosen if case.reference == reference]
        rows.append(
            f"| `{reference.task}` | {reference.precision} | {reference.steps} "
            f"| {_listed(same)} | `{digests[reference]}` |"
        )
    return f"""# Conformance: bitwise runs

Written by `make conformance` (tests/conformance/exact_matrix.py): {len(chosen)} runs with `training.exact: bitwise`, dropout 0.1
and units of 2 examples, in real processes that talk over gloo. After {STEPS} or {MORE_STEPS} steps, the SHA-256 of all weights and
optimizer state was equal to the one of a single process in every case. The cases are a covering array: each pair of a
task, precision, number of processes (1 to 7), strategy and number of loader threads (0 or 3) is in one of them, as far
as it is possible. [conformance.md](conformance.md) explains the tasks. `hsdp` is FSDP2 in two replicas.

| task | precision | steps | processes and strategies | SHA-256 |
|---|---|---|---|---|
{chr(10).join(rows)}

{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, {processor()}. Another processor has other digests, and so has
another dataset.
"""  # noqa: E501


def _listed(same: Iterable[Case]) -> str:
    found = sorted((case.processes, case.strategy) for case in same)
    return "; ".join(f"{size} {strategy}" for size, strategy in dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(main())

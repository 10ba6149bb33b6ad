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
from tests.conftest import make_dataset, write_experiment, write_t5_experiment
from tests.processes import run_ranks

STEPS, BATCHES, RELATIVE = 30, 201, 1e-5
TASKS = ("mlm", "mlm_lamb", "span_corruption", "causal_lm")
SETTINGS = (MICRO_BATCHES, THREADS, PACKINGS) = ((1, 4, 8), (0, 1, 3), ("concat", "best_fit"))
FEWER = ((1, 4), (1,), PACKINGS)
STRATEGIES = {
    1: ("single", "ddp", "fsdp"),
    2: ("ddp", "fsdp", "hsdp"),
    3: ("ddp", "fsdp"),
    4: ("ddp", "fsdp", "hsdp"),
    5: ("ddp", "fsdp"),
}
BACKENDS = dict.fromkeys((2, 3), ("zero-1", "zero-2", "zero-3", "accelerate"))


def compare(ranks: list[Record], reference: Record) -> float:
    """The largest relative difference of a loss from the single process's; infinity when any batch differs."""
    digests = np.sum([record.digests for record in ranks], axis=0, dtype=np.uint64)
    if not np.array_equal(digests, reference.digests) or len(ranks[0].losses) != len(
        reference.losses
    ):
        return float("inf")
    return float(np.max(np.abs(np.array(ranks[0].losses) / np.array(reference.losses) - 1)))


def main() -> int:
    worst: dict[tuple[str, int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bert = write_experiment(make_dataset(Path(folder, "words")), Path(folder, "bert.yaml"))
        t5 = write_t5_experiment(
            make_dataset(Path(folder, "pieces"), "unigram"), Path(folder, "t5.yaml")
        )
        groups = [
            (task, size, strategy)
            for task in TASKS
            for size in STRATEGIES
            for strategy in (*STRATEGIES[size], *BACKENDS.get(size, ()))
        ]
        references: dict[tuple[str, str], Record] = {}
        for task, size, strategy in track(groups, "conformance", console=Console(stderr=True)):
            file = bert if task.startswith("mlm") else t5
            settings = SETTINGS if task == "mlm" and strategy in STRATEGIES[size] else FEWER
            if (task, PACKINGS[0]) not in references:
                singles = [Case(1, "single", 8, 1, packing, task) for packing in PACKINGS]
                (records,) = run_ranks(1, run_cases, file, singles, STEPS, BATCHES, folder)
                references |= {
                    (task, case.packing): record
                    for case, record in zip(singles, records, strict=True)
                }
            cases = [
                Case(size, strategy, *setting, task) for setting in itertools.product(*settings)
            ]
            ranks = run_ranks(size, run_cases, file, cases, STEPS, BATCHES, folder, timeout=1200)
            worst[task, size, strategy] = [
                compare([records[i] for records in ranks], references[task, case.packing])
                for i, case in enumerate(cases)
            ]
    Path("docs/conformance.md").write_text(render(worst), encoding="utf-8")
    passed = sum(value <= RELATIVE for values in worst.values() for value in values)
    total = sum(map(len, worst.values()))
    sys.stdout.write(
        f"{passed} of {total} cases equal the single process; see docs/conformance.md\n"
    )
    return 0 if passed == total else 1


def render(worst: dict[tuple[str, int, str], list[float]]) -> str:
    """The page: one row for each objective, world size and strategy."""
    rows = [
        f"| `{task}` | {size} | {strategy} | {sum(value <= RELATIVE for value in values)} of {len(values)} "
        f"| {max(values):.1e} |"
        for (task, size, strategy), values in worst.items()
    ]
    return f"""# Conformance: the same step everywhere

Written by `make conformance`. Every case runs the real loader and the real trainer (2 layers, fp32, dropout 0.1, a
global batch of 10) in real processes that talk over gloo, and is compared with a single process:

- **batches**: digests of the global batches 0 to {BATCHES - 1} (tokens, masks, labels, dropout keys) are equal;
- **losses**: each of {STEPS} training losses agrees within {RELATIVE:g} relative.

`mlm` is a BERT with AdamW, `mlm_lamb` the same with LAMB; `span_corruption` a T5 v1.1 of 2 + 2 layers and `causal_lm` a
GPT-2, both with Adafactor and a SentencePiece tokenizer. A row of `mlm` covers micro-batches of at most
{_join(MICRO_BATCHES)} examples; {_join(THREADS)} loader threads; the packings {_join(PACKINGS)}. The others, and those
of ZeRO and Accelerate, cover micro-batches of at most {_join(FEWER[0])} examples and both packings. `hsdp` is FSDP2 in
two replicas; `zero-1` to `zero-3` are the stages of DeepSpeed's ZeRO; `accelerate` is DDP in Hugging Face Accelerate.

| objective | processes | strategy | cases that agree | largest relative difference of a loss |
|---|---|---|---|---|
{chr(10).join(rows)}

{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, CPU ({platform.machine()}).
"""


def _join(values: Iterable[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"


if __name__ == "__main__":
    sys.exit(main())

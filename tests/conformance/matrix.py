"""`make conformance`: the full same-step matrix, written to docs/conformance.md.

Each group of cases (an objective, a world size, a strategy) is kept in build/conformance as soon as
it is done, so the command resumes where it was stopped. Results of other code are measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from rich.progress import track

from samestep.terminal import Console
from tests.conformance.worker import FAMILIES, TEXT_TASKS, Case, Record, run_cases
from tests.conftest import make_dataset, write_experiment, write_t5_experiment
from tests.processes import run_ranks

Group: TypeAlias = tuple[str, int, str]
"""An objective, a world size and a strategy."""

STEPS, BATCHES, RELATIVE, TIE = 30, 201, 1e-5, 1e-5
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
FAMILY_STRATEGIES = {1: ("ddp",), **dict.fromkeys((2, 3, 5), ("ddp", "fsdp", "zero-3"))}
BACKENDS = dict.fromkeys((2, 3), ("zero-1", "zero-2", "zero-3", "accelerate"))


def compare(ranks: list[Record], reference: Record) -> float:
    """The largest relative difference of a loss from the single process's.

    Infinity when any batch differs.
    """
    digests = np.sum([record.digests for record in ranks], axis=0, dtype=np.uint64)
    if not np.array_equal(digests, reference.digests) or len(ranks[0].losses) != len(
        reference.losses
    ):
        return float("inf")
    if near_ties(ranks, reference) is None:
        return float("inf")
    return float(np.max(np.abs(np.array(ranks[0].losses) / np.array(reference.losses) - 1)))


def near_ties(ranks: list[Record], reference: Record) -> int | None:
    """The number of tokens that generators have drawn otherwise than the single process's.

    None if samples are missing, or if the first token did not come before the second one by less
    than `TIE` there: then it is no rounding error.
    """
    found = {place: drawn for record in ranks for place, drawn in record.samples.items()}
    if found.keys() != reference.samples.keys():
        return None
    gaps = [
        min(gap, reference.samples[place][1])
        for place, (token, gap) in found.items()
        if token != reference.samples[place][0]
    ]
    return None if any(gap > TIE for gap in gaps) else len(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.conformance.matrix", description=__doc__)
    help_ = "only the groups like this, such as 'mlm/*/fsdp' or 'causal_lm/3/*'; writes no page"
    parser.add_argument("--only", metavar="OBJECTIVE/PROCESSES/STRATEGY", default="*", help=help_)
    parser.add_argument("--again", action="store_true", help="measure all groups again")
    args = parser.parse_args()
    groups = [group for group in all_groups() if fnmatch(name_of(group), args.only)]
    if not groups:
        names = "\n  ".join(map(name_of, all_groups()))
        parser.error(f"--only {args.only} is like none of the groups:\n  {names}")
    kept = Path("build/conformance", code_digest())
    if args.again:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    todo = [group for group in groups if not (kept / file_of(group)).exists()]
    if len(todo) < len(groups):
        sys.stderr.write(f"{len(groups) - len(todo)} of {len(groups)} groups are in {kept}\n")
    measure(todo, kept)
    found = {group: json.loads((kept / file_of(group)).read_text()) for group in groups}
    worst = {group: each["differences"] for group, each in found.items()}
    samples = [sum(each[name] for each in found.values()) for name in ("ties", "samples")]
    failed = [
        (group, value) for group, values in worst.items() for value in values if value > RELATIVE
    ]
    for group, value in failed:
        sys.stdout.write(f"{name_of(group)}: a loss differs by {value:.1e}\n")
    total = sum(map(len, worst.values()))
    sys.stdout.write(f"{total - len(failed)} of {total} cases equal the single process\n")
    if args.only == "*":
        Path("docs/conformance.md").write_text(render(worst, *samples), encoding="utf-8")
        sys.stdout.write("wrote docs/conformance.md\n")
    return 1 if failed else 0


def all_groups() -> list[Group]:
    families = [
        (task, size, strategy)
        for task in FAMILIES
        for size, strategies in FAMILY_STRATEGIES.items()
        for strategy in strategies
    ]
    return families + [
        (task, size, strategy)
        for task in TASKS
        for size in STRATEGIES
        for strategy in (*STRATEGIES[size], *BACKENDS.get(size, ()))
    ]


def name_of(group: Group) -> str:
    return "/".join(map(str, group))


def file_of(group: Group) -> str:
    return f"{name_of(group).replace('/', '-')}.json"


def code_digest() -> str:
    """Changes with the code that a case runs, and with torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("trainer", "data_pipeline", "tests/conformance"):
        for file in sorted(Path(package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def measure(groups: list[Group], kept: Path) -> None:
    """Runs the cases of groups; writes the largest difference of each case to a file by group."""
    references: dict[tuple[str, str], Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        bert = write_experiment(make_dataset(Path(folder, "words")), Path(folder, "bert.yaml"))
        t5_dataset = make_dataset(Path(folder, "pieces"), "unigram")
        t5 = write_t5_experiment(t5_dataset, Path(folder, "t5.yaml"))
        for group in track(groups, "conformance", console=Console(stderr=True)):
            task, size, strategy = group
            file = t5 if task in TEXT_TASKS else bert
            packings = (FAMILIES[task],) if task in FAMILIES else PACKINGS
            if (task, packings[0]) not in references:
                singles = [Case(1, "single", 8, 1, packing, task) for packing in packings]
                (records,) = run_ranks(1, run_cases, file, singles, STEPS, BATCHES, folder)
                for case, record in zip(singles, records, strict=True):
                    references[task, case.packing] = record
            settings = SETTINGS if task == "mlm" and strategy in STRATEGIES[size] else FEWER
            settings = (*settings[:-1], packings)
            cases = [
                Case(size, strategy, *setting, task) for setting in itertools.product(*settings)
            ]
            ranks = run_ranks(size, run_cases, file, cases, STEPS, BATCHES, folder, timeout=1200)
            differences = [
                compare([records[i] for records in ranks], references[task, case.packing])
                for i, case in enumerate(cases)
            ]
            ties, samples = 0, 0
            for i, case in enumerate(cases):
                record = references[task, case.packing]
                ties += near_ties([records[i] for records in ranks], record) or 0
                samples += len(record.samples)
            # Written last: a group that was interrupted is measured again.
            content = {"differences": differences, "ties": ties, "samples": samples}
            (kept / file_of(group)).write_text(json.dumps(content))


def render(worst: dict[Group, list[float]], ties: int, samples: int) -> str:
    """The page: one row for each objective, world size and strategy.

    Args:
        ties: number of samples that differ.
        samples: number of samples in all.
    """
    rows = [
        f"| `{task}` | {size} | {strategy} | {sum(value <= RELATIVE for value in values)} of "
        f"{len(values)} "
        f"| {max(values):.1e} |"
        for (task, size, strategy), values in worst.items()
    ]
    values = [value for of_group in worst.values() for value in of_group]
    agree = sum(value <= RELATIVE for value in values)
    sizes = {size for _, size, _ in worst}
    return f"""# Conformance: the same step everywhere

**{agree} of {len(values)} cases take the same steps as a single process**, with {min(sizes)} to {max(sizes)} processes, {len({kind for _, _, kind in worst})} strategies
and {len({task for task, _, _ in worst})} objectives: equal batches, and losses within {max(values):.1e} relative (up to {RELATIVE:g} counts as the same).
[conformance_bitwise.md](conformance_bitwise.md) has runs with equal bits, [the last table](#cases) the rows.

## What is compared

Written by `make conformance`. Every case runs the real loader and the real trainer (2 layers, fp32, dropout 0.1, a
global batch of 10) in real processes that talk over gloo, and is compared with a single process:

- **batches**: digests of the global batches 0 to {BATCHES - 1} (tokens, masks, labels, dropout keys) are equal;
- **losses**: each of {STEPS} training losses agrees within {RELATIVE:g} relative;
- **samples** of the generators of ELECTRA and DeBERTa v3: a token may differ only where the two likeliest ones, with
  their noise, are less than {TIE:g} apart. {ties} of {samples:,} did.

## Objectives

| objective | model |
|---|---|
| `mlm`, `mlm_lamb`, `muon` | BERT with AdamW, with LAMB, with Muon |
| `mlm_nsp` | BERT with next-sentence prediction, AdamW |
| `span_corruption`, `causal_lm` | T5 v1.1 of 2 + 2 layers; GPT-2; both with Adafactor and a SentencePiece tokenizer |
| `ul2` | that T5 with UL2's mixture of denoisers |
| `bart` | BART of 2 + 2 layers with its denoising, AdamW and a SentencePiece tokenizer |
| `spanbert` | BERT with SpanBERT's objective |
| `albert` | ALBERT of 4 layers in 2 groups, with sentence order, n-grams and LAMB |
| `electra`, `electra_all_tokens` | ELECTRA with its generator: replaced tokens; All-Tokens MLM |
| `deberta` | DeBERTa v2 with its convolution and mask decoder |
| `deberta_v3` | DeBERTa v3 with its generator |
| `xlnet` | XLNet with its permutations |
| `modernbert` | ModernBERT with local layers |
| `mpnet` | MPNet with its relative bias |
| `neobert` | NeoBERT with its masks, all of them [MASK] |
| `llama` | Llama with grouped heads, normalized queries and keys, and a window |
| `olmo2` | OLMo 2: norms after each branch |
| `llama_halves` | a Llama with an encoder of 2 layers and a decoder of 2, with T5's objective |
| `lstm`, `bilm`, `elmo` | LSTM language models of one direction, with weight dropout, and of two, on sub-words or characters |

## Cases

A row of `mlm` under `single`, `ddp`, `fsdp` or `hsdp` covers micro-batches of at most {_join(MICRO_BATCHES)} examples; {_join(THREADS)}
loader threads; the packings {_join(PACKINGS)}. The other rows cover micro-batches of at most {_join(FEWER[0])} examples: those of
`{"`, `".join(TASKS)}` with both packings, the rest with one. `hsdp` is FSDP2 in two
replicas; `zero-1` to `zero-3` are the stages of DeepSpeed's ZeRO; `accelerate` is DDP in Hugging Face Accelerate.

| objective | processes | strategy | cases that agree | largest relative difference of a loss |
|---|---|---|---|---|
{chr(10).join(rows)}

{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, CPU ({platform.machine()}).
"""  # noqa: E501


def _join(values: Iterable[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"


if __name__ == "__main__":
    sys.exit(main())

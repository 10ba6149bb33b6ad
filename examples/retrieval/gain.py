"""Fine-tunes an embedding model on pairs of texts, and scores it before and after.

    python -m examples.retrieval.gain pairs.jsonl beir/cranfield --output runs/gain \
        --steps 40 --rows 32 --seeds 1 2 3 --negatives 4 --rerank 20

Scores are of a folder in BEIR's layout whose judgments no training reads. `pairs` beside this
module writes both from common files. Three arms start from the same weights:

pairs      objective contrastive: the other passages of the batch are the negatives of a query
mined      with --negatives N: each query has N more, which `samestep mine` finds with the weights
           of the start among the passages of all pairs
reranked   with --rerank K: the first K passages that the last arm finds are sorted again by a
           cross-encoder, objective ranking, trained on the mined rows

A seed chooses the order of rows and dropout. If the command is stopped, the same command continues:
runs from their last checkpoint, and each score is a file in OUTPUT/scores.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import samestep
from examples.published.beside_trainer import interval
from examples.published.minilm import unpack_minilm
from examples.retrieval.pairs import build, build_pairs, read_pairs

logger = logging.getLogger(__name__)

MEASURES = ("ndcg@10", "mrr@10", "recall@100")
MAX_LENGTH = "256"  # tokens of a text in evaluations, as all-MiniLM-L6-v2 is published
Scores = dict[str, float]


def command(*arguments: str | Path) -> None:
    """Runs a command of samestep.

    Raises:
        SamestepError: it has failed; it has printed why.
    """
    words = [str(each) for each in arguments]
    logger.info("samestep %s", shlex.join(words))
    began = time.perf_counter()
    if code := subprocess.run([sys.executable, "-m", "samestep.cli", *words]).returncode:
        raise samestep.SamestepError(f"samestep {words[0]} ended with exit code {code}")
    logger.info("samestep %s took %.0f seconds", words[0], time.perf_counter() - began)


class Gain:
    """The runs and scores of one output folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._output = options, Path(options.output)
        (self._output / "scores").mkdir(parents=True, exist_ok=True)
        self._check_settings()
        self._model = options.model or str(unpack_minilm(self._output / "model"))

    def _check_settings(self) -> None:
        settings = {name: str(value) for name, value in vars(self._options).items()}
        settings.pop("seeds")  # more of them may come later
        file = self._output / "settings.json"
        if file.exists() and json.loads(file.read_text(encoding="utf-8")) != settings:
            raise samestep.ConfigError(
                f"{self._output} has results of other settings. Choose another --output, or "
                "repeat the settings in its settings.json."
            )
        file.write_text(json.dumps(settings), encoding="utf-8")

    def scores(self) -> dict[str, list[Scores]]:
        """The scores of each arm, a dictionary for each seed."""
        options = self._options
        found: dict[str, list[Scores]] = {"published": [self._score("published", self._model)]}
        pairs = self._dataset("pairs")
        for seed in options.seeds:
            run = self._train("pairs", pairs, seed, {"kind": "contrastive"})
            found.setdefault("pairs", []).append(self._score(f"pairs-{seed}", run))
        if not options.negatives:
            return found
        negatives = {"negatives": options.negatives}
        mined = self._dataset("mined")
        for seed in options.seeds:
            run = self._train("mined", mined, seed, {"kind": "contrastive", **negatives})
            found.setdefault("mined", []).append(self._score(f"mined-{seed}", run))
            if options.rerank:
                objective = {"kind": "ranking", "loss": "softmax", **negatives}
                reranker = self._train("reranker", mined, seed, objective)
                top = ("--rerank", reranker, "--rerank-top", str(options.rerank))
                found.setdefault("reranked", []).append(self._score(f"reranked-{seed}", run, *top))
        return found

    def _dataset(self, arm: str) -> Path:
        """Builds the dataset of an arm, or finds it built."""
        options, folder = self._options, self._output / "data" / arm
        folder.mkdir(parents=True, exist_ok=True)
        if arm == "pairs":
            return build_pairs(read_pairs(options.pairs), self._model, folder)
        file = folder / "mined.jsonl"
        if not file.exists():
            number = ("--negatives", str(options.negatives), "--range", options.range)
            length = ("--max-length", MAX_LENGTH)
            command("mine", self._model, options.pairs, *number, *length, "--output", file)
        return build(file, self._model, folder)

    def _train(self, arm: str, dataset: Path, seed: int, objective: dict[str, Any]) -> Path:
        """Trains a run to its end; returns its folder."""
        options, run = self._options, self._output / "runs" / f"{arm}-{seed}"
        texts = 1 + objective.get("negatives", 0)  # a query, and this number of passages
        tree: dict[str, Any] = {
            "output": str(run),
            "seed": seed,
            "init_from": self._model,
            "data": {
                "path": str(dataset),
                "sequence_length": options.length * texts,
                "packing": "padded",
                "lanes": min(options.rows, 64),  # small datasets do not fill more
                "group_by_length": options.rows,
            },
            "objective": objective,
            "optimizer": {"kind": "adamw", "lr": options.lr},
            "schedule": {"warmup_steps": options.steps // 10},
            "training": {
                "steps": options.steps,
                "global_batch_size": options.rows,
                "micro_batch_size": options.micro_batch,
                "log_every": 5,
                "evaluate_every": None,
            },
            "strategy": "single",
        }
        if arm == "reranker":
            # Each of the sequences has the query, and at most `length` tokens.
            tree["data"]["sequence_length"] = options.length
            tree["model"] = {"head": "classification", "labels": ["score"]}
        file = self._output / f"{arm}-{seed}.yaml"
        file.write_text(json.dumps(tree), encoding="utf-8")
        command("train", file)
        return run

    def _score(self, name: str, model: str | Path, *rerank: str | Path) -> Scores:
        """Scores a model on the held-out folder, or reads its scores."""
        file = self._output / "scores" / f"{name}.json"
        if not file.exists():
            wanted = ("--retrieval", self._options.heldout, "--measures", *MEASURES)
            length = ("--max-length", MAX_LENGTH)
            command("evaluate", model, *wanted, *length, *rerank, "--scores", file)
        scores = json.loads(file.read_text(encoding="utf-8"))
        return {name: scores.get("reranked", scores)[name] for name in MEASURES}


def report(found: dict[str, list[Scores]]) -> Table:
    """A row for each arm and measure, in percent."""
    columns = ("arm", "measure", "of each seed", "mean", "deviation", "gain (95 % over seeds)")
    table = Table(*columns)
    for measure in MEASURES:
        before = 100 * found["published"][0][measure]
        for arm, scores in found.items():
            values = [100 * each[measure] for each in scores]
            spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
            gain = "" if arm == "published" else interval([value - before for value in values])
            listed = " ".join(f"{value:.2f}" for value in values)
            table.add_row(arm, measure, listed, f"{statistics.mean(values):.2f}", spread, gain)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.retrieval.gain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pairs", type=Path, help="JSON Lines with query and positive")
    parser.add_argument("heldout", type=Path, help="a folder in BEIR's layout")
    parser.add_argument("--model", help="a folder or hf://NAME (default: all-MiniLM-L6-v2)")
    parser.add_argument("--output", type=Path, default=Path("runs/gain"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40, help="of a run (default: 40)")
    parser.add_argument("--rows", type=int, default=32, help="of a batch (default: 32)")
    parser.add_argument("--micro-batch", type=int, default=16, help="(default: 16)")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak (default: 2e-5)")
    parser.add_argument(
        "--length", type=int, default=160, help="tokens of query and passage (default: 160)"
    )
    parser.add_argument("--negatives", type=int, default=0, help="mined for each query")
    parser.add_argument("--range", default="10-100", help="of samestep mine (default: 10-100)")
    parser.add_argument(
        "--rerank", type=int, metavar="K", help="also sort the first K again; needs --negatives"
    )
    options = parser.parse_args(arguments)
    if options.rerank and not options.negatives:
        parser.error("--rerank trains on mined rows; add --negatives")
    Console(width=140).print(report(Gain(options).scores()))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    try:
        sys.exit(main())
    except samestep.SamestepError as error:
        sys.exit(f"error: {error}")

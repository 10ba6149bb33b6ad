"""The main job in a few minutes on a CPU.

Text -> tokenizer -> shards -> training, killed and resumed -> export.

Run with `make demo`. Every part is the ordinary `samestep` command; this file only types it, kills
it, and reads what the run wrote.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainer.monitoring.curves import plot_loss
from trainer.monitoring.jsonl import read_rows

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
    console.print(
        f"\n[bold cyan]$ samestep {' '.join(repr(a) if ' ' in a else a for a in arguments)}"
    )
    return subprocess.Popen([str(Path(sys.executable).with_name("samestep")), *arguments])


def run(*arguments: str) -> None:
    """Runs a samestep command to its end."""
    if start(*arguments).wait() != 0:
        sys.exit(f"the demo fails, as samestep {arguments[0]} has failed")


def kill_at_step(agent: subprocess.Popen[bytes], step: int) -> None:
    """Kills all processes of a run, at once and without warning, when it has logged `step`."""
    while not any(row["step"] >= step for row in read_rows(FOLDER / "run" / "metrics.jsonl")):
        if agent.poll() is not None:
            sys.exit("the demo stops: training ended before it could be killed")
        time.sleep(0.2)
    processes = family(agent.pid)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    agent.wait()
    console.print(f"\n[bold red]SIGKILL[/] to all {len(processes)} processes after step {step}")


def family(pid: int) -> list[int]:
    """A process and all that have come of it.

    The command, the server that forks its workers, and these.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in family(int(child)))]


def heldout_losses() -> list[float]:
    return [
        row["heldout/loss"]
        for row in read_rows(FOLDER / "run" / "metrics.jsonl")
        if "heldout/loss" in row
    ]


def summary(seconds: float) -> Table:
    """What the run came to."""
    rows = list(read_rows(FOLDER / "run" / "metrics.jsonl"))
    train = [row for row in rows if "train/loss" in row]
    heldout = heldout_losses()
    speeds = sorted(row["perf/tokens_per_second"] for row in train)
    table = Table(show_header=False, title="the run", title_justify="left")
    table.add_row(
        "training loss, first and last 20 steps",
        f"{train[0]['train/loss']:.2f} -> {train[-1]['train/loss']:.2f}",
    )
    table.add_row(
        "held-out loss, first and last evaluation", f"{heldout[0]:.2f} -> {heldout[-1]:.2f}"
    )
    table.add_row("tokens a second (median)", f"{speeds[len(speeds) // 2]:,.0f}")
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
    run(
        "ledger", "verify", str(FOLDER / "run")
    )  # over the restart, no example was lost or fed twice
    console.print()
    console.print(summary(time.monotonic() - began))
    if not HELDOUT_RANGE[0] <= heldout_losses()[-1] <= HELDOUT_RANGE[1]:
        sys.exit(
            f"the demo fails: the held-out loss must end between {HELDOUT_RANGE[0]} and "
            f"{HELDOUT_RANGE[1]}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

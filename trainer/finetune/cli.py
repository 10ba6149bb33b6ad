"""`samestep finetune-suite`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.command import Commands, add_command
from trainer.errors import EXIT_DONE, EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from trainer.finetune.runs import Run
    from trainer.finetune.suite import Result


def register(commands: Commands) -> None:
    """Adds `samestep finetune-suite`."""
    parser = add_command(
        commands,
        "finetune-suite",
        _suite,
        "fine-tune a checkpoint on tasks x seeds and compare the scores",
        "Each run is a `samestep train` of its own on one device. Stopped at any moment, the suite "
        "goes on where it\n"
        "was when it is run again, without the finished runs. DIR gets data/ and runs/, "
        "results.jsonl, and the\n"
        "table as table.html. The best run of each task keeps its checkpoint.\n\n"
        "examples:\n"
        "  samestep finetune-suite runs/bert_base --tasks glue --seeds 5\n"
        "  samestep finetune-suite hf://google-bert/bert-base-uncased --tasks mrpc rte --grid "
        "--output runs/suite\n"
        "  samestep finetune-suite runs/bert_mini --tasks my_task.yaml optimizer.lr=1e-4 "
        "model.dropout=0.1",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a run or a step, a Hugging Face folder or hf://NAME"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="glue, mrpc, ...: see configs/tasks; or YAML files",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="bert, roberta, gpt, t5, mini (small BERTs) or distilbert (default: the tasks' own)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs of each setting (default: 3)"
    )
    parser.add_argument(
        "--grid",
        action="store_true",
        help="try every point of the tasks' grids, not the first alone",
    )
    help_ = "make the runs from random weights, too: what the checkpoint's weights are worth"
    parser.add_argument("--scratch", action="store_true", help=help_)
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of all runs")
    parser.add_argument(
        "--output",
        default="runs/suite",
        metavar="DIR",
        help="where it all goes (default: runs/suite)",
    )
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="runs at a time (default: one a GPU, or one)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of all runs, as optimizer.lr=5e-5",
    )


def _suite(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from trainer.checkpoint.lock import only_writer
    from trainer.finetune.runs import list_runs
    from trainer.finetune.suite import Suite, read_results
    from trainer.finetune.table import as_table, notes, summarise, write_page
    from trainer.finetune.task import find_tasks

    if args.parallel is not None and args.parallel < 1:
        raise ConfigError(f"--parallel must be at least 1, not {args.parallel}")
    tasks = find_tasks([name for name in args.tasks if "=" not in name], args.recipe)
    overrides = [
        *args.overrides,
        *(name for name in args.tasks if "=" in name),
    ]  # which stand behind --tasks
    folder, slots = Path(args.output), _slots(args.parallel, "accelerator=cpu" in overrides)
    signal.signal(signal.SIGTERM, _interrupt)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("building datasets", total=None)

        def tell(run: Run, result: Result | None) -> None:
            if result is None:
                progress.update(bar, description=f"{run.task} {run.name}")
            else:
                said = f"{run.score} {100 * result.scores[run.score]:.1f}"
                progress.console.print(
                    f"{run.task} {run.name}: {said}, {result.seconds:.0f} s", highlight=False
                )
                progress.advance(bar)

        runs = list_runs(
            args.checkpoint, tasks, folder, args.seeds, args.grid, overrides, args.scratch
        )
        with only_writer(folder):
            suite = Suite(folder, runs, args.keep)
            progress.update(bar, total=len(suite.missing()), description="fine-tuning")
            problems = suite.make(slots, tell)
    rows = summarise(tasks, runs, read_results(folder))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(as_table(rows), notes(rows))
    write_page(
        rows, f"{args.checkpoint}: {', '.join(task.name for task in tasks)}", folder / "table.html"
    )
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return EXIT_FAILED if problems else EXIT_DONE


def _slots(parallel: int | None, on_cpu: bool) -> list[dict[str, str]]:
    """The environment variables of runs at the same time: a device each, if there are several."""
    from trainer.accelerators import cpu, detect

    devices = detect.processes(cpu.Config() if on_cpu else None)
    return [devices[number % len(devices)] for number in range(parallel or len(devices))]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt

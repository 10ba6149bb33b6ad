"""`samestep finetune-suite`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.command import Commands, add_command, in_typed_order
from samestep.errors import ConfigError, MissingExtra
from samestep.progress import Progress

if TYPE_CHECKING:
    from trainer.studies.finetune.runs import Run
    from trainer.studies.finetune.suite import Result, Suite


def register(commands: Commands) -> None:
    """Adds `samestep finetune-suite`."""
    parser = add_command(
        commands,
        "finetune-suite",
        _suite,
        "fine-tune a checkpoint on tasks x seeds and compare the scores",
        "Each run is a `samestep train` of its own on one device. A suite that was stopped\n"
        "resumes when the same command is run again; finished runs are not repeated. DIR gets\n"
        "data/, runs/, results.jsonl, and the table as table.html. Each run has predictions.jsonl\n"
        "and report.html; the best one of each task keeps its checkpoint.\n\n"
        "examples:\n"
        "  samestep finetune-suite runs/bert_base --tasks glue --seeds 5\n"
        "  samestep finetune-suite hf://google-bert/bert-base-uncased --tasks mrpc rte --grid "
        "--output runs/suite\n"
        "  samestep finetune-suite runs/bert_mini --tasks my_task.yaml optimizer.lr=1e-4 "
        "model.dropout=0.1",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CKPT",
        help="a run (its newest checkpoint), RUN/best, or a step's folder; or a Hugging Face "
        "folder or hf://NAME",
    )
    tasks = "glue, mrpc, ... (see configs/tasks), or YAML files"
    add("--tasks", nargs="+", required=True, metavar="TASK", help=tasks)
    recipes = (
        "bert, roberta, gpt, t5, ulmfit (LSTMs), elmo or elmo_attention (biLMs), mini (small "
        "BERTs), distilbert, cbow or bilstm_attention (word vectors: add --scratch-only) "
        "(default: the tasks' own)"
    )
    add("--recipe", metavar="NAME", help=recipes)
    seeds = "number of runs of each setting (default: 3)"
    add("--seeds", type=int, default=3, metavar="N", help=seeds)
    first = "the first seed (default: 0); with --seeds 2 --first-seed 3, seeds 3 and 4"
    add("--first-seed", type=int, default=0, metavar="N", help=first)
    add(
        "--grid",
        action="store_true",
        help="try all points of the tasks' grids (default: the first)",
    )
    scratch = "repeat the runs from random weights, to see what pre-training is worth"
    add("--scratch", action="store_true", help=scratch)
    add("--scratch-only", action="store_true", help="only the runs from random weights")
    add("--keep", action="store_true", help="keep the checkpoints of all runs")
    output = "folder of datasets, runs and results (default: runs/suite)"
    add("--output", default="runs/suite", metavar="DIR", help=output)
    parallel = "number of runs at a time (default: one for each GPU, or one)"
    add("--parallel", type=int, metavar="N", help=parallel)
    overrides = "settings of all runs, such as optimizer.lr=5e-5"
    add("overrides", nargs="*", metavar="key=value", help=overrides)


def _suite(args: argparse.Namespace) -> int:
    from samestep.terminal import Console
    from trainer.checkpoint.lock import only_writer
    from trainer.studies import execution
    from trainer.studies.finetune import page, runs, suite, table, task

    if find_spec("scipy") is None:  # before training rather than after it
        raise MissingExtra("scipy", "tasks", "samestep finetune-suite")
    execution.check_parallel(args.parallel)
    # argparse takes overrides that follow --tasks for tasks.
    swallowed = [name for name in args.tasks if "=" in name and not Path(name).exists()]
    overrides = in_typed_order(args, [*args.overrides, *swallowed])
    tasks = task.find_tasks([name for name in args.tasks if name not in swallowed], args.recipe)
    if not tasks:
        raise ConfigError("--tasks names no task. Name one, such as mrpc, before the settings.")
    folder = Path(args.output)
    slots = execution.slots(args.parallel, "accelerator=cpu" in overrides)
    execution.interrupt_on_signals()
    if args.seeds < 1 or args.first_seed < 0:
        raise ConfigError(
            f"--seeds must be at least 1 and --first-seed at least 0, not {args.seeds} and "
            f"{args.first_seed}"
        )
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    starts: list[runs.Start] = [] if args.scratch_only else ["checkpoint"]
    if args.scratch or args.scratch_only:
        starts.append("random")
    listed = runs.list_runs(args.checkpoint, tasks, folder, seeds, args.grid, overrides, starts)
    # Two suites in one folder would remove each other's checkpoints.
    with only_writer(folder, f"--output={folder}"):
        whole = suite.Suite(folder, listed, args.keep)
        progress = Progress("fine-tuning", len(listed), done=whole.finished, logs=False)
        with execution.resumable(len(listed), lambda: len(whole.missing()), "runs"), progress:
            problems = whole.make(slots, partial(_tell, whole, len(slots), progress))
    rows = table.summarize(tasks, listed, suite.read_results(folder))
    # Without a terminal, rich would assume 80 columns and break the table.
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False, markup=False)
    console.print(table.as_table(rows), table.notes(rows))
    title = f"{args.checkpoint}: {', '.join(each.name for each in tasks)}"
    page.write_curves(rows, folder)
    page.write_page(rows, title, folder / "table.html")
    return execution.exit_code(problems)


def _tell(whole: Suite, slots: int, progress: Progress, run: Run, result: Result | None) -> None:
    from trainer.studies.execution import show_progress

    text = "started"
    if result is not None:
        score = 100 * result.scores[run.score]
        text = f"{run.score} {score:.1f}, {result.seconds:.0f} s"
        text += show_progress(progress, whole.finished, len(whole), whole.left(slots), "runs")
    sys.stderr.write(f"{run.task} {run.name}: {text}\n")

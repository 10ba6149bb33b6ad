"""`samestep study`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, MissingExtra
from samestep.progress import Progress

if TYPE_CHECKING:
    from trainer.studies.execution import Slot
    from trainer.studies.jobs import Job, Jobs, Result
    from trainer.studies.results import Results
    from trainer.studies.study import Study


def register(commands: Commands) -> None:
    """Adds `samestep study`."""
    parser = add_command(
        commands,
        "study",
        _study,
        "compare settings over seeds: pre-training, fine-tuning, and a page with the differences",
        "A study is a file: stages (datasets, runs, tasks), arms that differ in some settings,\n"
        "and measures. Each stage, arm and seed is a job. Equal jobs are made once, also for\n"
        "other studies in the same DIR. A study that was stopped continues when the same command\n"
        "is run again. DIR/NAME gets index.html, scores.json and costs.json.\n\n"
        "examples:\n"
        "  samestep study configs/studies/masking_rate.yaml\n"
        "  samestep study configs/studies/masking_rate.yaml --list\n"
        "  samestep study configs/studies/masking_rate.yaml scale=base seeds=5",
    )
    add = parser.add_argument
    add("study", metavar="STUDY", help="the study, a YAML file")
    output = "folder of jobs and results (default: runs/studies)"
    add("--output", type=Path, default=Path("runs/studies"), metavar="DIR", help=output)
    parallel = "number of jobs at a time (default: one for each GPU, else one for each CPU core)"
    add("--parallel", type=int, metavar="N", help=parallel)
    page = "also put the results into a Markdown page, which may be new, between the lines "
    add("--page", type=Path, metavar="FILE", help=f"{page}<!-- results --> and <!-- /results -->")
    add("--list", action="store_true", help="list the jobs and which are finished; run none")
    overrides = "settings that override the study's, e.g. scale=base seeds=5"
    add("overrides", nargs="*", metavar="key=value", help=overrides)


def _study(args: argparse.Namespace) -> int:
    from trainer.checkpoint.lock import only_writer
    from trainer.monitoring.report.study import JOBS, PAGE
    from trainer.studies import execution, page, plots, results, runner
    from trainer.studies.jobs import list_jobs
    from trainer.studies.study import Study

    for package, extra in (("scipy", "tasks"), ("matplotlib", "plot")):  # before the work
        if find_spec(package) is None:
            raise MissingExtra(package, extra, "samestep study")
    execution.check_parallel(args.parallel)
    study = Study.read(args.study, args.overrides)
    jobs = list_jobs(study, args.output / JOBS)
    if args.list:
        return _list(study, jobs)
    if args.page is not None:
        page.check_markdown(args.page)
    slots = _slots(args.parallel)
    execution.interrupt_on_signals()
    folder: Path = args.output / study.name
    # Two studies in one folder would train in the same folders of jobs. If all are finished, only
    # the page is written, and others may be at work.
    missing = runner.missing(jobs)
    lock = only_writer(args.output, f"--output={args.output}") if missing else nullcontext()
    with lock:
        total, left = len(jobs.all), len(runner.missing(jobs))
        progress = Progress(study.name, total, done=total - left, logs=False)
        tell = partial(_tell, jobs, runner.arms_of(jobs), len(slots), progress)
        with execution.resumable(total, lambda: len(runner.missing(jobs)), "jobs"), progress:
            plan = runner.Plan(folder, study.config.question, jobs, len(slots))
            problems = runner.execute(jobs, slots, tell, plan)
        code = execution.exit_code(problems)  # before anything that may fail for want of results
        found = results.collect(study, jobs)
        found.write(folder)
        files = plots.write_plots(found, jobs, folder / "plots")
        page.write_html(found, files, folder / PAGE)
        if args.page is not None:
            page.write_markdown(found, files, args.page)
    _print(found, folder)
    return code


def _slots(parallel: int | None) -> Sequence[Slot]:
    """One for each GPU; without GPUs, one for each core."""
    from trainer.accelerators import detect
    from trainer.accelerators.kinds import cpu
    from trainer.studies import execution

    if isinstance(detect.best(), cpu.Config):
        return execution.single_threaded(parallel)
    return execution.slots(parallel, on_cpu=False)


def _list(study: Study, jobs: Jobs) -> int:
    from trainer.studies.runner import arms_of

    arms = arms_of(jobs)
    for job in jobs.all:
        state = "finished" if job.result() is not None else "to do"
        sys.stdout.write(f"{job.name}  {state:8}  {job.stage}: {arms[job.digest]}\n")
    done = sum(job.result() is not None for job in jobs.all)
    takes = study.config.cpu_hours
    hours = f"; CPU time of the whole study: about {takes:g} h" if takes else ""
    sys.stdout.write(f"{done} of {len(jobs.all)} jobs are finished{hours}\n")
    return EXIT_DONE


def _tell(
    jobs: Jobs,
    arms: Mapping[str, str],
    slots: int,
    progress: Progress,
    job: Job,
    result: Result | None,
) -> None:
    from trainer.monitoring.forecast import suite_left
    from trainer.studies.execution import show_progress

    text = "started"
    if result is not None:
        # Jobs of a stage resemble each other, as the runs of a suite's task do.
        results = [(each, each.result()) for each in jobs.all]
        finished = [(each.stage, 1, end.usage.seconds) for each, end in results if end]
        missing = [(each.stage, 1) for each, end in results if not end]
        left = suite_left(finished, missing, slots)
        text = f"{result.usage.seconds:.0f} s"
        text += show_progress(progress, len(finished), len(results), left, "jobs")
    sys.stderr.write(f"{job.name} ({job.stage}: {arms[job.digest]}): {text}\n")


def _print(found: Results, folder: Path) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from samestep.terminal import Console
    from trainer.monitoring.report.study import PAGE
    from trainer.studies import page

    table = Table(*page.headings(found), box=box.SIMPLE)
    for line in page.lines(found):
        table.add_row(*(Text(each.strip("*"), "bold" * each.startswith("**")) for each in line))
    # Without a terminal, rich would assume 80 columns and break the table.
    width = None if sys.stdout.isatty() else 140
    console = Console(width=width, highlight=False, markup=False)  # "[mask]" is no markup
    plain = [note.replace("**", "") for note in page.notes(found)]
    console.print(found.study.config.question, table, *map(Text, plain), sep="\n")
    console.print(f"\n{folder / PAGE}")

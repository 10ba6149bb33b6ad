"""`samestep launch`, `jobs`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from launch.job import Record

_JOB = "id of a job, or folder of its run"


def register_launch(commands: Commands) -> None:
    """Adds `launch` to the `samestep` command."""
    parser = add_command(
        commands,
        "launch",
        _launch,
        "submit a run, or the build of a dataset, to a cluster",
        "Before it submits, it checks that the run could start: that its settings fit the\n"
        "devices, and that its data can be read and its output written. OUTPUT/launch keeps what\n"
        "was submitted: the script, the settings, a snapshot of the code, the log.\n\n"
        "--dry-run makes the same checks, asks the cluster and submits nothing.\n\n"
        "examples:\n"
        "  samestep launch configs/launch/local.yaml configs/debug/bert_mini.yaml --follow\n"
        "  samestep launch configs/launch/slurm.yaml configs/pretrain/bert_large.yaml"
        " cluster.nodes=4-8 --dry-run\n"
        "  samestep launch configs/launch/slurm.yaml configs/data/c4_en.yaml --tasks 64",
        "Submits a run, or the build of a dataset, to a cluster: to this machine, Slurm, "
        "Kubernetes or Cloud TPU.",
    )
    parser.add_argument(
        "cluster", metavar="CLUSTER", help="a YAML file of the cluster, as in configs/launch"
    )
    parser.add_argument(
        "file", metavar="CONFIG", help="an experiment to train, or a dataset to build"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the file's; cluster.key=value overrides the cluster's",
    )
    parser.add_argument(
        "--tasks", type=int, metavar="N", help="number of jobs that build a dataset (default: 1)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be submitted, check whether it would start there, and submit "
        "nothing; exits with an error if it would not",
    )
    instead.add_argument(
        "--render",
        action="store_true",
        help="print the script or manifest alone, for other commands to read; checks the keys and "
        "values of all settings, and nothing else",
    )
    instead.add_argument(
        "--follow",
        action="store_true",
        help="print the job's log until it ends; exit with 0 if it succeeded, else 1",
    )


def register_jobs(commands: Commands) -> None:
    """Adds `jobs`."""
    parser = add_command(
        commands,
        "jobs",
        _jobs,
        "list the jobs submitted from here and their states",
        "example:\n  samestep jobs",
    )
    parser.add_argument(
        "--all", action="store_true", help="list all ended jobs, not only the newest ten"
    )


def register_logs(commands: Commands) -> None:
    """Adds `logs`."""
    parser = add_command(
        commands, "logs", _logs, "print a job's log", "example:\n  samestep logs 1234 --follow"
    )
    parser.add_argument("job", metavar="JOB", help=_JOB)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="keep printing until the job ends; exit with 0 if it succeeded, else 1",
    )


def register_cancel(commands: Commands) -> None:
    """Adds `cancel`."""
    parser = add_command(
        commands,
        "cancel",
        _cancel,
        "end a job; a run saves a checkpoint first, and continues from it when launched again",
        "example:\n  samestep cancel 1234",
    )
    parser.add_argument("job", metavar="JOB", help=_JOB)


# `samestep --help` imports this module, so each command imports what it needs when it runs.


def _launch(args: argparse.Namespace) -> int:
    from launch.submission import checks, submit

    launch = submit.prepare(args.cluster, args.file, args.overrides, args.tasks)
    files = launch.submission.files
    if args.render:
        checks.require_settings(launch)
        sys.stdout.write(next(iter(files.values())))
        return EXIT_DONE
    if args.dry_run:
        for name, text in files.items():
            sys.stdout.write(f"--- {launch.job.folder / name}\n{text}\n")
        sys.stdout.write(f"--- submitted with\n{shlex.join(launch.submission.command)}\n\n")
        sys.stdout.write("--- checks\n")
        for line in checks.report(launch):
            sys.stdout.write(line)
            sys.stdout.flush()
        return EXIT_DONE
    checks.require(launch)
    record = submit.submit(launch)
    sys.stdout.write(
        f"submitted {record.name} as {record.kind} job {record.id}; kept in {record.folder}\n"
    )
    if args.follow:
        return _follow(record)
    sys.stdout.write(
        f"  samestep logs {record.id} --follow\n  samestep jobs\n  samestep cancel {record.id}\n"
    )
    return EXIT_DONE


def _jobs(args: argparse.Namespace) -> int:
    from launch import records
    from samestep.terminal import Console

    records.show(Console(highlight=False, markup=False), everything=args.all)
    return EXIT_DONE


def _logs(args: argparse.Namespace) -> int:
    from launch import records

    record = records.find(args.job)
    if args.follow:
        return _follow(record)
    sys.stdout.writelines(records.cluster_of(record).logs(record, False))
    return EXIT_DONE


def _follow(record: Record) -> int:
    from launch import records

    cluster = records.cluster_of(record)
    try:
        for text in cluster.logs(record, True):
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(f"\nthe job goes on; `samestep cancel {record.id}` ends it\n")
        return EXIT_DONE
    state = cluster.states([record]).get(record.folder)
    word = state.word if state else "gone"
    sys.stdout.write(f"job {record.id}: {word}\n")
    return EXIT_DONE if word == "done" else EXIT_FAILED


def _cancel(args: argparse.Namespace) -> int:
    from launch import records

    record = records.find(args.job)
    records.cluster_of(record).cancel(record)
    sys.stdout.write(f"job {record.id} is asked to end\n")
    return EXIT_DONE

"""The `samestep` command."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import __version__, environment, log
from trainer.command import OVERRIDES, Commands, add_command, add_processes
from trainer.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    ConfigError,
    LaunchError,
    SamestepError,
    fix_of,
)
from trainer.inference.cli import register_fill
from trainer.inspect.cli import (
    add_certify,
    add_doctor,
    add_fetch,
    add_recipes,
    add_report,
    add_watch,
)
from trainer.publish.cli import register_average, register_export, register_publish
from trainer.vectors.cli import register as register_vectors

if TYPE_CHECKING:
    from trainer.inference.evaluate import Step
    from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)

# Failures of the machine that need no stack trace: no space, no permission, no folder, ...
_USERS_ERRNO = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENFILE),
    *(errno.EIO, errno.ESTALE, errno.ENOLCK),
}

_NO_HOME = "Could not determine home directory."  # of pathlib, also in libraries

_METRICS = (  # trainer.metrics.texts.METRICS, which takes longer to import
    *("bleu", "bleu_intl", "chrf", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman"),
    *("answer_exact_match", "answer_f1"),
)

_WALK_THROUGH = """\
from raw text to a model for transformers:
  samestep doctor
  samestep data tokenizer configs/data/python_docs.yaml
  samestep data build configs/data/python_docs.yaml
  samestep train configs/debug/demo.yaml data.path=datasets/python_docs output=runs/first
  samestep report runs/first
  samestep export runs/first exported/first

`samestep COMMAND --help` explains a command."""


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="EXPERIMENT", help="the experiment, a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _add_train(commands: Commands) -> None:
    train = add_command(
        commands,
        "train",
        _train,
        "train a model, or continue the run found in its output folder",
        "example:\n  samestep train configs/debug/bert_mini.yaml --processes 2 training.steps=1000",
    )
    _add_experiment(train)
    add_processes(train)
    train.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="when processes or machines die, continue from the newest checkpoint with the "
        "remaining machines (MIN or more), and let others join, up to MAX; N is N:N, 1:1 this "
        "machine alone. Run the same command on each machine",
    )
    train.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the machines of --elastic find each other: one of them, and a free port there "
        "(default: this machine alone)",
    )


def _add_config(commands: Commands) -> None:
    config = add_command(
        commands,
        "config",
        _config,
        "print an experiment with every setting resolved",
        "With --devices it also checks what would keep the run from starting there: a batch\n"
        "that is too small, an incompatible strategy or model, a dataset or weights that cannot\n"
        "be read, a folder that cannot be written.\n\n"
        "examples:\n  samestep config configs/debug/bert_mini.yaml optimizer.lr=1e-3\n"
        "  samestep config configs/pretrain/bert_large_lamb.yaml --devices 256",
    )
    _add_experiment(config)
    config.add_argument(
        "--devices",
        metavar="N[,N]|here",
        help="check the run for this number of devices (or each of several numbers), or for the "
        "devices of this machine",
    )
    config.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run's folders are not on this machine: check data only if it has an address",
    )


def _add_evaluate(commands: Commands) -> None:
    evaluate = add_command(
        commands,
        "evaluate",
        _evaluate,
        "score a run's newest checkpoint on the held-out documents",
        "examples:\n  samestep evaluate runs/bert_mini\n"
        "  samestep evaluate runs/bert_mini --encoder runs/mrpc    # what has it forgotten?\n"
        "  samestep evaluate runs/mrpc_0 --ensemble runs/mrpc_1 --ensemble runs/mrpc_2",
    )
    evaluate.add_argument("run_folder", metavar="RUN", help="the output folder of a run")
    evaluate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the run's, e.g. data.path=DIR training.evaluate_batches=null",
    )
    evaluate.add_argument(
        "--step", metavar="N|best", help="the checkpoint to score (default: the newest)"
    )
    evaluate.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="a new file for the predictions of a task's head, one line a row: .jsonl, .jsonl.gz "
        "or .jsonl.zst",
    )
    evaluate.add_argument(
        "--scores", type=Path, metavar="FILE", help="also write the scores to this file, as JSON"
    )
    evaluate.add_argument(
        "--encoder",
        metavar="CKPT",
        help="take all parameters except the heads from this checkpoint, such as a run fine-tuned "
        "from RUN: measures what it has forgotten",
    )
    evaluate.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="RUN",
        help="combine the predictions with this run's, of the same task; repeat it for more "
        "runs. The outputs are averaged (with --generate, the logits of each token); for tags, the "
        "runs vote",
    )
    generated = evaluate.add_argument_group(
        "scores of generated texts, instead of the loss (in one process)"
    )
    help_ = "generate texts, with these settings, such as beams=4"
    generated.add_argument("--generate", nargs="*", metavar="key=value", help=help_)
    help_ = f"out of: {', '.join(_METRICS)} (default: bleu chrf)"
    generated.add_argument(
        "--metrics",
        nargs="+",
        choices=_METRICS,
        metavar="METRIC",
        help=help_,
    )
    help_ = "files of pairs in the format of the run's dataset (default: its held-out split)"
    generated.add_argument("--pairs", nargs="+", metavar="FILE", default=[], help=help_)
    generated.add_argument("--limit", type=int, metavar="N", help="the first N pairs only")
    add_processes(evaluate)


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of all sub-commands, from this package and from entry points.

    Args:
        wanted: the sub-command to run; only the package that has it is imported.
    """
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Pre-trains and fine-tunes Transformer language models: the same run on any "
        "number of devices.",
        epilog=_WALK_THROUGH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"samestep {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the Python stack of an error"
    )
    parser.add_argument("--verbose", action="store_true", help="log details")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _add_train,
        _add_config,
        partial(add_certify, run=_certify),
        _add_evaluate,
        register_export,
        register_publish,
        register_average,
        register_fill,
        register_vectors,
        add_fetch,
        add_report,
        add_watch,
        add_doctor,
        add_recipes,
    ):
        add(commands)
    if wanted not in commands.choices:
        others = entry_points(group="samestep.commands")
        for entry_point in [each for each in others if each.name == wanted] or others:
            entry_point.load()(commands)
    return parser


def _config(args: argparse.Namespace) -> int:
    from trainer.config import dump
    from trainer.training.starting import load_experiment

    experiment = load_experiment(args.file, args.overrides, args.elsewhere, offline=True)
    if args.devices is not None:
        from trainer.accelerators import detect
        from trainer.inspect import preflight

        here = str(len(detect.processes(experiment.accelerator)))
        numbers = args.devices.replace("here", here).split(",")
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(f"--devices must be at least 1, or here, not {args.devices}")
        preflight.check(experiment, [int(number) for number in numbers], elsewhere=args.elsewhere)
    sys.stdout.write(dump(experiment))
    return EXIT_DONE


def _processes_to_start(args: argparse.Namespace, experiment: Experiment) -> int:
    """Number of processes to start; 0 if this is one of the processes of a launcher."""
    from trainer.accelerators import detect

    if environment.launcher_rank() is not None:
        return 0
    processes: int = (
        len(detect.processes(experiment.accelerator)) if args.processes is None else args.processes
    )
    if processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {processes}")
    return processes


def _worker_arguments(args: argparse.Namespace, *arguments: str) -> list[str]:
    flags = [flag for flag in ("--traceback", "--verbose") if getattr(args, flag[2:])]
    return [*flags, *arguments, *args.overrides]


def _train(args: argparse.Namespace) -> int:
    from trainer.elastic import agent
    from trainer.training.starting import load_experiment

    experiment = load_experiment(args.file, args.overrides)
    if args.rendezvous and not args.elastic:
        raise ConfigError(
            "--rendezvous is for the machines of an elastic run; add --elastic MIN:MAX"
        )
    snapshots = experiment.checkpoint.snapshot_every is not None
    elastic = None
    if args.elastic:
        from trainer.training.run import checkpoint_folder
        from trainer.training.shared_facts import facts_of

        folder = checkpoint_folder(experiment)
        facts = partial(facts_of, experiment, folder)
        elastic = agent.Elastic.parse(args.elastic, args.rendezvous, snapshots, folder, facts)
    processes = _processes_to_start(args, experiment)
    if processes > 1 or (processes and elastic):
        signals = experiment.training.preemption.numbers
        return agent.run_workers(
            main, _worker_arguments(args, "train", args.file), processes, elastic, signals
        )
    from trainer.training.run import train

    return train(experiment)


def _certify(args: argparse.Namespace) -> int:
    from trainer.accelerators import detect
    from trainer.elastic import agent
    from trainer.inspect.certify.run import certify, read
    from trainer.terminal import Console

    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}. Use 1 or more.")
    arguments = ["certify", "--output", str(args.output)]
    if args.against is not None:
        read(args.against)
        arguments += ["--against", str(args.against)]
    processes = args.processes or detect.gpu_count() or 2
    if processes > 1 and environment.launcher_rank() is None:
        return agent.run_workers(main, arguments, processes)
    has_passed = certify(args.output, args.against, Console(highlight=False, markup=False))
    return EXIT_DONE if has_passed else EXIT_FAILED


def _evaluate(args: argparse.Namespace) -> int:
    from trainer.elastic import agent
    from trainer.training.starting import stored_experiment

    if args.encoder and args.ensemble:
        raise ConfigError("--encoder and --ensemble cannot be combined. Leave one of them out.")
    folders = [args.run_folder, *args.ensemble]
    experiments = [stored_experiment(folder, args.overrides) for folder in folders]
    steps = [_step(args.step, experiment) for experiment in experiments]
    if args.generate is not None:
        from trainer.inference.evaluate import Member
        from trainer.inference.scores import evaluate as evaluate_texts

        for option in ("predictions", "encoder"):
            if getattr(args, option):
                raise ConfigError(
                    f"--{option} is for the predictions of a head, and --generate writes texts; "
                    "leave one out (samestep generate writes texts to a file)"
                )
        others = [Member(*each) for each in zip(experiments[1:], steps[1:], strict=True)]
        settings = (args.generate, args.metrics or ["bleu", "chrf"], args.pairs, args.limit, others)
        return _show_scores(evaluate_texts(experiments[0], steps[0], *settings), args.scores)
    for option in ("metrics", "pairs", "limit"):
        if getattr(args, option):
            raise ConfigError(f"--{option} needs --generate. Add it, or leave --{option} out.")
    processes = _processes_to_start(args, experiments[0])
    if processes > 1:
        given = ("step", "predictions", "scores", "encoder")
        flags = [f"--{name}={getattr(args, name)}" for name in given if getattr(args, name)]
        flags += [f"--ensemble={run}" for run in args.ensemble]
        return agent.run_workers(
            main, _worker_arguments(args, "evaluate", args.run_folder, *flags), processes
        )
    if processes == 1:
        experiments = [experiment.in_one_process() for experiment in experiments]
    from trainer.inference.evaluate import Member, evaluate

    others = [Member(*each) for each in zip(experiments[1:], steps[1:], strict=True)]
    scores = evaluate(experiments[0], steps[0], args.predictions, args.encoder, others)
    return _show_scores(scores, args.scores)


def _step(said: str | None, experiment: Experiment) -> Step:
    """Checks --step; None is the newest checkpoint."""
    if said is None or said.isdecimal():
        return None if said is None else int(said)
    if said != "best":
        raise ConfigError(f"--step is {said}. Use the number of a step, or best.")
    from trainer.checkpoint import retention
    from trainer.training.run import checkpoint_folder

    if retention.best_step(checkpoint_folder(experiment)) is None:
        raise ConfigError(
            f"{experiment.output} was trained without training.best; name a step by its number"
        )
    return "best"


def _show_scores(scores: Mapping[str, float], file: Path | None) -> int:
    if not environment.launcher_rank():
        if file is not None:
            from trainer.storage import write_text

            write_text(file, json.dumps(dict(scores)) + "\n")
        for name, value in scores.items():
            sys.stdout.write(f"{name:12} {value if isinstance(value, int) else f'{value:.6g}'}\n")
    return EXIT_DONE


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line. Overrides, texts and flags may stand anywhere.

    argparse alone wants all positional arguments in one place: it leaves the others in `rest`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(
        next((argument for argument in arguments if not argument.startswith("-")), None)
    )
    args, rest = parser.parse_known_args(arguments)
    args.typed = arguments
    for flag in ("--traceback", "--verbose"):
        if flag in rest:
            rest.remove(flag)
            setattr(args, flag[2:], True)
    listed = "text" if hasattr(args, "text") else "overrides"
    more = [
        argument
        for argument in rest
        if not argument.startswith("-") and ("=" in argument or listed == "text")
    ]
    if rest != more or (more and not hasattr(args, listed)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if more:
        setattr(args, listed, [*getattr(args, listed), *more])
    return args


def _with_page(error: ConfigError) -> str:
    """The message, and the page of the documentation about the first setting in it."""
    from trainer.config.pages import page_about

    text = str(error)
    page = page_about(text)
    # A launcher repeats what a worker has said, page included.
    return text if page is None or "docs/" in text else f"{text} (see {page})"


def _nobody_reads() -> bool:
    """Whether stdout is a pipe to a command that has ended, such as `head`."""
    try:
        # A long write that has failed left nothing to flush, so write once more.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _rank() -> int | None:
    """The rank under a launcher; of a broken environment only commands that train speak."""
    try:
        return environment.launcher_rank()
    except LaunchError:
        return None


def _call(args: argparse.Namespace) -> int:
    """Runs the chosen sub-command; one that only looks imports no module that a folder names."""
    run: Callable[[argparse.Namespace], int] = args.run
    if args.looks is None:
        return run(args)
    from trainer.config import own_modules  # takes longer to import than a command's --help

    with own_modules.refused(args.looks):
        return run(args)


def main(arguments: list[str] | None = None) -> int:
    """Runs a sub-command; returns the exit code. Users' mistakes get one paragraph on stderr."""
    # Huge pages save a tenth of a small model's step on a CPU. torch reads this on import.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environment.prepare_streams()
    try:
        return _run(arguments)
    finally:  # also of --help, and of a command that has failed
        with suppress(OSError):  # said already, or nobody can be told
            environment.flush_output()


def _run(arguments: list[str] | None) -> int:
    args = _parse(arguments)
    rank = _rank()
    under_launcher = rank is not None
    log.set_up(rank, verbose=args.verbose)
    try:
        code = _call(args)
        environment.flush_output()
    except KeyboardInterrupt:
        if not under_launcher:  # the launcher logs it once for all processes
            logger.error("interrupted")
        code = 128 + signal.SIGINT
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        if str(error) == _NO_HOME:
            error = ConfigError("this user has no home folder, which is needed here. Set HOME.")
        explained = isinstance(error, SamestepError) or (
            isinstance(error, OSError) and error.errno in _USERS_ERRNO
        )
        text = _with_page(error) if isinstance(error, ConfigError) else str(error)
        if isinstance(error, OSError) and (fix := fix_of(error)):
            text = f"{error.filename or 'a file'}: {error.strerror}; {fix}"
        logger.error("error: %s", text, exc_info=args.traceback or not explained)
        code = EXIT_FAILED if explained else EXIT_CRASHED
        if isinstance(error, SamestepError):
            code = error.exit_code
        # This code is a message from a worker to its agent. A user gets the usual one.
        if code == EXIT_CRASHED and not under_launcher:
            code = EXIT_FAILED
    # Other ranks may wait in a collective, and an orderly exit would wait for them.
    if code and under_launcher:
        log.exit_now(code)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The `samestep` command."""

from __future__ import annotations

import argparse
import atexit
import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.metadata import entry_points
from typing import NoReturn

from samestep import __version__, environment, log
from samestep.errors import (
    EXIT_CRASHED,
    EXIT_FAILED,
    ConfigError,
    LaunchError,
    SamestepError,
    fix_of,
)

logger = logging.getLogger(__name__)

# Failures of the machine that need no stack trace: no space, no permission, no folder, ...
_USERS_ERRNO = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENFILE),
    *(errno.EIO, errno.ESTALE, errno.ENOLCK),
}

_NO_HOME = "Could not determine home directory."  # of pathlib, also in libraries


# In the list of commands before all others.
_FIRST = (
    *("train", "config", "certify", "evaluate", "export", "publish", "average", "fill", "vectors"),
    *("fetch", "report", "watch", "doctor", "recipes"),
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


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of all sub-commands, which installed packages name as entry points.

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
    found = {each.name: each for each in entry_points(group="samestep.commands")}
    if wanted not in found and not found.keys() >= set(_FIRST):
        parser.error(
            "commands are missing: reinstall samestep, as it is newer than its installation"
        )
    for name in [wanted] if wanted in found else dict.fromkeys([*_FIRST, *found]):
        found[name].load()(commands)
    return parser


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
        args.reject(f"unrecognized arguments: {' '.join(rest)}")
    if more:
        setattr(args, listed, [*getattr(args, listed), *more])
    return args


def _with_page(error: ConfigError) -> str:
    """The message, and the page of the documentation about the first setting in it."""
    from samestep.config.pages import page_about

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
    """The rank under a launcher. Of broken variables of a launcher, commands that train speak."""
    try:
        return environment.launcher_rank()
    except LaunchError:
        return None


def _guard(looks: str | None) -> AbstractContextManager[object]:
    """Lets a command that only looks import no module that a folder names."""
    if looks is None:
        return nullcontext()
    from samestep.config import own_modules  # takes longer to import than a command's --help

    return own_modules.refused(looks)


@contextmanager
def _streams() -> Iterator[None]:
    """Prepares stdout and stderr, and flushes them: also of --help, and after a failure."""
    environment.prepare_streams()
    try:
        yield
    finally:
        with suppress(OSError):  # said already, or nobody can be told
            environment.flush_output()


@_streams()
def main(arguments: list[str] | None = None) -> int:
    """Runs a sub-command; returns the exit code. Users' mistakes get one paragraph on stderr."""
    # Huge pages save a tenth of a small model's step on a CPU. torch reads this on import.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    args = _parse(arguments)
    rank = _rank()
    under_launcher = rank is not None
    log.set_up(rank, verbose=args.verbose)
    try:
        with _guard(args.looks):
            code: int = args.run(args)
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


def command() -> NoReturn:
    """The program `samestep`: runs a sub-command, and ends the process with its exit code."""
    code = main()
    if log.ends_at_once():
        atexit._run_exitfuncs()
        log.exit_now(code)
    sys.exit(code)


if __name__ == "__main__":
    command()

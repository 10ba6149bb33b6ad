"""Errors a user can act on, and the exit codes the command line maps them to.

Each message says what is wrong, the offending value and the fix, in one paragraph.
Programmer errors stay plain `assert`s and exceptions: they keep their stack trace.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = (
    69  # too few machines have met: run it again when there are more (EX_UNAVAILABLE of sysexits.h)
)
EXIT_CRASHED = 70  # a process of a run failed in a way that starting again may cure (EX_SOFTWARE)
EXIT_PREEMPTED = 75  # stopped on request, with a checkpoint saved: run it again (EX_TEMPFAIL)
EXIT_REGROUP = 76  # a process of a run stopped only because others did, or because others come


class SamestepError(Exception):
    """A failure explained in one paragraph; `exit_code` is what a process of a run returns for it."""

    exit_code = EXIT_FAILED


class ConfigError(SamestepError):
    """The description of a run is wrong: unknown key, bad value, settings that contradict each other."""

    exit_code = EXIT_USAGE


class DataError(SamestepError):
    """Raw text, shards or a manifest are missing, corrupt or do not belong to this run."""


class CheckpointError(SamestepError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""


class StorageError(DataError, CheckpointError):
    """A file cannot be read or written: data and checkpoints lie on the same disks and in the same stores."""


class CorruptError(StorageError):
    """Bytes are not those that were written, and reading them again does not help."""


class ObjectNotFoundError(StorageError):
    """There is no such object, or no such bucket."""


class UnreachableError(StorageError):
    """A store does not answer, though it was asked again and again; it may later, so an elastic run starts again."""

    exit_code = EXIT_CRASHED


class LaunchError(SamestepError):
    """Processes cannot be started, or one of them failed."""


class RendezvousError(LaunchError):
    """The machines of a run have not met: there are too few, or the one that hosts the meeting is not there."""

    exit_code = EXIT_UNAVAILABLE


class HangError(LaunchError):
    """The processes of a run wait for each other and nothing moves; an elastic run starts again."""

    exit_code = EXIT_CRASHED


class MissingExtra(ConfigError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with: pip install 'samestep[{extra}]'"
        )

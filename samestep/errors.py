"""Errors that a user can act on, and the exit codes of the command line.

Each message names the problem, the offending value and the fix, in one paragraph. Programming
errors stay plain `assert`s and exceptions: they keep their stack trace.
"""

import errno

# Codes above 2 have the meaning of sysexits.h, except EXIT_REGROUP.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = (
    69  # too few machines at the rendezvous: run again when there are more (EX_UNAVAILABLE)
)
EXIT_CRASHED = 70  # a process of a run failed in a way that a restart may cure (EX_SOFTWARE)
EXIT_PREEMPTED = 75  # stopped on request, with a checkpoint: run again (EX_TEMPFAIL)
EXIT_REGROUP = 76  # a process of a run stopped only because others did, or because others join


class SamestepError(Exception):
    """A failure explained in one paragraph; a run's process returns its `exit_code`."""

    exit_code = EXIT_FAILED


class ConfigError(SamestepError):
    """A run's description is wrong: unknown key, bad value, settings that contradict each other."""

    exit_code = EXIT_USAGE


class DataError(SamestepError):
    """Raw text, shards or a manifest are missing, corrupt or do not belong to this run."""


class CheckpointError(SamestepError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""


class SupersededError(ConfigError):
    """Another training has taken over the folder in which this one writes its checkpoints."""


class StorageError(DataError, CheckpointError):
    """A file cannot be read or written: data and checkpoints share disks and object stores."""


class CorruptError(StorageError):
    """The content of a file has changed since it was written, and reading again does not help."""


class ObjectNotFoundError(StorageError):
    """There is no such object, or no such bucket."""


class UnreachableError(StorageError):
    """An object store does not answer after many attempts.

    It may answer later, so an elastic run starts again.
    """

    exit_code = EXIT_CRASHED


class LaunchError(SamestepError):
    """Processes cannot be started, or one of them failed."""


class RendezvousError(LaunchError):
    """The rendezvous of a run's machines failed: too few came, or its host is not there."""

    exit_code = EXIT_UNAVAILABLE


class ConnectError(LaunchError):
    """The processes of a run cannot connect to each other.

    They may have lost the network at this moment, so an elastic run starts again.
    """

    exit_code = EXIT_CRASHED


class HangError(LaunchError):
    """The processes of a run wait for each other, without progress; an elastic run restarts."""

    exit_code = EXIT_CRASHED


class MissingExtra(ConfigError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with: {install_command(extra)}"
        )


_FIXES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the quota of this user, or free some space",
    errno.EFBIG: "raise the limit of the size of a file (ulimit -f)",
    errno.EIO: "check the disk, or the network file system",
    errno.ESTALE: "check the network file system, where the file was replaced, and try again",
    errno.EMFILE: "raise the limit of open files of a process (ulimit -n)",
    errno.ENFILE: "close other programs, as the machine has too many open files",
    errno.ENOLCK: "use a file system with file locks",
    errno.EROFS: "use a file system that is not mounted read-only",
}


def fix_of(error: OSError, otherwise: str = "") -> str:
    """What a user can do about an error of the file system; `otherwise` if its number says little.

    All of these are failures of the machine, not of the program.
    """
    return _FIXES.get(error.errno or 0, otherwise)


def install_command(*extras: str) -> str:
    """Returns the pip command for the packages of extras, by name: samestep is on no index."""
    import shlex
    from importlib import metadata  # takes a while to import

    try:
        requirements = metadata.requires("samestep") or []
    except metadata.PackageNotFoundError:  # runs from its source folder
        return f"pip install '.[{','.join(extras)}]'"
    # A requirement of an extra reads, for example: wandb>=0.31; extra == "wandb".
    found = [each.partition(";")[::2] for each in requirements]
    markers = {f'extra == "{extra}"' for extra in extras}
    packages = [package for package, marker in found if marker.strip() in markers]
    return shlex.join(["pip", "install", *packages])

"""The environment of this process: a launcher's variables, the home folder, and the terminal."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path

from trainer.errors import ConfigError, LaunchError

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLAIN = {"█": "#", "→": "->", "…": "...", "↵": "|", "␣": "_", "▁": "_", "·": "-", "±": "+-"}


def number(name: str, default: int) -> int:
    """Reads a whole number from an environment variable; the default if it is unset or empty.

    Raises:
        LaunchError: the variable holds something else.
    """
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise LaunchError(
            f"{name} in the environment is {text!r}. Use a whole number, or unset it."
        )
    return int(text) if text else default


def omp_threads(default: int) -> int:
    """Reads OMP_NUM_THREADS; of a list for nested regions (4,2) the first counts, as for torch.

    Raises:
        LaunchError: it is no such number.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if text and (not text.isdecimal() or int(text) < 1):
        raise LaunchError(
            f"OMP_NUM_THREADS in the environment is {os.environ['OMP_NUM_THREADS']!r}. Use a "
            "number of threads, or unset it."
        )
    return int(text) if text else default


def launcher_rank() -> int | None:
    """The rank that a launcher (torchrun, or an agent) has given this process; None without one.

    Raises:
        LaunchError: some of a launcher's variables are missing, such as leftovers of another
            program, or they contradict each other.
    """
    world_size = number("WORLD_SIZE", 1)
    if not os.environ.get("RANK") and world_size == 1:
        return None
    if missing := [name for name in _LAUNCHER if not os.environ.get(name)]:
        found = [name for name in _LAUNCHER[:2] if os.environ.get(name)]
        raise LaunchError(
            f"the environment has {' and '.join(found)} of a launcher, but not "
            f"{', '.join(missing)}. Unset {' and '.join(found)}, or start all processes with a "
            "launcher that sets all of these."
        )
    rank, _ = number("RANK", 0), number("MASTER_PORT", 0)
    if rank >= world_size:
        raise LaunchError(
            f"RANK in the environment is {rank} and WORLD_SIZE is {world_size}. Use ranks from 0 "
            f"to {world_size - 1}, or unset both."
        )
    return rank


def expand_home(path: str, instead: str) -> Path:
    """Replaces a leading ~ by the home folder.

    Args:
        instead: the setting or variable to name where there is no home folder.

    Raises:
        ConfigError: there is no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} is in the home folder, and this user has none. Set {instead}, or HOME."
        ) from None


def write_any_text() -> None:
    """Lets stdout and stderr write text that their encoding lacks, as on a latin-1 terminal.

    Signs such as arrows become plain ones, and other characters \\u escapes.
    """
    codecs.register_error("samestep", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="samestep")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or _escaped(each) for each in characters), error.end


def _escaped(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()

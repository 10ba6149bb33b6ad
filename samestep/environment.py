"""The environment of this process: a launcher's variables, the home folder, and the terminal."""

from __future__ import annotations

import codecs
import io
import math
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from samestep.errors import ConfigError, LaunchError

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


def open_files(wanted: int) -> tuple[float, float] | None:
    """Raises the limit of open files of this process to a number, or as near as the system allows.

    Returns:
        The limit and the hard limit, infinite if there is none; None if the system names none.
    """
    try:
        import resource  # POSIX only
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = math.inf if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return math.inf, most
    reached = min(wanted, int(most)) if most < math.inf else wanted
    if soft < reached:
        with suppress(OSError, ValueError):  # macOS grants less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
            soft = reached
    return soft, most


# All of C0 but tabs and line breaks, C1, and what reverses the order of text. Ordinary text in
# Arabic or Hebrew needs none of the latter.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def visible(text: str) -> str:
    """Escapes the characters that a terminal obeys instead of showing them.

    A name in a stranger's data, model or bucket could otherwise move the cursor, hide or change
    what is printed, or set the clipboard. The escapes are JSON's, so that JSON stays the same.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Output:
    """A standard stream in which all text is `visible`.

    Args:
        pipes: whether text is escaped in files and pipes as well. Messages are, since they are read
            on some terminal later; texts that a command writes as data stay as they are.

    Attributes:
        rich_proxied_file: the stream itself. Rich looks for this name, to write its own colors and
            cursor moves; see `samestep.terminal`.
    """

    def __init__(self, stream: TextIO, pipes: bool = True) -> None:
        self.rich_proxied_file = stream
        self._escapes = pipes or stream.isatty()

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(visible(text) if self._escapes else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class _Lossy:
    """A stream that may fail: a run does not end with its terminal, or its messages' reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Messages(Output):
    """stderr, on which the progress bars of tqdm redraw their lines, and cover no other text.

    A bar begins with \\r, which starts a new line unless this line is empty or a bar. A bar below
    the first one is written as line breaks, the bar, and as many moves up.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_free = True  # the current line is empty, or a bar
        self._moves_up = ""  # from a bar back to a free line

    def write(self, text: str) -> int:
        is_bar = text.startswith("\r") and not text.startswith("\r\n")
        if text and text == self._moves_up:
            self.rich_proxied_file.write(text)
            self._moves_up = ""
            return len(text)
        if is_bar:
            start = "\r" if self._is_free else "\n"
            self.rich_proxied_file.write(start + visible(text[1:]))
        else:
            super().write(text)
            is_move = self._is_free and not text.strip("\n")
            self._moves_up = "\x1b[A" * len(text) if is_move else ""
        if text:
            self._is_free = (is_bar and "\n" not in text) or text.endswith("\n")
        return len(text)


def prepare_streams() -> None:
    """Lets commands write any text to stdout and stderr, whatever these are.

    Control characters are escaped, see `visible`, but not in a stdout that is no terminal. In an
    encoding without them, such as latin-1, signs such as arrows become plain ones, and other
    characters \\u escapes. A closed stream takes and drops everything.
    """
    codecs.register_error("samestep", _replace)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _closed(descriptor))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="samestep")
    if not isinstance(sys.stdout, Output):
        sys.stdout = cast(TextIO, Output(sys.stdout, pipes=False))
    if not isinstance(sys.stderr, Output):
        sys.stderr = cast(TextIO, _Messages(cast(TextIO, _Lossy(sys.stderr))))


def _closed(descriptor: int) -> TextIO:
    """Opens a standard stream that the parent process has closed, as `command >&-` does."""
    # Otherwise the next file would get its number, and what child processes print.
    with suppress(OSError):
        os.fstat(descriptor)  # a file has it already
        descriptor = -1
    opened = os.open(os.devnull, os.O_RDWR)
    if descriptor in (opened, -1):
        os.set_inheritable(opened, descriptor == opened)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)
        opened = descriptor
    return open(opened, "r+" if descriptor < 0 else "r" if descriptor == 0 else "w")


def flush_output() -> None:
    """Writes what is left of the output. It is no error if the reader, such as `head`, has ended.

    Raises:
        OSError: it cannot be written; it is then dropped.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again at exit, which must not fail.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or _escaped(each) for each in characters), error.end


def _escaped(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()

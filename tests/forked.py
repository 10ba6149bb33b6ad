"""Runs commands as processes that are forked from a server which has torch and our modules.

A new interpreter spends two seconds of its CPU on imports before a command does anything.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from samestep import cli
from tests.processes import CONTEXT


class ForkedProcess:
    """What `subprocess.Popen` is for a new interpreter; the leader of a session of its own.

    Args:
        command: `samestep`, or `python` with `-m samestep.cli` or `-c CODE`, and arguments.
        folder: where it is started.
        environment: all its variables.
        stdout: file for its output; nothing keeps it if None.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stderr: TextIO,
        stdout: TextIO | None = None,
    ) -> None:
        self.args = list(command)
        ready, started = CONTEXT.Pipe(duplex=False)
        with ready, open(os.devnull, "r+") as nothing:
            streams = [_Descriptor(file.fileno()) for file in (nothing, stdout or nothing, stderr)]
            self._process = CONTEXT.Process(
                target=_run, args=(self.args, dict(environment), str(folder), streams, started)
            )
            self._process.start()
            started.close()
            # From here on, the process has a group that signals can be sent to.
            ready.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; returns what it printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = ForkedProcess(command, environment, folder, stderr, stdout)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(process.args, code, stdout.read(), stderr.read())


class _Descriptor:
    """An open file that is passed to a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


def _run(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[_Descriptor],
    started: Connection,
) -> None:
    """Is the process, from its start to its end."""
    os.setsid()
    _set_up(environment, folder, streams)
    started.send(None)
    started.close()
    code = _exit_code(command, environment)
    # As at the end of an interpreter; the end of a `multiprocessing.Process` leaves these out.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _set_up(environment: dict[str, str], folder: str, streams: list[_Descriptor]) -> None:
    """Gives this process the signals, files, folder and variables of a new one."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    # Where a build has started the server, it has what is blocked while workers start.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for target, stream in enumerate(streams):
        os.dup2(stream.number, target)
        os.close(stream.number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _main(command: list[str], environment: dict[str, str]) -> object:
    """Calls what the command's interpreter would; returns what it would exit with."""
    program, *arguments = command
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # pip names the hook of an editable installation so.
    places = (sys.prefix, sys.base_prefix, "__editable__")
    installed = [path for path in sys.path if path.startswith(places)]
    if arguments[:1] == ["-c"]:
        sys.path[:] = ["", *paths, *installed]
        sys.argv = arguments[:1] + arguments[2:]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        return None
    if arguments[:2] == ["-m", "samestep.cli"]:
        sys.path[:] = [os.getcwd(), *paths, *installed]
        sys.argv = [cli.__file__, *arguments[2:]]
    else:
        assert Path(program).name == "samestep", command
        sys.path[:] = [str(Path(program).parent), *paths, *installed]
        sys.argv = command
    return cli.main()


def _exit_code(command: list[str], environment: dict[str, str]) -> int:
    try:
        result = _main(command, environment)
    except SystemExit as end:
        result = end.code
    except BaseException:
        traceback.print_exc()
        return 1
    if isinstance(result, str):
        print(result, file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0

"""Forked processes are like new interpreters, and each command still runs in one of these."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.integration.commands import SAMESTEP, UNFORKED

ROOT = Path(__file__).parents[3]
DESCRIBE = """
import atexit, json, os, signal, sys, tempfile, threading, time
import torch
handled = {number.name: str(signal.getsignal(number)) for number in signal.Signals}
handled = {name: text.partition(" at ")[0] for name, text in handled.items()}
described = {
    "environment": dict(os.environ), "folder": os.getcwd(), "arguments": sys.argv, "path": sys.path,
    "signals": handled, "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "input": sys.stdin.read(), "is a leader": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": torch.get_num_threads(), "running": threading.active_count(),
    "temporary": tempfile.gettempdir(), "main": __name__,
}
print(json.dumps(described))
print("to stderr", file=sys.stderr)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
sys.exit(7)
"""


@pytest.mark.parametrize("end", ["sys.exit('a reason')", "1 / 0", "os._exit(3)", "os.abort()", ""])
def test_it_ends_as_an_interpreter_does(tmp_path: Path, end: str) -> None:
    code = f"import os, sys\nprint('begun', flush=True)\n{end}"
    command = [sys.executable, "-c", code]
    real = subprocess.run(command, capture_output=True, text=True)
    fork = forked.run(command, os.environ, tmp_path)
    assert (fork.returncode, fork.stdout) == (real.returncode, real.stdout)
    last = [text.splitlines()[-1:] for text in (fork.stderr, real.stderr)]
    assert last[0] == last[1] or "abort" in end


def test_it_is_like_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "temporary"),
        "LC_CTYPE": "C.UTF-8",
    }
    command = [sys.executable, "-c", DESCRIBE, "an argument"]
    real = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    fork = forked.run(command, environment, tmp_path)
    assert fork.returncode == real.returncode == 7, fork.stderr
    (described, *rest), (expected, *expected_rest) = (
        done.stdout.splitlines() for done in (fork, real)
    )
    assert rest == expected_rest == ["of a thread", "at exit"]
    assert fork.stderr == real.stderr == "to stderr\n"
    assert json.loads(described) == json.loads(expected)


def test_signals_reach_it_and_its_group(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork(): print(flush=True)\ntime.sleep(100)"
    with (tmp_path / "out").open("w") as out:
        process = forked.ForkedProcess([sys.executable, "-c", code], os.environ, tmp_path, out, out)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(20) == process.poll() == -signal.SIGTERM
    process.kill()  # nobody


@pytest.mark.parametrize(("command", "test"), UNFORKED.items())
def test_each_command_runs_in_an_interpreter_of_its_own(command: str, test: str) -> None:
    """In `make test`, in a test of that name, which starts it."""
    file, _, name = test.partition("::")
    (function,) = (
        each
        for each in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef) and each.name == name
    )
    marks = " ".join(map(ast.unparse, function.decorator_list))
    assert not any(mark in marks for mark in ("long", "exhaustive", "chaos", "skip"))
    started = [
        call.args[0].value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "start"
        and isinstance(call.args[0], ast.Constant)
    ]
    assert command in started


def test_a_command_that_is_forked_says_the_same(tmp_path: Path) -> None:
    arguments = [*SAMESTEP, "train", "nowhere.yaml"]
    real = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    fork = forked.run(arguments, os.environ, tmp_path)
    assert (fork.returncode, fork.stdout) == (real.returncode, real.stdout)
    messages = [done.stderr.partition(" ")[2] for done in (fork, real)]  # without the time
    assert messages[0] == messages[1]
    assert "nowhere.yaml" in messages[0]

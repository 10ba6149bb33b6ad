"""Calls of a cluster's client; a failure becomes one line with a hint."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.errors import LaunchError

_SECONDS = 120.0  # time-out of a client: controllers under load take long to answer


def require(client: str, hint: str) -> None:
    """Checks that a client is installed.

    Raises:
        LaunchError: it is not on the PATH.
    """
    if shutil.which(client) is None:
        raise LaunchError(f"{client} is not on this machine; {hint}")


def run(
    command: Sequence[str],
    hints: Mapping[str, str],
    folder: Path | None = None,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    with_stderr: bool = False,
) -> str:
    """Runs a client and returns its standard output.

    Args:
        hints: fixes, by patterns in the client's error message.
        folder: working directory.
        text: standard input. Empty by default: nobody is there to be asked for a password.
        environment: None takes this process's environment.
        with_stderr: returns its standard error, too.

    Raises:
        LaunchError: with the client's own words, and the hint for them.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            input=text,
            env=environment,
            timeout=_SECONDS,
            # Ctrl-C is for this process, which knows what was asked for, and not for the client.
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} has not answered within {_SECONDS:.0f} s. Check that the cluster is up "
            "and that this machine reaches it."
        ) from error
    if done.returncode == 0:
        return done.stdout + done.stderr * with_stderr
    said = done.stderr.strip() or done.stdout.strip() or f"it exited with {done.returncode}"
    lines = [
        re.sub(r"^(\w+: )?(error|fatal): ", "", line.strip(), flags=re.IGNORECASE)
        for line in said.splitlines()
    ]
    raise LaunchError(f"{command[0]}: {with_hint('. '.join(lines), hints)}")


def with_hint(said: str, hints: Mapping[str, str]) -> str:
    """Appends the hint of the first pattern that matches a client's message."""
    for pattern, hint in hints.items():
        if re.search(pattern, said, re.IGNORECASE):
            return f"{said}; {hint}"
    return said

"""Running a cluster's own client, and saying in one line what it has against something."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer.errors import ConfigError, LaunchError

_SECONDS = 120.0  # that a client gets: controllers under load take long to answer


def require(client: str, hint: str) -> None:
    """Looks for a client.

    Raises:
        LaunchError: it is not here.
    """
    if shutil.which(client) is None:
        raise LaunchError(f"{client} is not on this machine; {hint}")


def check_options(options: Iterable[str], client: str) -> None:
    """Refuses what is no long option that a client could be given.

    Raises:
        ConfigError: naming it.
    """
    for option in options:
        if not option.startswith("--") or not option.isprintable():
            raise ConfigError(
                f"options: {option!r} is no option of {client}; write each one as --name=value"
            )


def run(
    command: Sequence[str],
    hints: Mapping[str, str],
    folder: Path | None = None,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a client prints.

    Args:
        command: the client and its arguments.
        hints: what to do, by patterns of what the client says when it fails.
        folder: where it is run.
        text: what it reads.
        environment: its variables; None takes those of this process.

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
            input=text or "",  # nobody is there to be asked for a password
            env=environment,
            timeout=_SECONDS,
            start_new_session=True,  # Ctrl-C is for this process to hear, which knows what was asked for
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} has not answered for {_SECONDS:.0f} s; look whether the cluster is up, and whether this "
            "machine reaches it"
        ) from error
    if done.returncode == 0:
        return done.stdout
    lines = (
        done.stderr.strip() or done.stdout.strip() or f"it exited with {done.returncode}"
    ).splitlines()
    said = ". ".join(
        re.sub(r"^(\w+: )?(error|fatal): ", "", line.strip(), flags=re.IGNORECASE) for line in lines
    )
    raise LaunchError(f"{command[0]}: {with_hint(said, hints)}")


def with_hint(said: str, hints: Mapping[str, str]) -> str:
    """What a client has said, and what to do then, by the first pattern that is in it."""
    hint = next(
        (hint for pattern, hint in hints.items() if re.search(pattern, said, re.IGNORECASE)), ""
    )
    return f"{said}; {hint}" if hint else said

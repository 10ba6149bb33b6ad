"""How a job finds `samestep` where it runs: shell lines that are safe whatever the names in them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Environment:
    """What is set up before the command.

    Attributes:
        modules: to be loaded (`module load`), in order.
        conda: a conda environment, by name or folder.
        venv: folder of a virtual environment. Without conda, venv and container it is that of the `samestep` that
            submits.
        setup: further lines of shell.
        variables: environment variables. Not for secrets, which would lie in the script for all to read.
    """

    modules: tuple[str, ...] = ()
    conda: str | None = None
    venv: str | None = None
    setup: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.conda and self.venv:
            raise ConfigError("conda and venv are two environments; leave one of them out")
        check_variables(self.variables)

    def lines(self, own: bool = True) -> list[str]:
        """Lines of shell.

        Args:
            own: whether the environment of this process is taken where none is named.
        """
        lines = [f"module load {shlex.quote(module)}" for module in self.modules]
        if self.conda:
            lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(self.conda)}"]
        elif self.venv:
            lines.append(f"source {shlex.quote(str(Path(self.venv).absolute() / 'bin' / 'activate'))}")
        elif own:
            lines.append(f'export PATH={shlex.quote(str(Path(sys.prefix, "bin")))}:"$PATH"')
        lines += self.setup
        return [*lines, *exports(self.variables)]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of shell that set environment variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def check_variables(variables: Mapping[str, str]) -> None:
    """Refuses names that are none, and those of secrets.

    Raises:
        ConfigError: naming the variable.
    """
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"variables.{name} is no name of an environment variable")
        if _SECRET.search(name):
            raise ConfigError(
                f"variables.{name} looks like a secret, and what is written here ends up in files that others can "
                "read; set it in the environment that you submit from, or name it under secrets where the kind of "
                "cluster has that"
            )

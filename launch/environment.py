"""The environment of a job: an image, and shell lines that make `samestep` available."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.credentials import has_key, is_secret, secret_in
from samestep.addresses import credential_in
from samestep.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEPT = (
    "and what is written here is kept in files that others can read. Set it in the environment "
    "that you submit from, or name it under secrets if this kind of cluster has that."
)
_FIND_MODULE = (
    'for init in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/*modules.sh '
    "/etc/profile.d/*lmod.sh; do",
    '  type module > /dev/null 2>&1 || [ ! -r "$init" ] || source "$init"',
    "done",
)
# The trap ignores failures within sourced scripts: a vendor's script may have commands that fail
# and do not matter.
_ON_FAILURE = (
    "trap 'code=$?; [ ${#BASH_SOURCE[@]} -gt 1 ] || "
    '{ echo "the environment cannot be set up: $BASH_COMMAND: exit code $code; add || true where '
    "that may be\" >&2; exit 1; }' ERR"
)


@dataclass(frozen=True)
class Environment:
    """The set-up before the command.

    Attributes:
        modules: modules to load (`module load`), in order.
        conda: a conda environment, by name or folder.
        venv: folder of a virtual environment. Without conda, venv and container the job uses the
            environment of the `samestep` that submits it.
        setup: further lines of shell. A command that fails ends the job.
        variables: environment variables. Not for secrets, as others can read the script.
    """

    modules: tuple[str, ...] = ()
    conda: str | None = None
    venv: str | None = None
    setup: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.conda and self.venv:
            raise ConfigError(
                f"conda {self.conda} and venv {self.venv} are two environments. Remove one of them."
            )
        check_variables(self.variables)
        check_setup(self.setup)

    def lines(self, own: bool = True) -> list[str]:
        """Lines of shell, which end the shell if one of them fails.

        Args:
            own: use this process's environment if no other is named.
        """
        lines = [f"module load {shlex.quote(module)}" for module in self.modules]
        if self.conda:
            lines += [
                'eval "$(conda shell.bash hook)"',
                f"conda activate {shlex.quote(self.conda)}",
            ]
        elif self.venv:
            activate = Path(self.venv).absolute() / "bin" / "activate"
            lines.append(f"source {shlex.quote(str(activate))}")
        elif own:
            lines.append(f'export PATH={shlex.quote(str(Path(sys.prefix, "bin")))}:"$PATH"')
        lines += self.setup
        if self.modules or self.conda or self.venv or self.setup:
            lines = [*(_FIND_MODULE if self.modules else ()), _ON_FAILURE, *lines, "trap - ERR"]
        return [*lines, *exports(self.variables)]


@dataclass(frozen=True)
class Container:
    """An image that the command runs in.

    Attributes:
        kind: pyxis (srun's --container-image, with enroot) or apptainer.
        image: a file, or a name that the kind can find.
        mounts: further folders to mount at the same path inside, or FROM:TO. The folders of the run
            and of the launch are mounted already; Apptainer mounts your home, too.
    """

    image: str
    kind: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()

    def words(self, directory: Path, output: Path, gpus: bool) -> list[str]:
        """The words between srun's options and the command.

        Args:
            directory: where relative paths start.
            output: folder of the run.
            gpus: whether the command sees them.
        """
        mounts = self._all_mounts(directory, output)
        if self.kind == "apptainer":
            place = ["--pwd", str(directory), "--bind", ",".join(mounts)]
            return ["apptainer", "exec", *["--nv"] * gpus, *place, self.image]
        # Enroot takes anything but a path for an image of a registry.
        image = str(directory / self.image) if self.image.endswith(".sqsh") else self.image
        options = [f"--container-image={image}", f"--container-workdir={directory}"]
        # pyxis sets ranks in images with PyTorch, which the agent would take for a launcher's.
        without_ranks = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "-u", "LOCAL_RANK"]
        return [*options, f"--container-mounts={','.join(mounts)}", *without_ranks]

    def sees(self, path: str, directory: Path, output: Path) -> bool:
        """Whether a path, absolute or relative to `directory`, is in one of the mounts."""
        place = posixpath.normpath(posixpath.join(str(directory), path))
        inside = [mount.rpartition(":")[2] for mount in self._all_mounts(directory, output)]
        if self.kind == "apptainer":
            inside.append(os.path.expanduser("~"))
        return any(f"{place}/".startswith(f"{folder.rstrip('/')}/") for folder in inside)

    def _all_mounts(self, directory: Path, output: Path) -> list[str]:
        folders = dict.fromkeys((str(directory), str(output)))
        mounts = [*(f"{folder}:{folder}" for folder in folders), *self.mounts]
        for mount in mounts:
            if "," in mount or mount.count(":") > 1:
                raise ConfigError(
                    f"container.mounts: {mount!r} holds a comma or colon, which separate mounts. "
                    "Use another folder."
                )
        return mounts


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of shell that set environment variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def check_variables(variables: Mapping[str, str]) -> None:
    """Rejects invalid names of environment variables, and secrets.

    Raises:
        ConfigError: naming the variable.
    """
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"variables.{name} is not the name of an environment variable. Use letters, "
                "digits, _."
            )
        if credential := credential_in(value):
            raise ConfigError(f"variables.{name} has {credential} in a URL, {_KEPT}")
        if is_secret(name, value) or has_key(value):
            raise ConfigError(f"variables.{name} looks like a secret, {_KEPT}")


def check_secrets(secrets: Mapping[str, str], reference: re.Pattern[str], form: str) -> None:
    """Rejects anything but references to a cluster's secrets.

    Args:
        secrets: references by environment variable.
        form: of a valid reference, for the message.

    Raises:
        ConfigError: naming the variable, but not its value, which may be a secret.
    """
    for name, value in secrets.items():
        if not _VARIABLE.fullmatch(name) or not reference.fullmatch(value):
            raise ConfigError(
                f"secrets.{name} must give an environment variable {form}. Do not write the secret "
                "itself."
            )


def check_setup(lines: Iterable[str]) -> None:
    """Rejects lines of shell with secrets; they may name variables and files that hold some.

    Raises:
        ConfigError: naming where the secret is.
    """
    for line in lines:
        if holder := secret_in(line):
            raise ConfigError(f"setup: {holder} looks like a secret, {_KEPT}")

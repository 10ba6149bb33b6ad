"""The script that every machine of a TPU slice runs when it boots."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.environment import exports
from launch.tpu.slice import WORK
from samestep.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE

PORT = 29400  # of the rendezvous, as in docs/tpu.md
# Of a run that was stopped for an unknown reason, or has waited in vain for others, per boot.
_RESTARTS = 5

# The wheel of uv: its content is known, unlike an installation script of a web site. uv itself
# knows the SHA-256 of the Python that it installs.
_UV = "0.13.9"
_UV_WHEEL = (
    "https://files.pythonhosted.org/packages/3d/aa/"
    "26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/"
    f"uv-{_UV}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
)
_UV_SHA256 = "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"


@dataclass(frozen=True)
class Startup:
    """The parts of the script that differ between runs.

    Attributes:
        name: of the slice.
        staging: folder in a bucket with the job's files.
        stop_seconds: time that the run gets for its last checkpoint.
        kept: folder in a bucket with a copy of the run's folder, from which the run continues on
            other machines.
        output: the run's folder, as the experiment names it.
        project: project of the secrets.
        user: who runs the experiment; root does all else.
        code: whether staging has a snapshot of the code.
        package: a requirement of pip, or the URL of a wheel in a bucket; None installs the
            snapshot.
        extras: of the package.
        mounts: buckets and folders in them (gs://...), by the folder where they are mounted.
        secrets: names in Secret Manager, by environment variable.
        variables: environment variables.
        setup: further lines of shell.
    """

    name: str
    staging: str
    stop_seconds: float
    kept: str
    output: str
    project: str
    user: str
    code: bool
    package: str | None
    extras: tuple[str, ...]
    mounts: Mapping[str, str]
    secrets: Mapping[str, str]
    variables: Mapping[str, str]
    setup: tuple[str, ...]

    def render(self) -> str:
        """The script."""
        values = {
            "name": self.name,
            "staging": self.staging,
            "kept": self.kept,
            "output": self.output,
            "project": self.project,
            "user": self.user,
            "work": f"{WORK}/{self.name}",
            "stop_seconds": str(math.ceil(self.stop_seconds)),
        }
        lines = [
            "#!/bin/bash",
            f"# Written by samestep launch: the run {self.name} on Cloud TPU. Each machine of the",
            "# slice runs this as root whenever it boots: when it is new, and after maintenance.",
            "# Secrets must not be printed, so there is no `set -x` in here.",
            "set -u -o pipefail",
            "umask 022",
            "",
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            f"port={PORT} restarts={_RESTARTS} stopped={EXIT_PREEMPTED} alone={EXIT_UNAVAILABLE}",
            'home="$work/home"  # of the user: the code, its environment, caches',
            f'place="$home{"/code" if self.code else ""}"  # where relative paths start',
            self._become(),
        ]
        functions = {
            "get_code  # Fetches what is installed, as root.": self._code(),
            "install  # Installs the package in its own environment, as the user.": self._install(),
            "mounts  # Mounts buckets as folders.": self._mounts(),
            "setup  # Runs the commands of cluster.setup.": self._setup(),
            "environment  # Sets the variables that only the run sees.": self._environment(),
        }
        for title, commands in functions.items():
            name, _, about = title.partition("  ")
            body = [f"  {command}" for command in commands or [":"]]
            lines += ["", f"{name}() {{  {about}", *body, "}"]
        return "\n".join([*lines, "", _same_lines()])

    def _become(self) -> str:
        home = 'env HOME="$home"'
        if self.user == "root":
            return f"become=({home})"
        # Not su or runuser: they stay between the signals and the run, and kill it two seconds
        # after the first signal.
        identity = 'setpriv --reuid="$user" --regid="$user" --init-groups'
        return f'become=({identity} {home} USER="$user" LOGNAME="$user")'

    def _code(self) -> list[str]:
        lines = [
            "local found",
            'found=$(again listed "$staging/versions") || return',
            'if [ -n "$found" ]; then',
            '  fetch "$staging/versions" "$home/versions" || return',
            "fi",
        ]
        if self.code:
            lines += [
                'fetch "$staging/code.tar.gz" "$work/code.tar.gz" &&',
                '  mkdir -p "$home/code" &&',
                '  tar -xzf "$work/code.tar.gz" --no-same-owner -C "$home/code" || return',
            ]
        if self.package is not None and self._is_wheel:
            lines.append(f'fetch {shlex.quote(self.package)} "$home"/ || return')
        return lines

    @property
    def _is_wheel(self) -> bool:
        return self.package is not None and self.package.startswith("gs://")

    def _install(self) -> list[str]:
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        if self.package is None:
            requirement = f'"$home/code"{shlex.quote(extras)}'
        elif self._is_wheel:
            requirement = f'"$home"/{shlex.quote(self.package.rpartition("/")[2] + extras)}'
        else:
            requirement = shlex.quote(self.package)
        return [
            "# The images have Python 3.10, and samestep needs 3.11, which uv installs.",
            f'local wheel="$work/uv.whl" uv="$work/uv/uv-{_UV}.data/scripts/uv"',
            'rm -rf "$work/uv" "$home/env"',
            f'curl -LsSf --max-time 300 -o "$wheel" {_UV_WHEEL} || return',
            f'if ! sha256sum --check --status <<<"{_UV_SHA256}  $wheel"; then',
            '  say "$wheel has another SHA-256 than the uv that was tested, and is not used"',
            "  return 1",
            "fi",
            'python3 -m zipfile -e "$wheel" "$work/uv" && chmod +x "$uv" || return',
            'limited 600 "${become[@]}" "$uv" venv --python 3.11 --seed "$home/env" || return',
            "# Later machines install the versions of the first ones, whatever is newer by then.",
            "local same=()",
            'if [ -e "$home/versions" ]; then same=(--constraint "$home/versions"); fi',
            'limited 3600 "${become[@]}" "$home/env/bin/pip" install --quiet \\',
            f'  {requirement} "${{same[@]}}"',
        ]

    def _mounts(self) -> list[str]:
        lines = []
        for where, address in self.mounts.items():
            bucket, _, folder = address.removeprefix("gs://").partition("/")
            lines.append(f"mount_bucket {shlex.join([bucket, folder.strip('/'), where])} || return")
        return lines

    def _setup(self) -> list[str]:
        return [f"bash -e -c {shlex.quote(chr(10).join(self.setup))}"] if self.setup else []

    def _environment(self) -> list[str]:
        lines = [
            'export SAMESTEP_JOB="$name" SAMESTEP_NODES',
            'SAMESTEP_NODES=$(IFS=,; printf %s "${hosts[*]}")',
        ]
        if self.code and self.package is not None:
            lines.append('export PYTHONPATH="$home/code"')
        lines += exports(self.variables)
        for variable, secret in self.secrets.items():
            lines += [f"{variable}=$(secret {shlex.quote(secret)}) || return", f"export {variable}"]
        return lines


def _same_lines() -> str:
    """The lines of `startup.sh`, which are the same for all runs."""
    script = Path(__file__).with_name("startup.sh").read_text(encoding="utf-8")
    return script.partition("\n\n")[2]

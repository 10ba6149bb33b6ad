"""The script that every machine of a TPU slice runs when it boots, and the file that it passes on.

The script installs the package as root. All that follows is the work of `launch.tpu.machine`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2

from launch.job import CONFIG
from launch.tpu.machine import Settings
from launch.tpu.slice import WORK

# The wheel of uv: pip refuses it with another content. uv itself knows the SHA-256 of the Python
# that it installs.
UV = (
    "uv @ https://files.pythonhosted.org/packages/3d/aa/"
    "26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/"
    "uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    "#sha256=d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"
)
SETTINGS = "machine.json"
METADATA = (
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes"
)


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
        user: who runs the experiment and `launch.tpu.machine`; root does all before.
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
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["quote"] = shlex.quote
        return environment.get_template("startup.sh.jinja").render(
            name=self.name,
            user=self.user,
            staging=self.staging,
            work=self._work,
            stop_seconds=math.ceil(self.stop_seconds) + 60,
            code=self.code,
            wheel=self.package if self._is_wheel else None,
            uv=UV,
            requirement=self._requirement,
            mounts=[_mount(where, address) for where, address in self.mounts.items()],
            setup="\n".join(self.setup),
            metadata=METADATA,
            settings=SETTINGS,
            config=CONFIG,
            project=self.project,
            secrets=list(self.secrets.items()),
        )

    def settings(self) -> str:
        """The file of the run for `launch.tpu.machine`."""
        # A snapshot of code precedes the package.
        path = {"PYTHONPATH": f"{self._home}/code"} if self.code and self.package else {}
        variables = {**path, **self.variables}
        settings = Settings(self.name, self._work, self.staging, self.kept, self.output, variables)
        return json.dumps(asdict(settings), indent=2) + "\n"

    @property
    def _work(self) -> str:
        return f"{WORK}/{self.name}"

    @property
    def _home(self) -> str:
        return f"{self._work}/home"

    @property
    def _is_wheel(self) -> bool:
        return self.package is not None and self.package.startswith("gs://")

    @property
    def _requirement(self) -> str:
        """What pip installs, as a word of shell."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        if self.package is None:
            return f'"$home"/{shlex.quote(f"code{extras}")}'
        if self._is_wheel:
            return f'"$work"/{shlex.quote(self.package.rpartition("/")[2] + extras)}'
        return shlex.quote(self.package)


def _mount(where: str, address: str) -> tuple[str, str, str]:
    bucket, _, folder = address.removeprefix("gs://").partition("/")
    return bucket, folder.strip("/"), where

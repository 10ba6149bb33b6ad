"""Containers on Slurm: the words that put a command into an image, and what it sees there."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.job import JobSpec
from trainer.errors import ConfigError


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

    def words(self, job: JobSpec, gpus: bool) -> list[str]:
        """The words between srun's options and the command."""
        mounts = self._all_mounts(job)
        if self.kind == "apptainer":
            place = ["--pwd", str(job.directory), "--bind", ",".join(mounts)]
            return ["apptainer", "exec", *["--nv"] * gpus, *place, self.image]
        # Enroot takes anything but a path for an image of a registry.
        image = str(job.directory / self.image) if self.image.endswith(".sqsh") else self.image
        options = [f"--container-image={image}", f"--container-workdir={job.directory}"]
        # pyxis sets ranks in images with PyTorch, which the agent would take for a launcher's.
        without_ranks = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "-u", "LOCAL_RANK"]
        return [*options, f"--container-mounts={','.join(mounts)}", *without_ranks]

    def sees(self, path: str, job: JobSpec) -> bool:
        """Whether a path, relative to the job's folder or absolute, is in one of the mounts."""
        place = posixpath.normpath(posixpath.join(str(job.directory), path))
        inside = [mount.rpartition(":")[2] for mount in self._all_mounts(job)]
        if self.kind == "apptainer":
            inside.append(str(Path.home()))
        return any(f"{place}/".startswith(f"{folder.rstrip('/')}/") for folder in inside)

    def _all_mounts(self, job: JobSpec) -> list[str]:
        folders = dict.fromkeys((str(job.directory), str(job.folder.parents[1])))
        mounts = [*(f"{folder}:{folder}" for folder in folders), *self.mounts]
        for mount in mounts:
            if "," in mount or mount.count(":") > 1:
                raise ConfigError(
                    f"container.mounts: {mount!r} holds a comma or colon, which separate mounts. "
                    "Use another folder."
                )
        return mounts

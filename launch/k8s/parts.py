"""Parts of a Kubernetes cluster's settings: a slice of TPUs, volumes, and their patterns."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from launch.k8s.manifest import Object
from launch.settings import check_patterns, chips_of
from samestep.errors import ConfigError

MOUNT = "/etc/samestep"  # folder of the configuration in pods
BUCKETS = "gcsfuse.csi.storage.gke.io"  # driver of volumes that are buckets

KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[a-z0-9]([-_.a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTP]|[KMGTP]i)?")

_FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FACTORS |= {f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTP")}


def amount(quantity: str | int) -> float:
    """The number that a quantity of Kubernetes stands for, as 2048 for 2Ki."""
    match = QUANTITY.fullmatch(str(quantity))
    assert match is not None, "checked by check_patterns"
    return float(match[1]) * _FACTORS[match[2] or ""]


@dataclass(frozen=True)
class Tpu:
    """A TPU slice of Google Kubernetes Engine, used as a whole; a pod drives one of its machines.

    Attributes:
        accelerator: GKE's name of the chips, as tpu-v5-lite-podslice, tpu-v5p-slice or
            tpu-v6e-slice.
        topology: arrangement of the slice's chips, as 4x4 or 2x2x4.
        chips_per_node: number of chips in one machine.
    """

    accelerator: str
    topology: str
    chips_per_node: int = 4

    def __post_init__(self) -> None:
        check_patterns(self, {"accelerator": VALUE}, "GKE")
        if not self.chips:
            raise ConfigError(f"topology must be written as 4x4 or 2x2x4, not {self.topology}")
        if self.chips_per_node < 1 or self.chips % self.chips_per_node:
            raise ConfigError(
                f"topology {self.topology} has {self.chips} chips, which cannot be divided into "
                f"machines with {self.chips_per_node} each. Set chips_per_node to the number of "
                "chips in one machine of the slice."
            )

    @property
    def chips(self) -> int:
        """Number of chips in the slice."""
        return chips_of(self.topology)


@dataclass(frozen=True)
class Volume:
    """Files that outlive pods; one of `claim` and `bucket`.

    Attributes:
        mount: folder of the pods where they appear.
        claim: a PersistentVolumeClaim of the namespace; with several pods, one that many nodes may
            write to.
        bucket: a bucket of Google Cloud Storage, through GKE's Cloud Storage FUSE. For reading
            only: the run's output needs files that can be appended to and renamed.
    """

    mount: str
    claim: str | None = None
    bucket: str | None = None

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.bucket is None):
            raise ConfigError(
                f"the volume at {self.mount} needs one of claim and bucket. Set exactly one."
            )
        mount = self.mount
        if not mount.startswith("/") or ":" in mount or posixpath.normpath(mount) != mount:
            raise ConfigError(
                f"mount must be a folder such as /data, without a colon, not {mount!r}"
            )
        if mount in ("/", MOUNT, "/dev/shm"):
            raise ConfigError(
                f"mount {mount} would hide what a pod needs there. Choose another folder."
            )
        name = self.claim or self.bucket or ""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not the name of a claim or bucket. Leave out gs:// and folders."
            )

    def source(self, user: int) -> Object:
        """The volume in a manifest; files of a bucket have no owner, so they get this user."""
        if self.claim is not None:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        attributes = {
            "bucketName": self.bucket,
            "mountOptions": f"implicit-dirs,uid={user},gid={user}",
        }
        return {"csi": {"driver": BUCKETS, "volumeAttributes": attributes}}

"""Where the pods of a manifest find a path: the volume that is mounted there."""

from __future__ import annotations

import posixpath

from launch.job import Place
from launch.k8s.manifest import CONTAINER, Object, pod_of
from launch.k8s.parts import BUCKETS

# Kinds of volumes that end with the pod, or cannot be written.
_EPHEMERAL = {"emptyDir", "ephemeral", "configMap", "secret", "projected", "downwardAPI"}


def place_of(path: str, text: str) -> Place | None:
    """The innermost volume that holds a path in the pods of a manifest.

    Relative paths start in the container's working directory; without one they have no place, as
    only the image knows it.
    """
    pod = pod_of(text)["spec"]
    container = next(each for each in pod["containers"] if each["name"] == CONTAINER)
    place = posixpath.normpath(posixpath.join(container.get("workingDir", ""), path))
    around = [
        mount
        for mount in container.get("volumeMounts", ())
        if f"{place}/".startswith(f"{str(mount.get('mountPath')).rstrip('/')}/")
    ]
    if not around:
        return None
    # Of nested volumes, the innermost one holds the folder.
    mount = max(around, key=lambda mount: len(mount["mountPath"]))
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    return _described(volumes.get(mount["name"], {}), read_only=mount.get("readOnly", False))


def _described(volume: Object, read_only: bool) -> Place:
    kind = next((key for key in volume if key != "name"), "volume")
    keeps = kind not in _EPHEMERAL and not read_only
    if kind == "persistentVolumeClaim":
        return Place(f"claim {volume[kind].get('claimName')}", keeps)
    if kind == "csi" and volume[kind].get("driver") == BUCKETS:
        # The output is appended to and renamed, which a bucket as a folder cannot do.
        attributes = volume[kind].get("volumeAttributes") or {}
        return Place(f"bucket {attributes.get('bucketName')}", keeps=False)
    return Place(f"volume {volume.get('name', '')} ({kind})", keeps)

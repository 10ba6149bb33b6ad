"""Kubernetes: a JobSet or an Indexed Job, each of whose pods runs one `samestep train --elastic`; and TPUs of GKE."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from launch import command_line, objects
from launch.environment import VARIABLE, check_variables
from launch.job import CONFIG, Cluster, JobSpec, Record, State, Submission
from launch.nodes import device_counts, node_range
from launch.objects import ACTION_LABEL, CONTAINER, GROUP, JOB_LABEL, Object, new
from trainer.config import Tree
from trainer.errors import ConfigError, LaunchError

MANIFEST = "manifest.yaml"

_PORT = 29400  # where the pods meet
_MOUNT = "/etc/samestep"
_USER = 10001  # that of the images of docker/

_SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._A-Za-z0-9]+")
_KEY = re.compile(
    r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([-_.a-z0-9]*[a-z0-9])?")
_WORDS = {
    **dict.fromkeys(("image", "context", "interface"), re.compile(r"[^\s-]\S*")),
    **dict.fromkeys(("namespace", "service_account", "queue", "priority_class"), _NAME),
    **dict.fromkeys(("memory", "shm"), re.compile(r"\d+(\.\d+)?([kMGTP]|[KMGTP]i)?")),
    "gpu_resource": _KEY,
}


@dataclass(frozen=True)
class Tpu:
    """A slice of TPUs of Google Kubernetes Engine, all of whose machines are taken; a pod drives those of a machine.

    Attributes:
        accelerator: what GKE calls the chips, as tpu-v5-lite-podslice, tpu-v5p-slice or tpu-v6e-slice.
        topology: how the slice's chips are laid out, as 4x4 or 2x2x4.
        chips_per_node: chips of one machine.
    """

    accelerator: str
    topology: str
    chips_per_node: int = 4

    def __post_init__(self) -> None:
        if not _VALUE.fullmatch(self.accelerator):
            raise ConfigError(
                f"accelerator {self.accelerator!r} is nothing that GKE would have a name for"
            )
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", self.topology):
            raise ConfigError(f"topology must be written as 4x4 or 2x2x4, not {self.topology}")
        if self.chips_per_node < 1 or self.chips % self.chips_per_node:
            raise ConfigError(
                f"topology {self.topology} has {self.chips} chips, which are not a number of machines with "
                f"{self.chips_per_node} each; set chips_per_node to what one machine of the slice has"
            )

    @property
    def chips(self) -> int:
        """Of the slice."""
        return math.prod(map(int, self.topology.split("x")))


@dataclass(frozen=True)
class Volume:
    """Files that outlive pods; one of `claim` and `bucket`.

    Attributes:
        mount: where pods see it.
        claim: a PersistentVolumeClaim of the namespace; with several pods, one that many nodes may write to.
        bucket: a bucket of Google Cloud Storage, by way of GKE's Cloud Storage FUSE. For reading; the run's output
            needs files that can be appended to and renamed.
    """

    mount: str
    claim: str | None = None
    bucket: str | None = None

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.bucket is None):
            raise ConfigError(f"the volume at {self.mount} needs either claim or bucket")
        if (
            not self.mount.startswith("/")
            or ":" in self.mount
            or posixpath.normpath(self.mount) != self.mount
        ):
            raise ConfigError(
                f"mount must be a folder such as /data, without a colon, not {self.mount!r}"
            )
        if self.mount in ("/", _MOUNT, "/dev/shm"):
            raise ConfigError(
                f"mount {self.mount} would hide what a pod needs there; choose another folder"
            )
        if not _NAME.fullmatch(name := self.claim or self.bucket or ""):
            raise ConfigError(
                f"{name!r} is no name of a claim or bucket; leave out gs:// and folders"
            )

    def source(self, user: int) -> Object:
        """As manifests have it; a bucket's files have no owner of their own."""
        if self.claim is not None:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        attributes = {
            "bucketName": self.bucket,
            "mountOptions": f"implicit-dirs,uid={user},gid={user}",
        }
        return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


@dataclass(frozen=True)
class Config(Cluster):
    """A namespace of a Kubernetes cluster.

    Attributes:
        image: that samestep is installed in; the code reaches the nodes in no other way.
        image_pull_policy: when nodes fetch it; None is Kubernetes' own: always for the tag latest, else once.
        namespace: where the job is made.
        context: of the kubectl configuration; None takes the current one.
        controller: jobset needs JobSet installed on the cluster. job is a plain Job, which any cluster has; it is not
            started anew as a whole, and does not keep to one of several equal TPU slices.
        nodes: pods, each of which is to have a node's devices: a number, or a range as 2-8, with which the run starts
            as soon as the fewest are there and takes in the others as they come. None is 1, or with `tpu` its machines.
        gpus_per_node: GPUs of a pod, with one process for each; 0 trains on the CPU, or on TPUs.
        gpu_resource: what the cluster calls GPUs.
        tpu: a slice of TPUs, in the place of GPUs.
        processes_per_node: without GPUs and TPUs.
        cpus_per_node: cores that a pod is promised; None promises none.
        memory: that a pod is promised, as 200Gi; None promises none.
        shm: shared memory (/dev/shm) that a pod may use, for NCCL; part of its memory.
        directory: where the configuration's relative paths start, in the pods; None takes the image's.
        volumes: files that outlive pods. Checkpoints have to lie in a claim among them, or in an object store.
        variables: environment variables. Not for secrets, which would lie in the manifest for all to read.
        secrets: environment variables whose values are the cluster's secrets, each as secret/key.
        interface: the network interface of NCCL and gloo, as eth0; None leaves the choice to them.
        service_account: whose rights pods have, for object stores; None takes the namespace's default.
        queue: a LocalQueue of Kueue, which then decides when the job starts.
        priority_class: of the pods.
        node_selector: labels that nodes must have.
        tolerations: taints that nodes may have, as Kubernetes writes them: {key: spot, operator: Exists}.
        labels: further ones of all that is made.
        user: whom the processes belong to, by number, and the group of volumes. None is 10001, as in the images
            of docker/, and for TPUs 0: their devices belong to root, who alone may lock enough memory for them.
        restarts: pods that may fail, other than by pre-emption and for reasons that starting again does not cure, and
            be replaced. A JobSet is then started anew as a whole, as often again.
    """

    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    namespace: str = "default"
    context: str | None = None
    controller: Literal["jobset", "job"] = "jobset"
    nodes: str | int | None = None
    gpus_per_node: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    tpu: Tpu | None = None
    processes_per_node: int = 1
    cpus_per_node: int | None = None
    memory: str | None = None
    shm: str = "8Gi"
    directory: str | None = None
    volumes: tuple[Volume, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    interface: str | None = None
    service_account: str | None = None
    queue: str | None = None
    priority_class: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, str | int], ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    user: int | None = None
    restarts: int = 4

    shares_files: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_words()
        smallest = {
            "processes_per_node": 1,
            "cpus_per_node": 1,
            "gpus_per_node": 0,
            "user": 0,
            "restarts": 0,
        }
        for name, least in smallest.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.tpu is not None and (self.nodes is not None or self.gpus_per_node):
            raise ConfigError(
                "tpu is one slice, with as many machines as its topology says, and runs over several slices cannot be "
                "launched on Kubernetes; leave out nodes and gpus_per_node"
            )
        if self.directory is not None and not self.directory.startswith("/"):
            raise ConfigError(
                f"directory must be a folder of the pods such as /work, not {self.directory}"
            )
        mounts = [volume.mount for volume in self.volumes]
        if twice := next((mount for mount in mounts if mounts.count(mount) > 1), None):
            raise ConfigError(f"volumes: two of them are mounted at {twice}")
        _ = self.node_range  # refuses what is none

    def _check_words(self) -> None:
        for name, pattern in _WORDS.items():
            if (value := getattr(self, name)) is not None and not pattern.fullmatch(value):
                raise ConfigError(f"{name} {value!r} is nothing that Kubernetes would take for one")
        for key, value in (*self.labels.items(), *self.node_selector.items()):
            if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
                raise ConfigError(
                    f"{key}={value!r} is no label: letters, digits, dashes and dots, at most 63"
                )
        check_variables(self.variables)
        for name, value in self.secrets.items():
            if not VARIABLE.fullmatch(name) or not _SECRET.fullmatch(value):
                raise ConfigError(
                    f"secrets.{name} must name a secret of the namespace and a key in it, as wandb/key, and not be the "
                    "secret itself"  # which an error should not repeat
                )

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest pods, and the most."""
        if self.tpu is not None:
            return (self.tpu.chips // self.tpu.chips_per_node,) * 2
        return node_range(1 if self.nodes is None else self.nodes)

    @property
    def devices(self) -> tuple[int, ...]:
        """One number for each number of nodes."""
        if self.tpu is not None:
            return (self.tpu.chips,)
        return device_counts(self.node_range, self.gpus_per_node or self.processes_per_node)

    def render(self, job: JobSpec) -> Submission:
        """One manifest: the configuration, what gives pods names where that is needed, and the job."""
        if job.action == "train" and job.stop_signals and "SIGTERM" not in job.stop_signals:
            raise ConfigError(
                "Kubernetes ends pods by SIGTERM, which training.preemption.signals lacks: add it"
            )
        self._check_kept(yaml.safe_load(job.config))
        name = objects.name_of(job)
        labels = {**self.labels, JOB_LABEL: name, ACTION_LABEL: job.action}
        config_map = new("v1", "ConfigMap", name, labels, immutable=True, data={CONFIG: job.config})
        make = (
            self._build
            if job.action == "build"
            else self._jobset
            if self.controller == "jobset"
            else self._job
        )
        text = objects.manifest([config_map, *make(job, name, labels)])
        command = (*objects.arguments(self.context, self.namespace), "create", "-f", MANIFEST)
        return Submission({MANIFEST: text}, command)

    def _check_kept(self, tree: Tree) -> None:
        """Refuses a run whose checkpoints would be gone with the pod, and a dataset that would be."""
        checkpoint = tree.get("checkpoint")
        folder = checkpoint.get("folder") if isinstance(checkpoint, dict) else None
        if "://" in str(folder):
            return
        name, folder = (
            ("output", tree["output"]) if folder is None else ("checkpoint.folder", str(folder))
        )
        place = posixpath.normpath(posixpath.join(self.directory or "", folder))
        around = [volume for volume in self.volumes if f"{place}/".startswith(f"{volume.mount}/")]
        if not around or max(around, key=lambda volume: len(volume.mount)).claim is None:
            raise ConfigError(
                f"{name} {place} lies in no claim of cluster.volumes, and would be lost with the pod: mount one and "
                "choose a folder in it (cluster.directory says where relative ones start), or set "
                "checkpoint.folder=gs://..."
            )

    def _jobset(self, job: JobSpec, name: str, labels: dict[str, str]) -> list[Object]:
        spec = self._train(job, name, labels, f"{name}-{GROUP}-0-0.{name}")
        group = {
            "name": GROUP,
            "replicas": 1,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        }
        jobset_spec = {
            # Pods have names before they are ready.
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": name,
            },
            "failurePolicy": {"maxRestarts": self.restarts, "rules": objects.JOBSET_RULES},
            "replicatedJobs": [group],
        }
        jobset = self._queued("jobset.x-k8s.io/v1alpha2", "JobSet", name, labels, jobset_spec)
        if self.tpu is not None and self.node_range[1] > 1:  # all pods on machines of one slice
            exclusive = {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            }
            jobset["metadata"]["annotations"] = exclusive
        return [jobset]

    def _job(self, job: JobSpec, name: str, labels: dict[str, str]) -> list[Object]:
        # Without an address of its own, the service gives each pod a name: JOB-INDEX.SERVICE.
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
        }
        spec = self._train(job, name, labels, f"{name}-0.{name}")
        spec["template"]["spec"]["subdomain"] = name
        return [
            new("v1", "Service", name, labels, spec=service),
            self._queued("batch/v1", "Job", name, labels, spec),
        ]

    def _build(self, job: JobSpec, name: str, labels: dict[str, str]) -> list[Object]:
        """One slice a pod; the last one that is done merges and verifies."""
        # The shell's text is fixed, and reads what Kubernetes says in the environment. $$ is $ there.
        part = '"$$((JOB_COMPLETION_INDEX + 1))/$$SAMESTEP_TASKS"'
        command = ["sh", "-c", f"exec {' '.join(job.command)} {_MOUNT}/{CONFIG} --slice {part}"]
        pod = self._pod(job, labels, command, {"SAMESTEP_TASKS": str(job.tasks)}, {})
        return [self._queued("batch/v1", "Job", name, labels, self._indexed(pod, job.tasks))]

    def _train(self, job: JobSpec, name: str, labels: dict[str, str], first: str) -> Object:
        (fewest, most), tpu = self.node_range, self.tpu
        devices = (
            {"google.com/tpu": tpu.chips_per_node}
            if tpu
            else {self.gpu_resource: self.gpus_per_node}
        )
        processes = (
            [] if tpu or self.gpus_per_node else ["--processes", str(self.processes_per_node)]
        )
        elastic = ["--elastic", f"{fewest}:{most}", "--rendezvous", f"{first}:{_PORT}"]
        command = [
            *job.command,
            f"{_MOUNT}/{CONFIG}",
            *processes,
            *elastic,
        ]  # ranks come from the meeting
        command = [*objects.LOCKING_MEMORY, *command] if tpu else command
        sockets = {
            f"{library}_SOCKET_IFNAME": self.interface
            for library in ("NCCL", "GLOO")
            if self.interface
        }
        pod = self._pod(job, labels, command, sockets, devices if tpu or self.gpus_per_node else {})
        if tpu is not None:
            chips = {"accelerator": tpu.accelerator, "topology": tpu.topology}
            machines = {f"cloud.google.com/gke-tpu-{key}": value for key, value in chips.items()}
            pod["spec"]["nodeSelector"] = machines | self.node_selector
        spec = self._indexed(pod, most)
        if most > 1:
            # What the first has done is done by all. Pods that never found a node, or were lost at the very end, do not
            # hold up the end: nobody is left for them to meet.
            spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
        return spec

    def _queued(
        self, version: str, kind: str, name: str, labels: dict[str, str], spec: Object
    ) -> Object:
        """What Kueue starts once it has admitted it; should it not be installed, nothing starts outside its queues."""
        if self.queue is None:
            return new(version, kind, name, labels, spec=spec)
        labels = {**labels, "kueue.x-k8s.io/queue-name": self.queue}
        return new(version, kind, name, labels, spec={"suspend": True, **spec})

    def _indexed(self, pod: Object, pods: int) -> Object:
        numbers = {"completions": pods, "parallelism": pods, "backoffLimit": self.restarts}
        return {
            "completionMode": "Indexed",
            **numbers,
            "podFailurePolicy": {"rules": objects.RULES},
            "template": pod,
        }

    def _pod(
        self,
        job: JobSpec,
        labels: dict[str, str],
        command: list[str],
        variables: dict[str, str],
        devices: Object,
    ) -> Object:
        name = labels[JOB_LABEL]
        tpu = job.action == "train" and self.tpu is not None
        user = self.user if self.user is not None else 0 if tpu else _USER
        security = objects.UNPRIVILEGED if user else objects.LOCKS_MEMORY if tpu else {}
        # Images of CUDA ask for all GPUs of a node, and get them from some container runtimes.
        hidden = {} if self.gpu_resource in devices else {"NVIDIA_VISIBLE_DEVICES": "void"}
        variables = {"SAMESTEP_JOB": name, **hidden, **variables, **self.variables}
        promised = {"cpu": self.cpus_per_node, "memory": self.memory}
        requests = {key: value for key, value in promised.items() if value is not None}
        resources = {
            key: value for key, value in (("requests", requests), ("limits", devices)) if value
        }
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": self.shm}}
        files: list[tuple[str, str, Object]] = [
            ("config", _MOUNT, {"configMap": {"name": name}}),
            ("shm", "/dev/shm", memory),
        ]
        files += [
            (f"files-{i}", each.mount, each.source(user)) for i, each in enumerate(self.volumes)
        ]
        container = {
            "name": CONTAINER,
            "image": self.image,
            **({"imagePullPolicy": self.image_pull_policy} if self.image_pull_policy else {}),
            "command": command,
            **({"workingDir": self.directory} if self.directory else {}),
            "env": objects.environment(variables, self.secrets),
            **({"resources": resources} if resources else {}),
            **({"securityContext": security} if security else {}),
            "volumeMounts": [{"name": volume, "mountPath": mount} for volume, mount, _ in files],
        }
        whose: Object = {"runAsNonRoot": True} if user else {}
        whose |= {
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
        optional = {
            "serviceAccountName": self.service_account,
            "priorityClassName": self.priority_class,
            "nodeSelector": self.node_selector,
            "tolerations": list(self.tolerations),
        }
        spec = {
            "restartPolicy": "Never",  # as podFailurePolicy wants it: the Job replaces pods
            "terminationGracePeriodSeconds": math.ceil(job.stop_seconds) + 60,
            "shareProcessNamespace": True,  # the first process of a container is deaf to SIGTERM until it has set up
            "enableServiceLinks": False,  # a service that is called master would set MASTER_PORT
            "automountServiceAccountToken": False,
            "securityContext": whose | {"seccompProfile": {"type": "RuntimeDefault"}},
            **{key: value for key, value in optional.items() if value},
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, _, source in files],
        }
        buckets = any(each.bucket for each in self.volumes)
        fuse = {"annotations": {"gke-gcsfuse/volumes": "true"}} if buckets else {}
        return {"metadata": {"labels": labels, **fuse}, "spec": spec}

    def check(self) -> None:
        """Looks for kubectl."""
        command_line.require(
            "kubectl",
            "install it (https://kubernetes.io/docs/tasks/tools) and log in to the cluster",
        )

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """All objects, or none: the server looks at all of them before it makes the first."""
        place, what = submission.command[:-3], ("-f", MANIFEST)
        objects.run([*place, "create", "--dry-run=server", *what], folder)
        name, controller, action = objects.labels_of(submission.files[MANIFEST])
        context = (
            self.context or objects.current_context()
        )  # which is another one once the user has switched
        undo = (*place, "delete", "--ignore-not-found", "--wait=false", *what)
        try:
            objects.run(submission.command, folder)
        except LaunchError as error:
            raise objects.taken_back(error, undo, folder) from None
        about = {"context": context, "namespace": self.namespace, "name": name}
        return name, about | {"controller": controller, "action": action}

    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """As the cluster has them; those that were deleted are left out."""
        return objects.states(records)

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """What the cluster still has of them: logs go with their pods."""

        def goes_on() -> bool:
            state = objects.states([record]).get(record.id)
            return follow and state is not None and state.active

        return objects.logs(record, goes_on)

    def cancel(self, record: Record) -> None:
        """Deletes the job; the run gets its deadline for a checkpoint."""
        objects.delete(record)

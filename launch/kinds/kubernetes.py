"""Kubernetes, and TPUs of GKE: the pods of a JobSet or Job run `samestep train --elastic`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from launch import experiment
from launch.clients import command_line
from launch.environment import check_secrets, check_variables
from launch.job import CONFIG, JobSpec, Place, Record, State, Submission
from launch.k8s import folders, kubectl, manifest, patch
from launch.k8s.manifest import ACTION_LABEL, GROUP, JOB_LABEL, Object, fill
from launch.k8s.parts import KEY, MOUNT, NAME, QUANTITY, VALUE, Tpu, Volume, amount
from launch.settings import NodeCluster, check_least, check_patterns, check_sigterm
from samestep.errors import ConfigError, LaunchError

MANIFEST = "manifest.yaml"

_PORT = 29400  # of the rendezvous
_USER = 10001  # user id in the images of docker/

_SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._A-Za-z0-9]+")
_OWN_RESOURCES = ("cpu", "memory", "google.com/tpu")
_PATTERNS = {
    **dict.fromkeys(("image", "context", "interface"), re.compile(r"[^\s-]\S*")),
    **dict.fromkeys(("namespace", "service_account", "queue", "priority_class"), NAME),
    **dict.fromkeys(("memory", "memory_limit", "shm", "cpu_limit"), QUANTITY),
    "gpu_resource": KEY,
}


@dataclass(frozen=True)
class Config(NodeCluster):
    """A namespace of a Kubernetes cluster.

    Attributes:
        image: an image with samestep installed; the code reaches the nodes in no other way.
        image_pull_policy: when nodes pull it; None is Kubernetes' own: always for the tag latest,
            else once.
        namespace: where the job is created.
        context: of the kubectl configuration; None takes the current one.
        controller: jobset needs JobSet installed on the cluster. job is a plain Job, which every
            cluster has; it is not restarted as a whole, and may spread over several equal TPU
            slices.
        nodes: number of pods, each of which gets a node's devices, or a range as 2-8: the run
            starts as soon as the least are there and takes in the others as they come. None is 1,
            or with `tpu` the number of its machines.
        gpus_per_node: GPUs of a pod, with one process for each; 0 trains on the CPU, or on TPUs.
        gpu_resource: the cluster's name of GPUs.
        tpu: a slice of TPUs, instead of GPUs.
        processes_per_node: number of processes in a pod without GPUs and TPUs.
        cpus_per_node: cores that a pod requests; None requests none.
        cpu_limit: cores that a pod may use, as 64 or 500m; None sets no limit.
        memory: memory that a pod requests, as 200Gi; None requests none.
        memory_limit: memory above which a pod is killed; None sets no limit.
        resources: further resources of each pod of a run, by the cluster's names, which are
            requested and limited alike: {vpc.amazonaws.com/efa: 32, hugepages-2Mi: 5120Mi}.
        shm: shared memory (/dev/shm) that a pod may use, for NCCL; part of its memory.
        directory: folder of the pods where the configuration's relative paths start; None takes the
            image's.
        volumes: files that outlive pods. Checkpoints must lie in one of their claims, or in an
            object store.
        variables: environment variables. Not for secrets, as others can read the manifest.
        secrets: environment variables with values from the cluster's secrets, each as secret/key.
        interface: the network interface of NCCL and gloo, as eth0; None lets them choose.
        service_account: service account of the pods, for object stores; None takes the namespace's
            default.
        queue: a LocalQueue of Kueue, which then decides when the job starts.
        priority_class: of the pods.
        node_selector: labels that nodes must have.
        tolerations: taints that nodes may have, as Kubernetes writes them:
            {key: spot, operator: Exists}.
        network_policy: whether the job brings a NetworkPolicy that admits connections from its own
            pods only. False is for accounts that may not create one: then every pod of the cluster
            reaches the job's ports, unless the namespace has a policy.
        labels: further labels of all objects.
        annotations: of the pods, as for networks and schedulers.
        patch: changes of the rendered objects, by kind: ConfigMap, NetworkPolicy, Service,
            Job, JobSet, or Pod. Mappings are merged, null deletes a key, lists are merged by the
            mountPath or name of their items, and other lists are replaced. docs/kubernetes.md has
            examples.
        user: user id of the processes, and group id of volumes. None is 10001, as in the images of
            docker/, and for TPUs 0: their devices belong to root, who alone may lock enough memory
            for them.
        restarts: number of pods that may fail and be replaced, other than by pre-emption and for
            reasons that a restart does not cure. A JobSet is then restarted as a whole, as often
            again.
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
    cpu_limit: str | int | None = None
    memory: str | None = None
    memory_limit: str | None = None
    resources: dict[str, str | int] = field(default_factory=dict)
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
    network_policy: bool = True
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    patch: dict[str, Object] = field(default_factory=dict)
    user: int | None = None
    restarts: int = 4

    shares_files: ClassVar[bool] = False
    reach: ClassVar[str] = (
        "Put it into an object store (`samestep data push` does that with datasets) and name its "
        "URL, or mount a claim or bucket that holds it with cluster.volumes (cluster.directory "
        "says where relative paths start)."
    )
    keeping: ClassVar[str] = (
        "Mount a claim with cluster.volumes and choose a folder in it (cluster.directory says "
        "where relative paths start), or set checkpoint.folder=gs://..."
    )

    def __post_init__(self) -> None:
        check_patterns(self, _PATTERNS, "Kubernetes")
        for key, value in (*self.labels.items(), *self.node_selector.items()):
            if not KEY.fullmatch(key) or not VALUE.fullmatch(value):
                raise ConfigError(
                    f"{key}={value!r} is not a label. Use at most 63 letters, digits, dashes "
                    "and dots."
                )
        for key in self.annotations:
            if not KEY.fullmatch(key):
                raise ConfigError(
                    f"annotations: {key!r} is not a key. Write it as NAME or DOMAIN/NAME."
                )
        self._check_resources()
        patch.check(self.patch, self.controller)
        check_variables(self.variables)
        check_secrets(
            self.secrets, _SECRET, "a secret of the namespace and a key in it, such as wandb/key"
        )
        self.check_node_settings()
        check_least(self, user=0, restarts=0)
        if self.tpu is not None and (self.nodes is not None or self.gpus_per_node):
            raise ConfigError(
                "tpu is one slice, whose topology says how many machines it has; runs over several "
                "slices cannot be launched on Kubernetes. Remove nodes and gpus_per_node."
            )
        if self.directory is not None and not self.directory.startswith("/"):
            raise ConfigError(
                f"directory must be a folder of the pods such as /work, not {self.directory}"
            )
        mounts = [volume.mount for volume in self.volumes]
        for mount in mounts:
            if mounts.count(mount) > 1:
                raise ConfigError(f"volumes: two have the mount {mount}. Give each its own.")

    def _check_resources(self) -> None:
        for name, quantity in self.resources.items():
            if name in (*_OWN_RESOURCES, self.gpu_resource):
                raise ConfigError(
                    f"resources.{name} has a setting of its own. Use cpus_per_node, cpu_limit, "
                    "memory, memory_limit, gpus_per_node or tpu."
                )
            if not KEY.fullmatch(name) or not QUANTITY.fullmatch(str(quantity)):
                raise ConfigError(
                    f"resources.{name} is {quantity!r}. Write a name and a quantity of Kubernetes, "
                    "as vpc.amazonaws.com/efa: 4 or hugepages-2Mi: 5120Mi."
                )
        for limit, request in (("cpu_limit", "cpus_per_node"), ("memory_limit", "memory")):
            most, least = getattr(self, limit), getattr(self, request)
            if most is not None and least is not None and amount(most) < amount(least):
                raise ConfigError(f"{limit} {most} is below {request} {least}. Raise {limit}.")

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the greatest number of pods."""
        if self.tpu is not None:
            # A slice is whole or useless, so its pods are all or none.
            machines = self.tpu.chips // self.tpu.chips_per_node
            return machines, machines
        return super().node_range

    @property
    def devices(self) -> tuple[int, ...]:
        """One number of devices for each number of pods."""
        return super().devices if self.tpu is None else (self.tpu.chips,)

    @property
    def hardware(self) -> Literal["gpu", "tpu", "cpu", "here"]:
        return "tpu" if self.tpu is not None else super().hardware

    @property
    def size(self) -> str:
        if self.tpu is None:
            return super().size
        return f"{self.nodes_in_words} x {self.tpu.chips_per_node} TPU chips"

    def render(self, job: JobSpec) -> Submission:
        """One manifest: the configuration, the job, and maybe a network policy and a service."""
        check_sigterm(job, "Kubernetes")
        name = manifest.name_of(job)
        labels = {**self.labels, JOB_LABEL: name, ACTION_LABEL: job.action}
        place = {"name": name, "namespace": self.namespace}
        # Objects are created in this order: what a pod mounts is there before it.
        objects = [fill(manifest.CONFIG_MAP, **place, labels=labels, config=job.config)]
        if self.network_policy:
            objects.append(fill(manifest.POLICY, **place, labels=labels))
        build, jobset = job.action == "build", self.controller == "jobset"
        if build:
            spec = self._build(job, labels)
        elif jobset:
            spec = self._train(job, labels, f"{name}-{GROUP}-0-0.{name}")
        else:
            spec = self._train(job, labels, f"{name}-0.{name}")
            # Gives each pod a name in DNS, which the rendezvous needs before any pod runs.
            spec["template"]["spec"]["subdomain"] = name
            objects.append(fill(manifest.SERVICE, **place, labels=labels))
        # Suspended even if Kueue is not installed: then nothing starts outside its queues.
        suspend = None if self.queue is None else True
        queue = {} if self.queue is None else {"kueue.x-k8s.io/queue-name": self.queue}
        queued = {**labels, **queue}
        if build or not jobset:
            spec = {"suspend": True, **spec} if suspend else spec
            objects.append(fill(manifest.JOB, **place, labels=queued, spec=spec))
        else:
            # All pods must run on the machines of one slice, which is one node pool. Slices with
            # one machine may share a pool.
            is_slice = self.tpu is not None and self.node_range[1] > 1
            objects.append(
                fill(
                    manifest.JOBSET,
                    **place,
                    labels=queued,
                    annotations=manifest.ONE_NODE_POOL if is_slice else None,
                    suspend=suspend,
                    restarts=self.restarts,
                    job_labels=labels,
                    spec=spec,
                )
            )
        command = (*kubectl.arguments(self.context, self.namespace), "create", "-f", MANIFEST)
        return Submission({MANIFEST: manifest.dump(patch.patched(objects, self.patch))}, command)

    def place_of(self, path: str, job: JobSpec, submission: Submission) -> Place | None:
        """The volume of the pods, whether it is among `volumes` or from a patch."""
        return folders.place_of(path, submission.files[MANIFEST])

    def check_code(self, job: JobSpec, files: Sequence[Path]) -> str:
        """The image has the code, and cannot be looked into from here."""
        own = sorted(set(experiment.own_modules(job.tree).values()))
        needed = f", which must have {', '.join(own)}" if own else ""
        return f"in the image {self.image}{needed}"

    def ask(self, submission: Submission) -> str:
        """Validates all objects on the server."""
        command = (*submission.command[:-3], "create", "--dry-run=server", "-f", "-")
        kubectl.run(command, text=submission.files[MANIFEST])
        return "the server accepts all objects"

    def _build(self, job: JobSpec, labels: dict[str, str]) -> Object:
        """Each pod builds one slice; the last one to finish merges and verifies."""
        # The shell's text is fixed: it reads numbers from the environment. Kubernetes turns $$
        # into $.
        slice_ = '"$$((JOB_COMPLETION_INDEX + 1))/$$SAMESTEP_TASKS"'
        command = ["sh", "-c", f"exec {' '.join(job.command)} {MOUNT}/{CONFIG} --slice {slice_}"]
        pod = self._pod(job, labels, command, {"SAMESTEP_TASKS": str(job.tasks)}, {})
        return self._indexed(pod, job.tasks)

    def _train(self, job: JobSpec, labels: dict[str, str], first_pod: str) -> Object:
        (least, most), tpu = self.node_range, self.tpu
        devices: Object = {}
        if tpu is not None:
            devices = {"google.com/tpu": tpu.chips_per_node}
        elif self.gpus_per_node:
            devices = {self.gpu_resource: self.gpus_per_node}
        # Pods get no ranks from Kubernetes: the rendezvous assigns them.
        rendezvous = f"{first_pod}:{_PORT}"
        arguments = self.train_arguments(f"{least}:{most}", rendezvous, bool(devices))
        command = [*job.command, f"{MOUNT}/{CONFIG}", *arguments]
        if tpu is not None:
            command = [*manifest.LOCKING_MEMORY, *command]
        pod = self._pod(job, labels, command, self.socket_variables(), devices)
        if tpu is not None:
            pod["spec"]["nodeSelector"] = {
                "cloud.google.com/gke-tpu-accelerator": tpu.accelerator,
                "cloud.google.com/gke-tpu-topology": tpu.topology,
                **self.node_selector,
            }
        spec = self._indexed(pod, most)
        if most > 1:
            # When the first pod is done, all are. Pods that never found a node, or were lost at the
            # very end, must not hold up the end: nobody is left for them to join.
            spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
        return spec

    def _indexed(self, pod: Object, pods: int) -> Object:
        return fill(manifest.INDEXED, pods=pods, restarts=self.restarts, pod=pod)

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
        user = self.user
        if user is None:
            user = 0 if tpu else _USER
        security: Object | None = manifest.LOCKS_MEMORY if tpu else None
        if user:
            security = manifest.UNPRIVILEGED
        # CUDA images ask for all GPUs of a node, and some container runtimes grant that.
        hidden = {} if self.gpu_resource in devices else {"NVIDIA_VISIBLE_DEVICES": "void"}
        variables = {"SAMESTEP_JOB": name, **hidden, **variables, **self.variables}
        volumes = [
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.shm}},
        ]
        mounts = [("config", MOUNT), ("shm", "/dev/shm")]
        for index, volume in enumerate(self.volumes):
            mounts.append((f"files-{index}", volume.mount))
            volumes.append({"name": f"files-{index}", **volume.source(user)})
        has_buckets = any(volume.bucket for volume in self.volumes)
        buckets = {"gke-gcsfuse/volumes": "true"} if has_buckets else {}
        further = self.resources if job.action == "train" else {}
        limits = {"cpu": self.cpu_limit, "memory": self.memory_limit, **devices, **further}
        return fill(
            manifest.POD,
            labels=labels,
            annotations={**buckets, **self.annotations},
            grace_seconds=math.ceil(job.stop_seconds) + 60,
            non_root=True if user else None,
            user=user,
            service_account=self.service_account,
            priority_class=self.priority_class,
            node_selector=self.node_selector,
            tolerations=list(self.tolerations),
            image=self.image,
            pull_policy=self.image_pull_policy,
            command=command,
            directory=self.directory,
            environment=manifest.environment(variables, self.secrets),
            cpus=self.cpus_per_node,
            memory=self.memory,
            limits={name: limit for name, limit in limits.items() if limit is not None},
            security=security,
            mounts=[{"name": volume, "mountPath": mount} for volume, mount in mounts],
            volumes=volumes,
        )

    def check(self) -> None:
        """Checks that kubectl is installed."""
        command_line.require(
            "kubectl",
            "install it (https://kubernetes.io/docs/tasks/tools) and log in to the cluster",
        )

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Creates all objects or none: the server validates all of them before the first."""
        place, what = submission.command[:-3], ("-f", MANIFEST)
        kubectl.run([*place, "create", "--dry-run=server", *what], folder)
        name, controller, action = manifest.labels_of(submission.files[MANIFEST])
        # The current context is another one once the user has switched.
        context = self.context or kubectl.current_context()
        try:
            kubectl.run(submission.command, folder)
        except LaunchError as error:
            # What somebody else has created since the validation is not ours to delete.
            if "AlreadyExists" not in str(error):
                try:
                    undo = [*place, "delete", "--ignore-not-found", "--wait=false", *what]
                    kubectl.run(undo, folder)
                except LaunchError as second:
                    raise LaunchError(
                        f"{error}. What had been created by then could not be deleted: {second}"
                    ) from None
            raise
        return name, {
            "context": context,
            "namespace": self.namespace,
            "name": name,
            "controller": controller,
            "action": action,
            "network_policy": str(self.network_policy).lower(),
        }

    def states(self, records: Iterable[Record]) -> Mapping[Path, State]:
        """The cluster's states, without jobs that were deleted."""
        return kubectl.states(records)

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """The logs that the cluster still has: they are deleted with their pods."""
        return kubectl.logs(record, lambda: follow and self.is_active(record))

    def cancel(self, record: Record) -> None:
        """Deletes the job; the run gets its deadline for a checkpoint."""
        kubectl.delete(record)

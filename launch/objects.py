"""Kubernetes' objects: how they are written for kubectl, what it says of them, and what to do when it fails."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from launch import command_line
from launch.job import JobSpec, Record, State
from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_UNAVAILABLE, EXIT_USAGE, LaunchError

Object: TypeAlias = dict[str, Any]

JOB_LABEL = "samestep.dev/job"
ACTION_LABEL = "samestep.dev/action"
CONTAINER = "samestep"
GROUP = "node"  # a JobSet's only group of pods

# The first rule that fits counts. To ignore a failure is to replace the pod, however often; what no rule knows counts
# towards backoffLimit. Codes 69 and 75: it has waited in vain for others, or was asked to end and has saved a
# checkpoint, evicted or not, and is to go on.
RULES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    *(
        {
            "action": action,
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
        }
        for action, codes in (
            ("Ignore", [EXIT_UNAVAILABLE, EXIT_PREEMPTED]),
            ("FailJob", [EXIT_FAILED, EXIT_USAGE]),
        )
    ),
]
# What podFailurePolicy has called final is final for the JobSet, too.
JOBSET_RULES = [
    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
]

UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

# The driver of TPUs locks the memory that chips read and write: more than a node may allow, and without this capability
# root may not raise that limit either. The command goes on where it cannot. $$ is $ in commands.
LOCKS_MEMORY = {"capabilities": {"add": ["SYS_RESOURCE"]}}
LOCKING_MEMORY = ["sh", "-c", 'ulimit -l 68719476736; exec "$$@"', "sh"]

_RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "job": "jobs.batch"}
_BELONGING = {"jobset": "configmaps", "job": "services,configmaps"}  # a JobSet owns its service
_KINDS = {"jobset": "JobSet", "job": "Job"}

# A pod of a JobSet is NAME-node-0-INDEX-SUFFIX, which is to be a label of DNS: 63 characters at most.
_NAME_LENGTH = 63 - len(f"-{GROUP}-0-9999-abcde")
_PLAIN = re.compile(r"[A-Za-z/]{2}.*")
_INDEX = "batch.kubernetes.io/job-completion-index"
_POLL_SECONDS = 2.0
_DETAIL_WIDTH = 120
_ENDED = {
    "Completed": "done",
    "Complete": "done",
    "Failed": "failed",
}  # by a condition of a JobSet or a Job
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.*)", re.DOTALL)

# What kubectl says of each of its own attempts, before what it says of the command.
_NOISE = re.compile(
    r"[EWIF]\d{4} [\d:.]+ +\d+ \S+\] (\"[^\"]*\" err=\"([^\"\\]|\\.)*\"|.*?)(\. |(?=; )|$)"
)
_HINTS = {
    "provide credentials|unauthorized|logged in to the server|getting credentials|expired": (
        "your credentials are not valid there (any more): log in again, as with `gcloud container clusters "
        "get-credentials CLUSTER` or `aws eks update-kubeconfig --name CLUSTER`"
    ),
    'no matches for kind "?JobSet|resource type "?jobsets': (
        "JobSet is not installed on this cluster: install it (docs/kubernetes.md says how), or set "
        "cluster.controller=job"
    ),
    'namespaces? "[^"]*" not found': (
        "`kubectl get namespaces` lists those that there are; set cluster.namespace to one, or create it with `kubectl "
        "create namespace NAME`"
    ),
    "exceeded quota": (
        "`kubectl describe resourcequota` shows what the namespace may use and does; lower cluster.nodes, or end other "
        "jobs"
    ),
    "forbidden": (
        "your account needs the verbs create, get, list and delete on configmaps, services, jobs, jobsets and pods of "
        "this namespace, and get on pods/log: ask its administrator, or set cluster.namespace"
    ),
    "context .*does not exist|context was not found": (
        "`kubectl config get-contexts` lists those that there are; set cluster.context to one"
    ),
    "failed calling webhook|no endpoints available": (
        "a controller (JobSet's or Kueue's) does not run: look at `kubectl get pods --all-namespaces`"
    ),
    "unknown field": "it needs Kubernetes 1.31 or newer, and JobSet 0.6 or newer",
    "already exists": "another launch has this name: delete it with `kubectl delete`, or choose another output",
    "refused|no such host|(i/o|handshake) timeout|deadline exceeded|unable to connect|x509|no route|unreachable": (
        "the cluster's API server cannot be reached from here: look at the address in `kubectl config view --minify`, "
        "at VPN and proxy, and whether the cluster runs"
    ),
}


class _Dumper(yaml.SafeDumper):
    """Writes lines as lines, and quotes what another reader of YAML would take for a number or a boolean: 1e3, y."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None if _PLAIN.fullmatch(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def ignore_aliases(self, data: object) -> bool:
        return True  # who reads the file should not have to follow them


_Dumper.add_representer(str, _Dumper.represent_str)


def name_of(job: JobSpec) -> str:
    """Unique in a namespace that several users share, whose launches are numbered each by themselves."""
    digest = hashlib.sha256(f"{job.folder}\0{job.config}".encode()).hexdigest()[:4]
    tail = f"-{job.folder.name}-{digest}"
    head = (
        job.name if job.name[0].isalpha() else f"run-{job.name}"
    )  # as names of services have to begin
    return head[: _NAME_LENGTH - len(tail)].rstrip("-") + tail


def new(version: str, kind: str, name: str, labels: dict[str, str], **parts: object) -> Object:
    """An object.

    Args:
        version: of the API that knows its kind.
        kind: of object.
        name: of the object, in its namespace.
        labels: that it is found by.
        **parts: what else it consists of, as `spec`.
    """
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        **parts,
    }


def environment(variables: Mapping[str, str], secrets: Mapping[str, str]) -> list[Object]:
    """A container's variables; `secrets` names those of the cluster, each as secret/key."""
    # Kubernetes takes $(NAME) in a value for that variable, and $$ for $.
    plain = [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]
    pod = {"name": "SAMESTEP_NODES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    places = {
        name: dict(zip(("name", "key"), place.split("/"), strict=True))
        for name, place in secrets.items()
    }
    return [
        pod,
        *plain,
        *({"name": name, "valueFrom": {"secretKeyRef": place}} for name, place in places.items()),
    ]


def manifest(documents: Iterable[Object]) -> str:
    """Objects as a file that kubectl creates them from."""
    return yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=120,
        explicit_start=True,
    )


def labels_of(text: str) -> tuple[str, str, str]:
    """The name, controller and action of a manifest's job, which is the last of its objects."""
    *_, last = yaml.safe_load_all(text)
    return last["metadata"]["name"], last["kind"].lower(), last["metadata"]["labels"][ACTION_LABEL]


def arguments(context: str | None, namespace: str) -> tuple[str, ...]:
    """How a command for one namespace of one cluster begins."""
    return ("kubectl", *(("--context", context) if context else ()), "--namespace", namespace)


def run(command: Iterable[str], folder: Path | None = None) -> str:
    """What kubectl prints.

    Raises:
        LaunchError: with its own words, without those about each of its attempts, and with the fix.
    """
    try:
        return command_line.run(list(command), _HINTS, folder)
    except LaunchError as error:
        raise LaunchError(_NOISE.sub("", str(error))) from None


def current_context() -> str:
    """The context that kubectl takes unless told otherwise; "" inside a cluster, where it needs none."""
    try:
        return run(["kubectl", "config", "current-context"]).strip()
    except LaunchError:
        return ""


def delete(record: Record) -> None:
    """Deletes a job with what belongs to it, and does not wait: its pods get their time to save a checkpoint.

    Raises:
        LaunchError: there is none.
    """
    controller = record.about["controller"]
    kinds = f"{_RESOURCES[controller]},{_BELONGING[controller]}"
    how = ["--ignore-not-found", "--cascade=foreground", "--wait=false"]
    if not run([*_about(record), "delete", kinds, record.about["name"], *how]).strip():
        raise LaunchError(f"{record.id} is not on the cluster any more: it was deleted there")


def _about(record: Record) -> tuple[str, ...]:
    return arguments(record.about["context"], record.about["namespace"])


def states(records: Iterable[Record]) -> dict[str, State]:
    """How jobs stand, by id; one question for each namespace."""
    places: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        places[_about(record)].append(record)
    found: dict[str, State] = {}
    for place, there in places.items():
        kinds = ",".join(
            sorted(
                {_RESOURCES[record.about["controller"]] for record in there}
                | {"jobs.batch", "pods"}
            )
        )
        objects: dict[str, list[Object]] = defaultdict(list)
        for item in _items(
            run([*place, "get", kinds, "--selector", JOB_LABEL, "--output", "json"])
        ):
            objects[item["metadata"]["labels"][JOB_LABEL]].append(item)
        for record in there:
            if (state := _state(record, objects[record.about["name"]])) is not None:
                found[record.id] = state
    return found


def _items(text: str) -> list[Object]:
    items: list[Object] = json.loads(text)["items"]
    return items


def _state(record: Record, objects: list[Object]) -> State | None:
    kind, name = _KINDS[record.about["controller"]], record.about["name"]
    own = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    if not own:
        return None
    status, pods = own[0].get("status", {}), [item for item in objects if item["kind"] == "Pod"]
    restarts = status.get("restarts", 0) + sum(_phase(pod) == "Failed" for pod in pods)
    for condition in status.get("conditions", []):
        if condition["type"] in _ENDED and condition["status"] == "True":
            return State(
                _ENDED[condition["type"]],
                False,
                restarts=restarts,
                detail=_short(condition.get("message", "")),
            )
    if "deletionTimestamp" in own[0]["metadata"]:
        return State("ending", True, _nodes(pods), restarts)
    if own[0]["spec"].get("suspend"):
        queue = own[0]["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        return State(
            "suspended", True, "", restarts, f"waits for its turn in queue {queue}" if queue else ""
        )
    running = [pod for pod in pods if _phase(pod) == "Running"]
    waiting = [detail for pod in pods if _phase(pod) == "Pending" and (detail := _why_pending(pod))]
    if not pods:
        waiting = [
            f"no pod has been made yet: see `kubectl describe {_RESOURCES[record.about['controller']]} {name}`"
        ]
    return State(
        "running" if running else "pending",
        True,
        _nodes(running),
        restarts,
        next(iter(waiting), ""),
    )


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _nodes(pods: Iterable[Object]) -> str:
    names = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
    return f"{names[0]} +{len(names) - 1}" if len(names) > 1 else "".join(names)


def _why_pending(pod: Object) -> str:
    status = pod.get("status", {})
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        if waiting := container.get("state", {}).get("waiting"):
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
            if "Image" in reason:
                message = f"nodes cannot pull {container['image']}: {message}"
            return _short(f"{reason}: {message}" if message else reason)
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _short(condition.get("message", ""))
    return ""


def _short(text: str) -> str:
    return textwrap.shorten(text, _DETAIL_WIDTH, placeholder=" ...")


def logs(record: Record, goes_on: Callable[[], bool]) -> Iterator[str]:
    """What a run's first pod has written, and each that took its place; or all pods of a build, one after the other.

    Where the cluster has deleted the first pod, as it does with those that still ran when another one had failed, it is
    what is left of the others that says why.

    Args:
        record: the job.
        goes_on: whether more may come; asked when there is no more.

    Raises:
        LaunchError: there is nothing, and nothing will come; or the cluster does not answer.
    """
    selector = f"{JOB_LABEL}={record.about['name']}"
    read: dict[
        str, tuple[str, int]
    ] = {}  # the time of each pod's last line, and how many lines are of that time
    ended: set[str] = set()
    while True:
        last_look = not goes_on()
        pods = _items(
            run([*_about(record), "get", "pods", "--selector", selector, "--output", "json"])
        )
        pods.sort(key=lambda pod: (_index(pod), pod["metadata"]["creationTimestamp"]))
        if record.about["action"] == "train":
            pods = [pod for pod in pods if _index(pod) == 0] or pods
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in ended and _has_started(pod):
                follow = [] if last_look else ["--follow"]
                yield from _lines(
                    [*_about(record), "logs", name, "--container", CONTAINER, *follow], name, read
                )
                ended |= {name} if _phase(pod) in ("Succeeded", "Failed") else set()
        if last_look:
            break
        time.sleep(_POLL_SECONDS)
    if not read:
        raise LaunchError(
            f"no pod of {record.id} has written anything yet; `samestep jobs` says what it waits for"
        )


def _index(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(_INDEX, 0))


def _has_started(pod: Object) -> bool:
    containers = pod.get("status", {}).get("containerStatuses", [])
    return any(
        container["name"] == CONTAINER
        and {"running", "terminated"} & container.get("state", {}).keys()
        for container in containers
    )


def _lines(command: list[str], pod: str, read: dict[str, tuple[str, int]]) -> Iterator[str]:
    """The lines that have come since the last one that was read: connections end that follow a log for hours."""
    last = read.get(pod, ("", 0))
    since = ["--since-time", last[0]] if last[0] else []  # the server rounds it down to a second
    process = subprocess.Popen(  # of bytes: a line of text would end at each \r of a progress bar
        [*command, "--timestamps", *since],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    here = ("", 0)  # as `last`, of this connection
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            text = line.decode(errors="replace")
            if match := _STAMPED.fullmatch(text):
                stamp, text = match.groups()
                here = (stamp, here[1] + 1 if stamp == here[0] else 1)
                again, last = (
                    here <= last,
                    last if here < last else ("", 0),
                )  # later ones are new, whatever the clock
                if again:
                    continue
            if not text.endswith("\n") and "--follow" in command:
                break  # the connection has ended within the line, which comes again
            read[pod] = max(here, last)
            yield text
        said = ". ".join(process.stderr.read().decode(errors="replace").splitlines())
        if process.wait() and "--follow" not in command:
            raise LaunchError(_NOISE.sub("", f"kubectl: {command_line.with_hint(said, _HINTS)}"))
    finally:
        process.kill()
        process.communicate()


def taken_back(error: LaunchError, command: tuple[str, ...], folder: Path) -> LaunchError:
    """Deletes what a manifest has created before its creation failed; returns the error to raise."""
    if "AlreadyExists" in str(
        error
    ):  # somebody has made them since the server looked: they are not ours
        return error
    try:
        run(command, folder)
    except LaunchError as second:
        return LaunchError(
            f"{error}. What had been created by then could not be taken back: {second}"
        )
    return error

"""kubectl: commands for jobs of a cluster, their answers, and hints for their errors."""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

from launch.clients import command_line
from launch.job import Record, State
from launch.k8s.manifest import CONTAINER, JOB_LABEL, Object
from samestep.errors import LaunchError
from samestep.stored_json import Count, JsonError, parse_json

_RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "job": "jobs.batch"}
_OWNED = {"jobset": "configmaps", "job": "services,configmaps"}  # a JobSet deletes its service
_POLICIES = "networkpolicies.networking.k8s.io"

_INDEX = "batch.kubernetes.io/job-completion-index"
_POLL_SECONDS = 2.0
_DETAIL_WIDTH = 120
_ENDED = {"Completed": "done", "Complete": "done", "Failed": "failed"}  # by a job's condition
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.*)", re.DOTALL)

# kubectl logs each of its own attempts before the error message of the command.
_NOISE = re.compile(
    r"[EWIF]\d{4} [\d:.]+ +\d+ \S+\] (\"[^\"]*\" err=\"([^\"\\]|\\.)*\"|.*?)(\. |(?=; )|$)"
)
_HINTS = {
    "provide credentials|unauthorized|logged in to the server|getting credentials|expired": (
        "your credentials are not valid there (any more): log in again, as with `gcloud container "
        "clusters get-credentials CLUSTER` or `aws eks update-kubeconfig --name CLUSTER`"
    ),
    'no matches for kind "?JobSet|resource type "?jobsets': (
        "JobSet is not installed on this cluster: install it (docs/kubernetes.md says how), or set "
        "cluster.controller=job"
    ),
    'namespaces? "[^"]*" not found': (
        "`kubectl get namespaces` lists the existing ones; set cluster.namespace to one, or create "
        "it with `kubectl create namespace NAME`"
    ),
    "exceeded quota": (
        "`kubectl describe resourcequota` shows what the namespace may use and does; lower "
        "cluster.nodes, or end other jobs"
    ),
    "forbidden": (
        "your account needs the verbs create, get, list and delete on configmaps, networkpolicies, "
        "services, jobs, jobsets and pods of this namespace, and get on pods/log: ask its "
        "administrator, or set cluster.namespace. Without networkpolicies, set "
        "cluster.network_policy=false, and other pods reach the job's ports"
    ),
    "context .*does not exist|context was not found": (
        "`kubectl config get-contexts` lists the existing ones; set cluster.context to one"
    ),
    "failed calling webhook|no endpoints available": (
        "a controller (JobSet's or Kueue's) does not run: look at `kubectl get pods "
        "--all-namespaces`"
    ),
    "unknown field": "it needs Kubernetes 1.31 or newer, and JobSet 0.6 or newer",
    "already exists": (
        "another launch has this name: delete it with `kubectl delete`, or choose another output"
    ),
    (
        "refused|no such host|(i/o|handshake) timeout|deadline exceeded|unable to connect|x509"
        "|no route|unreachable"
    ): (
        "the cluster's API server cannot be reached from here: look at the address in `kubectl "
        "config view --minify`, at VPN and proxy, and whether the cluster runs"
    ),
}


def arguments(context: str | None, namespace: str) -> tuple[str, ...]:
    """The beginning of a command for one namespace of one cluster."""
    return ("kubectl", *(("--context", context) if context else ()), "--namespace", namespace)


def run(command: Iterable[str], folder: Path | None = None, text: str = "") -> str:
    """Runs kubectl and returns its output.

    Raises:
        LaunchError: with its error message and a hint, without its log of each attempt.
    """
    try:
        return command_line.run(list(command), _HINTS, folder, text)
    except LaunchError as error:
        raise LaunchError(_NOISE.sub("", str(error))) from None


def current_context() -> str:
    """The current context of kubectl; "" inside a cluster, where it needs none."""
    try:
        return run(["kubectl", "config", "current-context"]).strip()
    except LaunchError:
        return ""


def delete(record: Record) -> None:
    """Deletes a job with its objects, without waiting: its pods get time to save a checkpoint.

    Raises:
        LaunchError: the job does not exist.
    """
    controller = record.about["controller"]
    kinds = f"{_RESOURCES[controller]},{_OWNED[controller]}"
    if record.about.get("network_policy") != "false":
        kinds += f",{_POLICIES}"
    how = ["--ignore-not-found", "--cascade=foreground", "--wait=false"]
    if not run([*_place(record), "delete", kinds, record.about["name"], *how]).strip():
        raise LaunchError(
            f"job {record.id} is no longer on the cluster: there is nothing to cancel."
        )


def _place(record: Record) -> tuple[str, ...]:
    return arguments(record.about["context"], record.about["namespace"])


def states(records: Iterable[Record]) -> dict[Path, State]:
    """States of jobs by folder, with one request for each namespace."""
    by_place: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        by_place[_place(record)].append(record)
    found: dict[Path, State] = {}
    for place, jobs in by_place.items():
        resources = {_RESOURCES[record.about["controller"]] for record in jobs}
        kinds = ",".join(sorted(resources | {"jobs.batch", "pods"}))
        objects: dict[str, list[Object]] = defaultdict(list)
        for item in _get(place, kinds, JOB_LABEL):
            objects[item["metadata"]["labels"][JOB_LABEL]].append(item)
        # A job without objects was deleted, so it has no state.
        for record in jobs:
            if state := _state(record, objects[record.about["name"]]):
                found[record.folder] = state
    return found


class _Labels(TypedDict):
    labels: dict[str, str]
    name: str


class _Condition(TypedDict):
    type: str
    status: str
    message: NotRequired[str]


class _Status(TypedDict, total=False):
    restarts: Count
    conditions: list[_Condition]


class _Object(TypedDict):
    kind: str
    metadata: _Labels
    status: NotRequired[_Status]


class _List(TypedDict):
    items: list[_Object]


def _get(place: tuple[str, ...], kinds: str, selector: str) -> list[Object]:
    text = run([*place, "get", kinds, "--selector", selector, "--output", "json"])
    try:
        return [dict(item) for item in parse_json(text, _List)["items"]]
    except JsonError as error:
        raise LaunchError(
            f"kubectl has answered something else than a list of objects: {error}. Check its "
            "version"
        ) from error


def _state(record: Record, objects: list[Object]) -> State | None:
    controller, name = record.about["controller"], record.about["name"]
    # A JobSet's Job has the same label, and another name.
    own = [
        item
        for item in objects
        if item["kind"].lower() == controller and item["metadata"]["name"] == name
    ]
    if not own:
        return None
    job, pods = own[0], [item for item in objects if item["kind"] == "Pod"]
    status = job.get("status", {})
    restarts = status.get("restarts", 0) + sum(_phase(pod) == "Failed" for pod in pods)
    for condition in status.get("conditions", []):
        word = _ENDED.get(condition["type"])
        if word and condition["status"] == "True":
            return State(word, False, "", restarts, _short(condition.get("message", "")))
    if "deletionTimestamp" in job["metadata"]:
        return State("ending", True, _nodes(pods), restarts)
    if job["spec"].get("suspend"):
        queue = job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        detail = f"waits for its turn in queue {queue}" if queue else ""
        return State("suspended", True, "", restarts, detail)
    if not pods:
        detail = f"no pod has been made yet: see `kubectl describe {_RESOURCES[controller]} {name}`"
        return State("pending", True, "", restarts, detail)
    running = [pod for pod in pods if _phase(pod) == "Running"]
    waiting = [_why_pending(pod) for pod in pods if _phase(pod) == "Pending"]
    detail = next(filter(None, waiting), "")
    return State("running" if running else "pending", True, _nodes(running), restarts, detail)


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _nodes(pods: Iterable[Object]) -> str:
    """The first node's name, and the number of others."""
    names = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
    return f"{names[0]} +{len(names) - 1}" if len(names) > 1 else "".join(names)


def _why_pending(pod: Object) -> str:
    status = pod.get("status", {})
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key, []):
            waiting = container.get("state", {}).get("waiting")
            if waiting:
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
    """The log of a run's first pod and of its replacements, or of all pods of a build in turn.

    If the cluster has deleted the first pod, as it does with running pods once another has failed,
    the logs of the remaining pods say why.

    Args:
        goes_on: whether more may come; called when there is no more.

    Raises:
        LaunchError: there is no log and none will come, or the cluster does not answer.
    """
    place, selector = _place(record), f"{JOB_LABEL}={record.about['name']}"
    # By pod: the time stamp of its last line, and the number of lines with that stamp.
    read: dict[str, tuple[str, int]] = {}
    ended: set[str] = set()
    while True:
        last_look = not goes_on()  # asked before reading, so that nothing is missed
        pods = _get(place, "pods", selector)
        pods.sort(key=lambda pod: (_index(pod), pod["metadata"]["creationTimestamp"]))
        if record.about["action"] == "train":
            pods = [pod for pod in pods if _index(pod) == 0] or pods
        for pod in pods:
            name = pod["metadata"]["name"]
            if name in ended or not _has_started(pod):
                continue
            follow = [] if last_look else ["--follow"]
            command = [*place, "logs", name, "--container", CONTAINER, *follow]
            yield from _lines(command, name, read)
            if _phase(pod) in ("Succeeded", "Failed"):
                ended.add(name)
        if last_look:
            break
        time.sleep(_POLL_SECONDS)
    if not read:
        raise LaunchError(
            f"no pod of {record.id} has written anything yet. `samestep jobs` says what it waits "
            "for."
        )


def _index(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(_INDEX, 0))


def _has_started(pod: Object) -> bool:
    for container in pod.get("status", {}).get("containerStatuses", []):
        if container["name"] == CONTAINER:
            return bool({"running", "terminated"} & container.get("state", {}).keys())
    return False


def _lines(command: list[str], pod: str, read: dict[str, tuple[str, int]]) -> Iterator[str]:
    """The lines after the last one that was read: a connection may end while it follows a log.

    The server resends all lines of the last second. A line is new if its stamp is later than the
    last line's, or equal with a higher count: after reading up to (12.5 s, 2 lines), the first two
    lines at 12.5 s are repeats and the third is new.
    """
    last = read.get(pod, ("", 0))
    since = ["--since-time", last[0]] if last[0] else []  # the server rounds down to a second
    # Bytes, as a line of text would end at each \r of a progress bar.
    process = subprocess.Popen(
        [*command, "--timestamps", *since],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    here = ("", 0)  # stamp and count of the current line, as in `read`
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            text = line.decode(errors="replace")
            if match := _STAMPED.fullmatch(text):
                stamp, text = match.groups()
                here = (stamp, here[1] + 1 if stamp == here[0] else 1)
                repeated = here <= last
                if here >= last:
                    last = ("", 0)  # all further lines are new, even if the clock goes back
                if repeated:
                    continue
            if not text.endswith("\n") and "--follow" in command:
                break  # the connection has ended within a line, which will be resent
            read[pod] = max(here, last)
            yield text
        said = ". ".join(process.stderr.read().decode(errors="replace").splitlines())
        if process.wait() and "--follow" not in command:
            raise LaunchError(_NOISE.sub("", f"kubectl: {command_line.with_hint(said, _HINTS)}"))
    finally:
        process.kill()
        process.communicate()

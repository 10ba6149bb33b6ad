"""Manifests of Kubernetes: the templates of all objects, and how they are written as YAML."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import yaml

from launch.job import CONFIG, JobSpec
from samestep.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_UNAVAILABLE, EXIT_USAGE

Object: TypeAlias = dict[str, Any]

JOB_LABEL = "samestep.dev/job"
ACTION_LABEL = "samestep.dev/action"
CONTAINER = "samestep"
GROUP = "node"  # a JobSet's only group of pods

# A JobSet's pod is NAME-node-0-INDEX-SUFFIX, which must be a DNS label: at most 63 characters.
_NAME_LENGTH = 63 - len(f"-{GROUP}-0-9999-abcde")
_PLAIN = re.compile(r"[A-Za-z/]{2}.*")

# Templates: `fill` replaces $NAME by a value of any type, and drops keys without a value.
CONFIG_MAP = f"""
apiVersion: v1
kind: ConfigMap
metadata: {{name: $name, namespace: $namespace, labels: $labels}}
immutable: true
data: {{{CONFIG}: $config}}
"""
# Without a cluster IP, the service gives each pod a name: JOB-INDEX.SERVICE.
SERVICE = f"""
apiVersion: v1
kind: Service
metadata: {{name: $name, namespace: $namespace, labels: $labels}}
spec:
  clusterIP: "None"
  publishNotReadyAddresses: true
  selector: {{{JOB_LABEL}: $name}}
"""
# Ports of the rendezvous, of snapshots and of the collectives are open to the job's own pods only.
# What pods send is not restricted: they need name servers and object stores.
POLICY = f"""
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: $name, namespace: $namespace, labels: $labels}}
spec:
  podSelector: {{matchLabels: {{{JOB_LABEL}: $name}}}}
  policyTypes: [Ingress]
  ingress:
  - from: [{{podSelector: {{matchLabels: {{{JOB_LABEL}: $name}}}}}}]
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: $name, namespace: $namespace, labels: $labels}
spec: $spec
"""
JOBSET = f"""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: $name, namespace: $namespace, labels: $labels, annotations: $annotations}}
spec:
  suspend: $suspend
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true  # pods can be found by name before they are ready
    subdomain: $name
  failurePolicy:
    maxRestarts: $restarts
    rules:  # a failure that podFailurePolicy calls final is final for the JobSet, too
    - {{name: final, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}}
  replicatedJobs:
  - name: {GROUP}
    replicas: 1
    template:
      metadata: {{labels: $job_labels}}
      spec: $spec
"""
ONE_NODE_POOL = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
# The first rule that matches counts. Ignore replaces the pod without counting a failure; failures
# that match no rule count towards backoffLimit. Codes 69 and 75: the pod has waited in vain for
# others, or was asked to end and has saved a checkpoint, so it continues, evicted or not.
INDEXED = f"""
completionMode: Indexed
completions: $pods
parallelism: $pods
backoffLimit: $restarts
podFailurePolicy:
  rules:
  - action: Ignore
    onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  - action: Ignore
    onExitCodes:
      containerName: {CONTAINER}
      operator: In
      values: [{EXIT_UNAVAILABLE}, {EXIT_PREEMPTED}]
  - action: FailJob
    onExitCodes: {{containerName: {CONTAINER}, operator: In, values: [{EXIT_FAILED}, {EXIT_USAGE}]}}
template: $pod
"""
POD = f"""
metadata:
  labels: $labels
  annotations: $annotations
spec:
  restartPolicy: Never  # podFailurePolicy requires it: the Job replaces pods
  terminationGracePeriodSeconds: $grace_seconds
  # The first process of a container ignores SIGTERM until it has set a handler. With a shared
  # namespace, the command is not the first process.
  shareProcessNamespace: true
  enableServiceLinks: false  # a service named master would set MASTER_PORT
  automountServiceAccountToken: false
  securityContext:
    runAsNonRoot: $non_root
    runAsUser: $user
    runAsGroup: $user
    fsGroup: $user
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {{type: RuntimeDefault}}
  serviceAccountName: $service_account
  priorityClassName: $priority_class
  nodeSelector: $node_selector
  tolerations: $tolerations
  containers:
  - name: {CONTAINER}
    image: $image
    imagePullPolicy: $pull_policy
    command: $command
    workingDir: $directory
    env: $environment
    resources:
      requests: {{cpu: $cpus, memory: $memory}}
      limits: $limits
    securityContext: $security
    volumeMounts: $mounts
  volumes: $volumes
"""
UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# The TPU driver locks the memory that chips read and write: more than a node may allow, and without
# this capability root cannot raise that limit. The command continues if it cannot. Kubernetes turns
# $$ into $.
LOCKS_MEMORY = {"capabilities": {"add": ["SYS_RESOURCE"]}}
LOCKING_MEMORY = ["sh", "-c", 'ulimit -l 68719476736; exec "$$@"', "sh"]


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as blocks, and quotes text that other YAML readers misread: 1e3, y."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None if _PLAIN.fullmatch(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def ignore_aliases(self, data: object) -> bool:
        return True  # readers of the file should not have to follow them


_Dumper.add_representer(str, _Dumper.represent_str)


def name_of(job: JobSpec) -> str:
    """A name for the job that is unique in a namespace.

    Several users share a namespace, and each numbers launches from 1, so the name ends in a digest.
    """
    digest = hashlib.sha256(f"{job.folder}\0{job.config}".encode()).hexdigest()[:4]
    tail = f"-{job.folder.name}-{digest}"
    head = job.name if job.name[0].isalpha() else f"run-{job.name}"  # services require a letter
    return head[: _NAME_LENGTH - len(tail)].rstrip("-") + tail


def fill(template: str, **values: object) -> Object:
    """An object from a YAML template, with each `$NAME` replaced by a value of any type.

    Values are not expanded further. Keys with None or an empty list or mapping are dropped.
    """
    parts = yaml.safe_load(template)
    return {key: _expand(part, values) for key, part in parts.items()}


def _expand(node: object, values: Mapping[str, object]) -> object:
    if isinstance(node, str) and node.startswith("$"):
        return values[node[1:]]
    if isinstance(node, list):
        return [_expand(item, values) for item in node]
    if not isinstance(node, dict):
        return node
    expanded = {key: _expand(value, values) for key, value in node.items()}
    return {key: value for key, value in expanded.items() if value not in (None, {}, [])}


def environment(variables: Mapping[str, str], secrets: Mapping[str, str]) -> list[Object]:
    """Environment variables of a container; secrets are named as secret/key."""
    pod_name = {"fieldRef": {"fieldPath": "metadata.name"}}
    found: list[Object] = [{"name": "SAMESTEP_NODES", "valueFrom": pod_name}]
    for name, value in variables.items():
        # Kubernetes expands $(NAME) in a value, and turns $$ into $.
        found.append({"name": name, "value": value.replace("$", "$$")})
    for name, place in secrets.items():
        secret, key = place.split("/")
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        found.append({"name": name, "valueFrom": reference})
    return found


def dump(documents: Iterable[Object]) -> str:
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
    """The name, controller and action of a manifest's job, which is its last object."""
    *_, last = yaml.safe_load_all(text)
    metadata = last["metadata"]
    return metadata["name"], last["kind"].lower(), metadata["labels"][ACTION_LABEL]


def pod_of(text: str) -> Object:
    """The template of a manifest's pods."""
    *_, last = yaml.safe_load_all(text)
    if last["kind"] == "JobSet":
        (group,) = last["spec"]["replicatedJobs"]
        last = group["template"]
    pod: Object = last["spec"]["template"]
    return pod

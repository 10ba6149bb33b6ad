"""Manifests that match the schemas of several versions of Kubernetes, and calls of kubectl.

There is no API server here. `kubectl` is a program of the tests with recorded answers of the real
one; where the real one is installed, it must understand the commands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from launch import records
from launch.job import JobSpec, Record
from launch.k8s import kubectl as client
from launch.k8s import manifest
from launch.k8s.parts import Tpu, Volume
from launch.kinds.kubernetes import MANIFEST, Config
from launch.submission import checks, submit
from samestep.config import decode, to_tree
from samestep.errors import ConfigError, LaunchError

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.31", "1.33", "1.36")
WORK = Volume("/work", claim="samestep-work")
GPU = Config(
    "registry.example.com/samestep:cuda",
    namespace="training",
    nodes="2-8",
    gpus_per_node=8,
    cpus_per_node=64,
    memory="500Gi",
    directory="/work",
    volumes=(WORK,),
    secrets={"WANDB_API_KEY": "wandb/api-key"},
)
TRAIN = JobSpec(
    "bert-large",
    "train",
    "output: runs/bert_large\ndata:\n  path: datasets/wikipedia_en\n",
    Path("/home/user/.local/state/samestep/launches/bert-large/launch/003"),
    Path("/home/user"),
)
BUILD = replace(
    TRAIN,
    name="c4-en",
    action="build",
    config="output: datasets/c4_en\nsource: {kind: c4}\n",
    tasks=64,
)
MANIFESTS: dict[str, tuple[Config, JobSpec]] = {
    "gpu_jobset": (GPU, TRAIN),
    "indexed_job": (
        Config(
            "samestep:1.0",
            controller="job",
            image_pull_policy="Never",
            context="minikube",
            processes_per_node=2,
            nodes=3,
            directory="/work",
            volumes=(WORK, Volume("/corpora", bucket="my-corpora")),
            variables={"NCCL_DEBUG": "INFO", "PRICE": "$(HOME) $$5", "LEVEL": "1e3"},
            interface="eth0",
            service_account="trainer",
            queue="team-a",
            priority_class="low",
            node_selector={"cloud.google.com/gke-spot": "true"},
            tolerations=(
                {"key": "spot", "operator": "Exists", "effect": "NoSchedule"},
                {
                    "key": "node.kubernetes.io/unreachable",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 60,
                },
            ),
            labels={"team": "a"},
            user=1234,
            restarts=0,
        ),
        replace(TRAIN, stop_seconds=24.5),
    ),
    "tpu_slice": (
        Config("samestep:tpu", tpu=Tpu("tpu-v5-lite-podslice", "4x4"), service_account="samestep"),
        replace(TRAIN, config="output: runs/bert\ncheckpoint: {folder: gs://bucket/bert}\n"),
    ),
    "data_build": (replace(GPU, gpus_per_node=0, nodes=None), BUILD),
}


def documents(config: Config, job: JobSpec = TRAIN) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(config.render(job).files[MANIFEST]))


def job_of(config: Config, job: JobSpec = TRAIN) -> dict[str, Any]:
    """The Job, of a JobSet the only one in it."""
    last = documents(config, job)[-1]
    if last["kind"] == "Job":
        return last
    (group,) = last["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", **group["template"]}


def pod_of(config: Config, job: JobSpec = TRAIN) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **job_of(config, job)["spec"]["template"]}


def environment(config: Config, job: JobSpec = TRAIN) -> dict[str, Any]:
    (container,) = pod_of(config, job)["spec"]["containers"]
    return {each.pop("name"): each for each in container["env"]}


# --- manifests


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_those_that_were_looked_at(name: str):
    config, job = MANIFESTS[name]
    assert config.render(job).files[MANIFEST] == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_is_what_its_schema_says(name: str, version: str):
    config, job = MANIFESTS[name]
    plain = [document for document in documents(config, job) if document["kind"] != "JobSet"]
    for each in (*plain, job_of(config, job), pod_of(config, job)):
        kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_there_is_not_would_be_noticed():
    pod = pod_of(GPU)
    pod["spec"]["containers"][0]["workingDirectory"] = "/work"
    with pytest.raises(kubernetes_validate.ValidationError, match="workingDirectory"):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", ["gpu_jobset", "tpu_slice"])
def test_jobsets_lose_no_field_in_their_own_api(name: str):
    jobset = documents(*MANIFESTS[name])[-1]
    read = JobsetV1alpha2JobSet.from_dict(jobset)
    assert read is not None
    assert read.to_dict() == jobset


def test_all_objects_are_found_by_one_label():
    for config, job in MANIFESTS.values():
        *_, last = found = documents(config, job)
        names = {document["metadata"]["name"] for document in found}
        # Other commands that read the manifest, as kubectl diff, look where it will be created.
        assert {each["metadata"]["namespace"] for each in found} == {config.namespace}
        labels = {
            each["metadata"]["labels"][manifest.JOB_LABEL]
            for each in (*found, job_of(config, job), pod_of(config, job))
        }
        assert names == labels == {last["metadata"]["name"]}
        assert manifest.labels_of(config.render(job).files[MANIFEST]) == (
            *names,
            last["kind"].lower(),
            job.action,
        )


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_pods_of_the_same_job_reach_its_ports(name: str):
    config, job = MANIFESTS[name]
    found = documents(config, job)
    (policy,) = (each for each in found if each["kind"] == "NetworkPolicy")
    assert found.index(policy) < len(found) - 1  # it is there before the first pod
    mine = {"matchLabels": {manifest.JOB_LABEL: found[-1]["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": mine,
        "policyTypes": ["Ingress"],  # what pods send to name servers and stores is not restricted
        "ingress": [{"from": [{"podSelector": mine}]}],
    }
    labels = pod_of(config, job)["metadata"]["labels"]
    assert mine["matchLabels"].items() <= labels.items()
    without = documents(replace(config, network_policy=False), job)
    assert without == [each for each in found if each is not policy]
    wider = replace(config, patch={"NetworkPolicy": {"spec": {"ingress": [{}]}}})
    (policy,) = (each for each in documents(wider, job) if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{}]


def test_the_first_pod_is_where_all_meet():
    """Of an Indexed Job, a pod's name is JOB-INDEX, and a JobSet's job is JOBSET-GROUP-NUMBER."""
    jobset = documents(GPU)[-1]
    name, network = jobset["metadata"]["name"], jobset["spec"]["network"]
    assert network == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": name,
    }
    assert pod_of(GPU)["spec"]["containers"][0]["command"] == [
        "samestep",
        "train",
        "/etc/samestep/config.yaml",
        "--elastic",
        "2:8",
        "--rendezvous",
        f"{name}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.{name}:29400",
    ]
    _, _, service, job = documents(replace(GPU, controller="job"))
    assert service["spec"]["clusterIP"] == "None"
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (
        pod["containers"][0]["command"][-1]
        == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    )


def test_a_preempted_pod_is_replaced_and_a_mistake_is_final():
    """The first rule that fits counts; Ignore makes a new pod and counts no failure."""
    for config in (GPU, replace(GPU, controller="job"), MANIFESTS["tpu_slice"][0]):
        job = MANIFESTS["tpu_slice"][1] if config.tpu else TRAIN
        spec = job_of(config, job)["spec"]
        evicted, preempted, final = spec["podFailurePolicy"]["rules"]
        assert evicted == {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
        assert (preempted["action"], preempted["onExitCodes"]["values"]) == ("Ignore", [69, 75])
        assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [1, 2])
        (container,) = spec["template"]["spec"]["containers"]
        assert {rule["onExitCodes"]["containerName"] for rule in (preempted, final)} == {
            container["name"]
        }
        assert (
            spec["template"]["spec"]["restartPolicy"] == "Never"
        )  # or there may be no podFailurePolicy
        assert spec["backoffLimit"] == config.restarts
    policy = documents(replace(GPU, restarts=7))[-1]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]


def test_pods_get_a_minute_more_than_the_run_for_its_checkpoint():
    assert (
        pod_of(GPU, replace(TRAIN, stop_seconds=25.2))["spec"]["terminationGracePeriodSeconds"]
        == 86
    )


def test_a_run_ends_with_its_first_pod():
    for config in (GPU, replace(GPU, nodes=8), replace(GPU, nodes=2, controller="job")):
        assert job_of(config)["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "successPolicy" not in job_of(replace(GPU, nodes=1))["spec"]
    assert "successPolicy" not in job_of(GPU, BUILD)["spec"]  # every slice is needed
    assert (GPU.devices, replace(GPU, nodes=8).devices) == (tuple(range(16, 65, 8)), (64,))


@pytest.mark.parametrize(
    ("topology", "chips_per_node", "hosts"),
    [("4x4", 4, 4), ("2x2x4", 4, 4), ("2x4", 8, 1), ("1x1", 1, 1), ("16x16", 4, 64)],
)
def test_a_slice_has_as_many_pods_as_machines(topology: str, chips_per_node: int, hosts: int):
    config = replace(
        GPU, nodes=None, gpus_per_node=0, tpu=Tpu("tpu-v5-lite-podslice", topology, chips_per_node)
    )
    spec = job_of(config)["spec"]
    assert spec["completions"] == spec["parallelism"] == hosts
    assert config.devices == (hosts * chips_per_node,)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips_per_node}
    assert container["command"][-4:-2] == ["--elastic", f"{hosts}:{hosts}"]
    assert not {"RANK", "WORLD_SIZE", "TPU_WORKER_ID"} & {each["name"] for each in container["env"]}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    # Others may want the machines of a pool of slices that have only one each.
    assert ("annotations" in documents(config)[-1]["metadata"]) == (hosts > 1)


def test_building_takes_no_devices():
    for config in (GPU, replace(GPU, nodes=None, gpus_per_node=0, tpu=Tpu("tpu-v6e-slice", "4x4"))):
        pod = pod_of(config, BUILD)["spec"]
        assert "limits" not in pod["containers"][0]["resources"]
        assert "nodeSelector" not in pod
        kinds = [document["kind"] for document in documents(config, BUILD)]
        assert kinds == ["ConfigMap", "NetworkPolicy", "Job"]
        assert job_of(config, BUILD)["spec"]["completions"] == BUILD.tasks


def test_pods_that_ask_for_no_gpus_see_none():
    """Of an image that asks for all of them."""
    name, void = "NVIDIA_VISIBLE_DEVICES", {"value": "void"}
    assert name not in environment(GPU)
    assert name not in environment(replace(GPU, gpu_resource="amd.com/gpu"))
    assert environment(GPU, BUILD)[name] == void
    for config, job in (MANIFESTS["indexed_job"], MANIFESTS["tpu_slice"]):
        assert environment(config, job)[name] == void
    assert environment(replace(GPU, variables={name: "all"}), BUILD)[name] == {"value": "all"}


def expand(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of $(NAME) and $$ in commands and values."""
    out, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        out += before
        if rest.startswith("$"):
            out, rest = out + "$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            name, _, rest = rest[1:].partition(")")
            out += variables.get(name, f"$({name})")
        else:
            out += "$"
    return out + rest


@pytest.mark.parametrize(("index", "part"), [(0, "1/64"), (63, "64/64")])
def test_each_pod_of_a_build_makes_its_slice(tmp_path: Path, index: int, part: str):
    (tmp_path / "samestep").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "samestep").chmod(0o755)
    config = replace(GPU, variables={"HOME": "/x$(JOB_COMPLETION_INDEX + 1)"})
    (container,) = pod_of(config, BUILD)["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    there = {name: expand(value, {}) for name, value in given.items()} | {
        "JOB_COMPLETION_INDEX": str(index)
    }
    command = [expand(word, there) for word in container["command"]]
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=there | paths, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["data", "build", "/etc/samestep/config.yaml", "--slice", part]


NASTY = "a 'b' \"c\" $(touch /tmp/x) `id` ; \\ $HOME\n- kind: Pod\n---\n# ü \u2028\t\x07"


def test_nasty_words_are_only_words(tmp_path: Path):
    tree = {"output": f"/work/{NASTY}", "data": {"path": NASTY}, NASTY: NASTY}
    job = replace(TRAIN, config=yaml.safe_dump(tree, allow_unicode=True))
    for controller in ("jobset", "job"):
        config = replace(
            GPU, controller=controller, variables={"WORDS": NASTY}, directory=f"/work/{NASTY}"
        )
        submission = config.render(job)
        found = documents(config, job)
        assert yaml.safe_load(found[0]["data"]["config.yaml"]) == tree
        assert len(found) == (3 if controller == "jobset" else 4)
        assert expand(environment(config, job)["WORDS"]["value"], {"HOME": "no"}) == NASTY
        (container,) = pod_of(config, job)["spec"]["containers"]
        assert container["workingDir"] == f"/work/{NASTY}"
        assert "touch" not in " ".join(
            (*container["command"], *submission.command, *submission.files)
        )


@pytest.mark.parametrize(
    "word", ["1e3", "0o17", "0x1F", "y", "n", "no", "null", "1_000", "12:30", "~", "", ".5", "-"]
)
def test_words_stay_words_for_other_readers_of_yaml(word: str):
    """kubectl reads 1e3 and y as a number and a boolean, which PyYAML writes without quotes."""
    text = replace(GPU, variables={"WORD": word}).render(TRAIN).files[MANIFEST]
    line = text.splitlines()[text.splitlines().index("              - name: WORD") + 1]
    assert line.strip() in (f'value: "{word}"', f"value: '{word}'")


def test_values_of_secrets_stay_where_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert "0123456789abcdef" not in GPU.render(TRAIN).files[MANIFEST]
    assert environment(GPU)["WANDB_API_KEY"] == {
        "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    }
    with pytest.raises(ConfigError, match="as wandb/key") as refused:
        replace(GPU, secrets={"WANDB_API_KEY": "0123456789abcdef"})
    assert "0123456789abcdef" not in str(refused.value)
    with pytest.raises(ConfigError, match="name it under secrets"):
        replace(GPU, variables={"WANDB_API_KEY": "0123456789abcdef"})


def test_kueue_starts_what_names_a_queue():
    for controller in ("jobset", "job"):
        job = documents(replace(GPU, controller=controller, queue="team-a"))[-1]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert job["spec"]["suspend"] is True
        assert "suspend" not in documents(replace(GPU, controller=controller))[-1]["spec"]


@pytest.mark.parametrize("name", ["x" * 40, "a-" * 19 + "b", "3b", "0"])
def test_names_fit_into_dns(name: str):
    """Services begin with a letter, and a JobSet's last pod has the longest name."""
    made = manifest.name_of(replace(TRAIN, name=name))
    assert manifest.name_of(replace(TRAIN, name=name)) == made
    assert made[0].isalpha()
    assert made.replace("-", "a").isalnum()
    assert "--" not in made
    assert len(f"{made}-node-0-9999-abcde") <= 63


def test_users_and_experiments_of_one_namespace_have_names_of_their_own():
    others = (
        replace(TRAIN, folder=Path("/home/other/launch/003")),
        replace(TRAIN, config="output: runs/other\n"),
        TRAIN,
    )
    assert len({manifest.name_of(job) for job in others}) == 3


def test_root_is_for_tpus_only():
    security = pod_of(GPU)["spec"]["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (
        True,
        10001,
        10001,
    )
    tpu = pod_of(*MANIFESTS["tpu_slice"])["spec"]
    assert tpu["securityContext"]["runAsUser"] == 0
    assert "runAsNonRoot" not in tpu["securityContext"]
    assert pod_of(*MANIFESTS["indexed_job"])["spec"]["securityContext"]["runAsUser"] == 1234


def test_tpus_may_lock_memory():
    """Only root: others have no capability of those that are added to their pod."""
    config, job = MANIFESTS["tpu_slice"]
    (container,) = pod_of(config, job)["spec"]["containers"]
    assert container["securityContext"] == {"capabilities": {"add": ["SYS_RESOURCE"]}}
    assert container["command"][:2] == ["sh", "-c"]
    for other, work in (
        (replace(config, user=1234), job),
        (replace(config, volumes=(WORK,), directory="/work"), BUILD),
    ):
        (container,) = pod_of(other, work)["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "securityContext" not in pod_of(replace(GPU, user=0))["spec"]["containers"][0]


@pytest.mark.parametrize("can", ["true", "false"])
def test_a_run_on_tpus_asks_for_locked_memory_first(tmp_path: Path, can: str):
    """Where the limit cannot be raised, it may be enough as it is."""
    (tmp_path / "samestep").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "samestep").chmod(0o755)
    (container,) = pod_of(*MANIFESTS["tpu_slice"])["spec"]["containers"]
    shell, option, script, *words = [expand(word, {}) for word in container["command"]]
    heard = f'ulimit() {{ echo "ulimit $*"; {can}; }}; '
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, option, heard + script, *words],
        env=paths,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["ulimit -l 68719476736", *words[2:]]
    assert words[1:4] == ["samestep", "train", "/etc/samestep/config.yaml"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nodes": 0}, "nodes must be a number"),
        ({"nodes": "8-2"}, "nodes must be a number"),
        ({"nodes": "all"}, "not all"),
        ({"gpus_per_node": -1}, "gpus_per_node must be at least 0, not -1"),
        ({"restarts": -1}, "restarts must be at least 0"),
        ({"user": -1}, "user must be at least 0"),
        ({"image": "--privileged"}, "image is '--privileged'"),
        ({"image": "a b"}, "image is 'a b'"),
        ({"context": "-x"}, "context is '-x'"),
        ({"namespace": "A_b"}, "namespace is 'A_b'"),
        ({"memory": "lots"}, "memory is 'lots'"),
        ({"shm": "8 GB"}, "shm is '8 GB'"),
        ({"labels": {"team": "a b"}}, "team='a b' is not a label"),
        ({"node_selector": {"a/b/c": "x"}}, "a/b/c='x' is not a label"),
        ({"directory": "work"}, "not work"),
        ({"volumes": (WORK, Volume("/work", claim="other"))}, "two have the mount /work"),
        ({"tpu": Tpu("tpu-v6e-slice", "4x4")}, "over several slices"),
        ({"variables": {"a-b": "c"}}, "variables.a-b is not the name"),
        ({"secrets": {"KEY": "a/b/c"}}, "secrets.KEY must give an environment variable a secret"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        replace(GPU, **settings)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Tpu("tpu-v5p-slice", "4"), "topology must be written as 4x4"),
        (
            lambda: Tpu("tpu-v5p-slice", "2x3", 4),
            "6 chips, which cannot be divided into machines with 4",
        ),
        (lambda: Tpu("tpu v5p", "2x2"), "accelerator is 'tpu v5p'"),
        (lambda: Volume("/data"), "needs one of claim and bucket"),
        (lambda: Volume("/data", claim="a", bucket="b"), "needs one of claim and bucket"),
        (lambda: Volume("data", claim="a"), "mount must be a folder"),
        (lambda: Volume("/a:b", claim="a"), "without a colon"),
        (lambda: Volume("/etc/samestep", claim="a"), "would hide what a pod needs"),
        (lambda: Volume("/data", bucket="gs://b"), "Leave out gs://"),
    ],
)
def test_parts_that_are_none_are_refused(make: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("config", "job", "kept"),
    [
        (GPU, TRAIN, True),
        (replace(GPU, directory=None), TRAIN, False),
        (replace(GPU, directory=None), replace(TRAIN, config="output: /work/runs/x\n"), True),
        (GPU, replace(TRAIN, config="output: /workshop/x\n"), False),
        (GPU, replace(TRAIN, config="output: ../x\n"), False),
        (
            replace(GPU, volumes=()),
            replace(TRAIN, config="output: x\ncheckpoint: {folder: s3://b/x}\n"),
            True,
        ),
        (replace(GPU, volumes=()), replace(TRAIN, config="output: x\ncheckpoint: 3\n"), False),
        (GPU, replace(TRAIN, config="output: x\ncheckpoint: {folder: /scratch/x}\n"), False),
        (
            GPU,
            replace(TRAIN, config="output: /scratch/x\ncheckpoint: {folder: checkpoints/x}\n"),
            True,
        ),
        (GPU, replace(TRAIN, config="output: x\ncheckpoint: {every: 10}\n"), True),
        (replace(GPU, volumes=(Volume("/work", bucket="b"),)), TRAIN, False),
        (replace(GPU, volumes=(WORK, Volume("/work/runs", bucket="b"))), TRAIN, False),
        (replace(GPU, volumes=(WORK, Volume("/work/data", bucket="b"))), TRAIN, True),
        (replace(GPU, volumes=()), BUILD, False),
    ],
)
def test_what_would_be_lost_with_the_pod_is_refused(config: Config, job: JobSpec, kept: bool):
    launch = submit.Launch("kubernetes", config, job, config.render(job), (), "x", None)
    if kept:
        checks._output(launch)
    else:
        with pytest.raises(ConfigError, match="would be lost with the job"):
            checks._output(launch)


def test_a_run_that_ignores_sigterm_is_refused():
    with pytest.raises(ConfigError, match=r"Kubernetes ends runs by SIGTERM. Add SIGTERM"):
        GPU.render(replace(TRAIN, stop_signals=("SIGUSR1",)))
    GPU.render(replace(TRAIN, stop_signals=()))  # has no checkpoint on purpose


@pytest.mark.parametrize(
    "file",
    sorted((ROOT / "configs" / "launch").glob("kubernetes_*.yaml")),
    ids=lambda file: file.stem,
)
def test_the_examples_are_launched(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    what = (
        "configs/data/python_docs.yaml"
        if "build" in file.stem
        else "configs/pretrain/bert_base.yaml"
    )
    launch = submit.prepare(str(file), what, [])
    assert launch.code is None
    assert list(tmp_path.iterdir()) == []
    described = yaml.safe_load(yaml.safe_dump(to_tree(launch.cluster)))
    assert decode(records.KINDS.schema("kubernetes", "cluster"), described) == launch.cluster


# --- kubectl

KUBECTL = f"""#!{sys.executable}
import json, pathlib, sys
root = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
verb = next(word for word in arguments if word in ("create", "get", "logs", "delete", "config"))
manifest = pathlib.Path("manifest.yaml")
read = manifest.read_text() if "-f" in arguments else None
with (root / "calls.jsonl").open("a") as calls:
    typed = sys.stdin.read() if not sys.stdin.isatty() else ""
    calls.write(json.dumps([arguments, read, typed]) + chr(10))
answers = json.loads((root / "answers.json").read_text())
verb = "dry-run" if "--dry-run=server" in arguments else verb
code, out, error = answers[verb].pop(0) if len(answers[verb]) > 1 else answers[verb][0]
(root / "answers.json").write_text(json.dumps(answers))
sys.stdout.write(out)
sys.stderr.write(error)
sys.exit(code)
"""


@dataclass
class Kubectl:
    """A program with a list of answers; it repeats the last one."""

    folder: Path

    def answers(self, **verbs: Iterable[tuple[int, str, str]]) -> None:
        told = json.loads((self.folder / "answers.json").read_text())
        told |= {verb.replace("_", "-"): list(given) for verb, given in verbs.items()}
        (self.folder / "answers.json").write_text(json.dumps(told))

    @property
    def calls(self) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [json.loads(line)[0] for line in lines]

    @property
    def manifests(self) -> list[str]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [read for _, read, _ in map(json.loads, lines) if read]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    (folder / "calls.jsonl").touch()
    (folder / "answers.json").write_text("{}")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.01)
    made = Kubectl(folder)
    fine = [(0, "made", "")]
    made.answers(
        dry_run=fine, create=fine, delete=[(0, 'jobset.jobset.x-k8s.io "x" deleted\n', "")]
    )
    made.answers(config=[(0, "gke_project_zone_cluster\n", "")])
    return made


def prepared(tmp_path: Path, config: Config = GPU) -> submit.Launch:
    job = replace(TRAIN, folder=tmp_path / "launches" / "bert-large" / "launch" / "001")
    return submit.Launch(
        "kubernetes", config, job, config.render(job), ("x.yaml",), "runs/bert_large", None
    )


def test_a_launch_is_looked_at_by_the_server_first(kubectl: Kubectl, tmp_path: Path):
    launch = prepared(tmp_path)
    launch.cluster.check()
    record = submit.submit(launch)
    place = ["--namespace", "training"]
    assert kubectl.calls == [
        [*place, "create", "--dry-run=server", "-f", MANIFEST],
        ["config", "current-context"],
        [*place, "create", "-f", MANIFEST],
    ]
    assert kubectl.manifests == [launch.submission.files[MANIFEST]] * 2
    name = manifest.name_of(launch.job)
    assert (record.id, record.kind) == (name, "kubernetes")
    assert record.about == {
        "context": "gke_project_zone_cluster",
        "namespace": "training",
        "name": name,
        "controller": "jobset",
        "action": "train",
        "network_policy": "true",
    }
    assert records.find(name) == record
    assert records.cluster_of(record) == launch.cluster


def test_a_context_that_is_named_is_kept_to(kubectl: Kubectl, tmp_path: Path):
    record = submit.submit(prepared(tmp_path, replace(GPU, context="minikube", controller="job")))
    assert (record.about["context"], record.about["controller"]) == ("minikube", "job")
    assert all(
        call[:4] == ["--context", "minikube", "--namespace", "training"] for call in kubectl.calls
    )


ATTEMPT = (
    'E1122 02:39:19.588780   31608 memcache.go:265] "Unhandled Error" err="couldn\'t get current '
    "server API group "
    'list: Get \\"https://10.0.0.1/api?timeout=32s\\": dial tcp 10.0.0.1:443: connect: '
    'connection refused"\n'
)
ERRORS = {
    "unreachable": (
        ATTEMPT
        * 5
        + "The connection to the server 10.0.0.1 was refused - did you specify the right host or "
        "port?\n",
        "cannot be reached from here",
    ),
    "no such host": (
        "Unable to connect to the server: dial tcp: lookup cluster.example.com: no such host\n",
        "cannot be reached from here",
    ),
    "openapi": (
        'error: error validating "manifest.yaml": error validating data: failed to download '
        "openapi: Get "
        '"http://127.0.0.1:9/openapi/v2?timeout=32s": dial tcp 127.0.0.1:9: connect: connection '
        "refused; if you choose "
        "to ignore these errors, turn validation off with --validate=false\n",
        "cannot be reached from here",
    ),
    "unauthorized": (
        ATTEMPT.replace("connect: connection refused", "Unauthorized") * 3
        + "error: You must be logged in to the server (Unauthorized)\n",
        "log in again",
    ),
    "plugin": (
        "Unable to connect to the server: getting credentials: exec: executable "
        "gke-gcloud-auth-plugin failed with "
        "exit code 1\n",
        "log in again",
    ),
    "forbidden": (
        'Error from server (Forbidden): error when creating "manifest.yaml": '
        "jobsets.jobset.x-k8s.io is forbidden: "
        'User "ada" cannot create resource "jobsets" in API group "jobset.x-k8s.io" in the '
        'namespace "training"\n',
        "needs the verbs create, get, list and delete",
    ),
    "no right to network policies": (
        'Error from server (Forbidden): error when creating "manifest.yaml": '
        "networkpolicies.networking.k8s.io is forbidden: "
        'User "ada" cannot create resource "networkpolicies" in API group "networking.k8s.io" in '
        'the namespace "training"\n',
        r"set cluster\.network_policy=false",
    ),
    "quota": (
        'Error from server (Forbidden): error when creating "manifest.yaml": jobs.batch "x" is '
        "forbidden: exceeded "
        "quota: gpus, requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: "
        "count/jobs.batch=4\n",
        "may use and does",
    ),
    "no CRD": (
        'error: resource mapping not found for name: "x" namespace: "" from "manifest.yaml": no '
        "matches for kind "
        '"JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs are installed first\n',
        "set cluster.controller=job",
    ),
    "no namespace": (
        'Error from server (NotFound): error when creating "manifest.yaml": namespaces '
        '"training" not found\n',
        "kubectl create namespace",
    ),
    "no context": ('error: context "nope" does not exist\n', "set cluster.context"),
    "too old": (
        'Error from server (BadRequest): error when creating "manifest.yaml": Job in version '
        '"v1" cannot be handled as '
        'a Job: strict decoding error: unknown field "spec.successPolicy"\n',
        r"needs Kubernetes 1\.31",
    ),
    "webhook": (
        "Error from server (InternalError): Internal error occurred: failed calling webhook "
        '"mjobset.kb.io": failed to '
        'call webhook: Post "https://jobset-webhook-service.jobset-system.svc:443/x": connect: '
        "connection refused\n",
        "does not run",
    ),
    "exists": (
        'Error from server (AlreadyExists): error when creating "manifest.yaml": configmaps "x" '
        "already exists\n",
        "choose another output",
    ),
}


@pytest.mark.parametrize("problem", ERRORS)
def test_a_refusal_is_one_line_with_the_fix_and_leaves_nothing(
    problem: str, kubectl: Kubectl, tmp_path: Path
):
    said, fix = ERRORS[problem]
    kubectl.answers(dry_run=[(1, "", said)])
    with pytest.raises(LaunchError, match=fix) as refused:
        submit.submit(prepared(tmp_path))
    text = str(refused.value)
    assert "\n" not in text
    assert "memcache.go" not in text
    assert said.splitlines()[-1].removeprefix("error: ") in text
    assert [call[2:4] for call in kubectl.calls] == [["create", "--dry-run=server"]]
    assert not (tmp_path / "launches").exists()
    assert records.newest_first() == []


def test_what_was_created_before_a_failure_is_deleted(kubectl: Kubectl, tmp_path: Path):
    kubectl.answers(create=[(1, "configmap/x created\n", ERRORS["webhook"][0])])
    with pytest.raises(LaunchError, match="does not run"):
        submit.submit(prepared(tmp_path))
    assert kubectl.calls[-1] == [
        *("--namespace", "training", "delete", "--ignore-not-found", "--wait=false", "-f", MANIFEST)
    ]
    assert kubectl.manifests[-1] == kubectl.manifests[0]
    assert not (tmp_path / "launches").exists()


def test_what_somebody_else_has_made_in_the_meantime_stays(kubectl: Kubectl, tmp_path: Path):
    kubectl.answers(create=[(1, "", ERRORS["exists"][0])])
    with pytest.raises(LaunchError, match="choose another output"):
        submit.submit(prepared(tmp_path))
    assert not any("delete" in call for call in kubectl.calls)


def test_what_cannot_be_deleted_is_told(kubectl: Kubectl, tmp_path: Path):
    kubectl.answers(
        create=[(1, "", ERRORS["webhook"][0])], delete=[(1, "", ERRORS["unreachable"][0])]
    )
    with pytest.raises(
        LaunchError, match=r"does not run.*could not be deleted: .*cannot be reached"
    ):
        submit.submit(prepared(tmp_path))


def test_kubectl_has_to_be_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="kubectl is not on this machine; install it"):
        GPU.check()


# --- states


def record(name: str = "bert-001", **about: str) -> Record:
    place = {
        "context": "c",
        "namespace": "n",
        "name": name,
        "controller": "jobset",
        "action": "train",
    }
    folder = Path("/jobs", name)
    return Record(name, "kubernetes", "bert", "runs/bert", folder, 0.0, place | about)


def item(
    kind: str, name: str, status: dict[str, Any], job: str = "bert-001", **spec: Any
) -> dict[str, Any]:
    labels = {"samestep.dev/job": job}
    return {
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": status,
    }


def pod(
    index: int, phase: str, node: str = "", state: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    containers = [{"name": "samestep", "image": "samestep:1", "state": state}] if state else []
    status = {"phase": phase, "containerStatuses": containers, **more}
    made = item("Pod", f"bert-001-node-0-{index}-{phase.lower()}", status, nodeName=node)
    made["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{index:02}Z"
    return made


def answer(*found: dict[str, Any]) -> tuple[int, str, str]:
    return 0, json.dumps({"kind": "List", "items": list(found)}), ""


def condition(kind: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


WAITING = {
    "waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "samestep:1"'}
}
UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        }
    ]
}
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
ENDED = {"terminated": {"exitCode": 0}}


@pytest.mark.parametrize(
    ("found", "word", "active", "nodes", "restarts", "detail"),
    [
        ([item("JobSet", "bert-001", {})], "pending", True, "", 0, "no pod has been made yet"),
        (
            [item("JobSet", "bert-001", {}), pod(0, "Pending", **UNSCHEDULABLE)],
            "pending",
            True,
            "",
            0,
            "4 Insufficient",
        ),
        (
            [item("JobSet", "bert-001", {}), pod(0, "Pending", "a", WAITING)],
            *("pending", True, "", 0, "ImagePullBackOff: nodes cannot pull samestep:1"),
        ),
        (
            [
                item("JobSet", "bert-001", {"restarts": 2}),
                pod(0, "Running", "b", RUNNING),
                pod(1, "Running", "a", RUNNING),
                pod(2, "Failed", "a", ENDED),
                pod(3, "Pending", **UNSCHEDULABLE),
            ],
            *("running", True, "a +1", 3, "4 Insufficient"),
        ),
        (
            [item("JobSet", "bert-001", {}), pod(0, "Running", "a", RUNNING)],
            "running",
            True,
            "a",
            0,
            "",
        ),
        (
            [
                item("JobSet", "bert-001", condition("Completed", "jobset completed successfully")),
                pod(0, "Succeeded"),
            ],
            *("done", False, "", 0, "jobset completed"),
        ),
        (
            [
                item(
                    "JobSet",
                    "bert-001",
                    condition("Failed", "Container samestep failed with exit code 2"),
                )
            ],
            *("failed", False, "", 0, "exit code 2"),
        ),
        ([item("JobSet", "bert-001", {}, suspend=True)], "suspended", True, "", 0, ""),
    ],
    ids=["new", "no room", "no image", "running", "all run", "done", "failed", "suspended"],
)
def test_how_a_job_stands(
    found: list[Any],
    word: str,
    active: bool,
    nodes: str,
    restarts: int,
    detail: str,
    kubectl: Kubectl,
):
    kubectl.answers(get=[answer(*found)])
    state = GPU.states([record()])[Path("/jobs/bert-001")]
    assert (state.word, state.active, state.nodes, state.restarts) == (
        word,
        active,
        nodes,
        restarts,
    )
    assert detail in state.detail
    assert bool(detail) == bool(state.detail)
    assert len(state.detail) <= 120


def test_plain_jobs_and_queues(kubectl: Kubectl):
    queued = item("Job", "a", {}, "a", suspend=True)
    queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    ending = item("Job", "c", {"active": 1}, "c")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    kubectl.answers(get=[answer(queued, item("Job", "b", condition("Complete"), "b"), ending)])
    jobs = [record(name, controller="job") for name in "abcd"]
    states = {folder.name: state for folder, state in GPU.states(jobs).items()}
    assert {name: state.word for name, state in states.items()} == {
        "a": "suspended",
        "b": "done",
        "c": "ending",
    }
    assert "queue team-a" in states["a"].detail
    assert states["c"].active


def test_each_namespace_is_asked_once_and_for_what_it_has(kubectl: Kubectl):
    kubectl.answers(get=[answer()])
    found = [
        record("a"),
        record("b", controller="job"),
        record("c", namespace="m", controller="job", context=""),
    ]
    assert GPU.states(found) == {}
    common = ["--selector", "samestep.dev/job", "--output", "json"]
    assert kubectl.calls == [
        [
            "--context",
            "c",
            "--namespace",
            "n",
            "get",
            "jobs.batch,jobsets.jobset.x-k8s.io,pods",
            *common,
        ],
        [
            "--namespace",
            "m",
            "get",
            "jobs.batch,pods",
            *common,
        ],  # where JobSet may not be installed
    ]


def test_a_cluster_that_does_not_answer_is_told(kubectl: Kubectl):
    kubectl.answers(get=[(1, "", ERRORS["unreachable"][0])])
    with pytest.raises(LaunchError, match="cannot be reached"):
        GPU.states([record()])


# --- logs


def stamped(*lines: str, start: int = 0) -> str:
    return "".join(
        f"2026-01-01T00:00:{start + i:02}.000000000Z {line}\n" for i, line in enumerate(lines)
    )


def test_logs_are_those_of_the_first_pod_and_of_those_before_it(kubectl: Kubectl):
    first, second = pod(0, "Failed", state=ENDED), pod(0, "Running", state=RUNNING)
    second["metadata"]["creationTimestamp"] = "2026-01-01T01:00:00Z"
    kubectl.answers(get=[answer(pod(1, "Running", state=RUNNING), second, first)])
    kubectl.answers(logs=[(0, stamped("step 1", "", "step 2"), ""), (0, stamped("step 3"), "")])
    assert "".join(GPU.logs(record(), False)) == "step 1\n\nstep 2\nstep 3\n"
    commands = [call for call in kubectl.calls if "logs" in call]
    assert [command[5] for command in commands] == [
        first["metadata"]["name"],
        second["metadata"]["name"],
    ]
    assert commands[0][6:] == ["--container", "samestep", "--timestamps"]


def test_following_goes_on_after_the_connection_ends(kubectl: Kubectl):
    """The server gives all lines of the last second again."""
    running, done = pod(0, "Running", state=RUNNING), pod(0, "Succeeded", state=ENDED)
    done["metadata"]["name"] = running["metadata"]["name"]
    jobset, ended = (
        item("JobSet", "bert-001", {}),
        item("JobSet", "bert-001", condition("Completed")),
    )
    waits = pod(0, "Pending", state={"waiting": {"reason": "ContainerCreating"}})
    waits["metadata"]["name"] = running["metadata"]["name"]
    kubectl.answers(
        get=[
            *(answer(jobset, waits), answer(waits)),
            *(answer(jobset, running), answer(running)),
            *(answer(jobset, running), answer(running)),
            *(answer(ended, done), answer(done)),
        ],
        logs=[
            (0, stamped("step 1", "step 2"), ""),
            (1, stamped("step 2", "step 3", start=1), "error: unexpected EOF\n"),
            (0, stamped("step 3", "end", start=2), ""),
        ],
    )
    assert list(GPU.logs(record(), True)) == ["step 1\n", "step 2\n", "step 3\n", "end\n"]
    followed = [call for call in kubectl.calls if "logs" in call]
    assert ["--follow" in call for call in followed] == [True, True, False]
    assert followed[1][-2:] == ["--since-time", "2026-01-01T00:00:01.000000000Z"]


def test_lines_of_one_moment_are_all_told(kubectl: Kubectl):
    """A slow clock gives several lines one time stamp; a connection may end between them."""
    running, done = pod(0, "Running", state=RUNNING), pod(0, "Succeeded", state=ENDED)
    done["metadata"]["name"] = running["metadata"]["name"]
    jobset, ended = (
        item("JobSet", "bert-001", {}),
        item("JobSet", "bert-001", condition("Completed")),
    )
    looks = [(answer(jobset, running), answer(running))] * 3 + [(answer(ended, done), answer(done))]
    moment = [stamped(line, start=1) for line in ("a", "a", "b", "b", "c")]
    kubectl.answers(
        get=[each for look in looks for each in look],
        logs=[
            (0, "".join(moment[:2]) + moment[2][:-1], ""),  # ends within a line
            (0, "".join(moment[:3]), ""),
            (0, "".join(moment[:5]), ""),
            (0, "".join(moment) + stamped("d", "10 %\r20 %"), ""),
        ],
    )
    assert list(GPU.logs(record(), True)) == [
        f"{line}\n" for line in ("a", "a", "b", "b", "c", "d", "10 %\r20 %")
    ]


def test_logs_of_a_build_are_those_of_all_pods(kubectl: Kubectl):
    kubectl.answers(
        get=[answer(pod(1, "Succeeded", state=ENDED), pod(0, "Succeeded", state=ENDED))]
    )
    kubectl.answers(logs=[(0, stamped("slice 1"), ""), (0, "no time\n", "")])
    assert list(GPU.logs(record(action="build", controller="job"), False)) == [
        "slice 1\n",
        "no time\n",
    ]


def test_when_the_first_pod_is_gone_the_others_say_why(kubectl: Kubectl):
    kubectl.answers(
        get=[answer(pod(2, "Failed", state=ENDED))], logs=[(0, stamped("error: loss is nan"), "")]
    )
    assert list(GPU.logs(record(), False)) == ["error: loss is nan\n"]


def test_no_logs_are_told(kubectl: Kubectl):
    kubectl.answers(get=[answer(pod(0, "Pending", state=WAITING))])
    with pytest.raises(LaunchError, match=r"no pod of bert-001 .*samestep jobs"):
        list(GPU.logs(record(), False))
    kubectl.answers(
        get=[answer(pod(0, "Running", state=RUNNING))], logs=[(1, "", ERRORS["unreachable"][0])]
    )
    with pytest.raises(
        LaunchError,
        match=r"kubectl: The connection to the server 10\.0\.0\.1 was refused.*cannot be reached",
    ):
        list(GPU.logs(record(), False))


def test_who_stops_reading_leaves_no_process(kubectl: Kubectl, tmp_path: Path):
    """The log of a run that goes on does not end."""
    stays = (
        "import os, time; sys.stdout.flush(); "
        "(root / 'pid').write_text(str(os.getpid())); time.sleep(600)"
    )
    program = KUBECTL.replace("sys.exit(code)", f"if verb == 'logs':\n    {stays}\nsys.exit(code)")
    (kubectl.folder / "kubectl").write_text(program)
    running = pod(0, "Running", state=RUNNING)
    kubectl.answers(get=[answer(item("JobSet", "bert-001", {}), running), answer(running)])
    kubectl.answers(logs=[(0, stamped("step 1"), "")])
    lines = iter(GPU.logs(record(), True))
    assert next(lines) == "step 1\n"
    while not (kubectl.folder / "pid").exists() or not (kubectl.folder / "pid").read_text():
        time.sleep(0.01)
    lines.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int((kubectl.folder / "pid").read_text()), 0)


# --- cancel


def test_cancelling_deletes_all_and_waits_for_nothing(kubectl: Kubectl):
    GPU.cancel(record())
    GPU.cancel(record(controller="job", context=""))
    how = ["--ignore-not-found", "--cascade=foreground", "--wait=false"]
    assert kubectl.calls == [
        [
            "--context",
            "c",
            "--namespace",
            "n",
            "delete",
            "jobsets.jobset.x-k8s.io,configmaps,networkpolicies.networking.k8s.io",
            "bert-001",
            *how,
        ],
        [
            "--namespace",
            "n",
            "delete",
            "jobs.batch,services,configmaps,networkpolicies.networking.k8s.io",
            "bert-001",
            *how,
        ],
    ]
    GPU.cancel(record(network_policy="false"))  # the account may not even list them
    assert kubectl.calls[-1][5] == "jobsets.jobset.x-k8s.io,configmaps"
    kubectl.answers(delete=[(0, "", "")])
    with pytest.raises(LaunchError, match="bert-001 is no longer on the cluster"):
        GPU.cancel(record())


# --- the real one


@pytest.mark.long
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_the_real_kubectl_understands_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There is no server, which is what it has to say, and not that it knows no such option."""
    at = {"cluster": "c", "user": "u"}
    (tmp_path / "config").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "contexts": [{"name": "c", "context": at}],
                "users": [{"name": "u", "user": {"token": "x"}}],
                "current-context": "c",
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert client.current_context() == "c"
    launch = prepared(tmp_path)
    (tmp_path / MANIFEST).write_text(launch.submission.files[MANIFEST])
    place = ("kubectl", "--namespace", "n")
    attempts = [
        lambda: submit.submit(launch),
        lambda: client.run(
            (*place, "delete", "--ignore-not-found", "--wait=false", "-f", MANIFEST), tmp_path
        ),
        lambda: GPU.states([record()]),
        lambda: GPU.cancel(record()),
    ]
    for attempt in attempts:
        with pytest.raises(LaunchError, match="cannot be reached from here") as refused:
            attempt()
        assert "memcache.go" not in str(refused.value)
    since = {"x": ("2026-01-01T00:00:00.123456789Z", 1)}
    with pytest.raises(LaunchError, match="was refused"):
        list(client._lines([*place, "logs", "x", "--container", "samestep"], "x", since))

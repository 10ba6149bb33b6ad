"""Resources, limits, annotations and patches of manifests, against the schemas of Kubernetes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from launch.job import JobSpec
from launch.k8s import manifest
from launch.k8s.parts import Volume, amount
from launch.k8s.patch import merge
from launch.kinds.kubernetes import MANIFEST, Config
from launch.submission import submit
from samestep.errors import ConfigError

ROOT = Path(__file__).parents[3]
GPU = Config(
    "registry.example.com/samestep:cuda",
    nodes=2,
    gpus_per_node=8,
    cpus_per_node=64,
    memory="500Gi",
    volumes=(Volume("/work", claim="work"),),
)
JOB = JobSpec(
    "bert", "train", "output: /work/bert\n", Path("/home/me/launch/001"), Path("/home/me")
)
BUILD = replace(JOB, action="build", config="output: /work/c4\nsource: {kind: c4}\n", tasks=4)


def valid(config: Config, job: JobSpec = JOB) -> list[dict[str, Any]]:
    """The objects of a manifest, all of which match the schemas of Kubernetes."""
    text = config.render(job).files[MANIFEST]
    objects = list(yaml.safe_load_all(text))
    pod = {"apiVersion": "v1", "kind": "Pod", **manifest.pod_of(text)}
    inner = objects[-1]
    if inner["kind"] == "JobSet":
        read = JobsetV1alpha2JobSet.from_dict(inner)
        assert read is not None
        assert read.to_dict() == inner
        (group,) = inner["spec"]["replicatedJobs"]
        inner = {"apiVersion": "batch/v1", "kind": "Job", **group["template"]}
    for each in (*[each for each in objects if each["kind"] != "JobSet"], inner, pod):
        for version in ("1.31", "1.36"):
            kubernetes_validate.validate(each, version, strict=True)
    return [*objects, pod]


def container_of(config: Config, job: JobSpec = JOB) -> dict[str, Any]:
    containers: list[dict[str, Any]] = valid(config, job)[-1]["spec"]["containers"]
    return next(each for each in containers if each["name"] == "samestep")


def test_resources_and_limits() -> None:
    further: dict[str, str | int] = {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"}
    config = replace(GPU, resources=further, memory_limit="600Gi", cpu_limit="96")
    resources = container_of(config)["resources"]
    assert resources["requests"] == {"cpu": 64, "memory": "500Gi"}
    # Kubernetes sets the requests of all others to their limits.
    own = {"cpu": "96", "memory": "600Gi"}
    assert resources["limits"] == {**own, "nvidia.com/gpu": 8, **further}
    assert container_of(config, BUILD)["resources"]["limits"] == own


def test_annotations_are_those_of_pods() -> None:
    interfaces = '[{"interfaceName": "eth0", "network": "default"}]'
    config = replace(
        GPU,
        annotations={"networking.gke.io/interfaces": interfaces},
        volumes=(*GPU.volumes, Volume("/corpora", bucket="corpora")),
    )
    *_, jobset, pod = valid(config)
    assert pod["metadata"]["annotations"] == {
        "gke-gcsfuse/volumes": "true",
        "networking.gke.io/interfaces": interfaces,
    }
    assert "annotations" not in jobset["metadata"]


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4, "d": None}}, {"a": 1, "b": {"c": 4}}),
        ({"a": 1}, {"b": {"c": None, "d": {"e": None}}}, {"a": 1, "b": {"d": {}}}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": [{"name": "b"}]}, {"a": []}, {"a": []}),
        ({"a": ["x", "y"]}, {"a": ["z"]}, {"a": ["z"]}),
        (
            [{"name": "a", "value": 1}, {"name": "b"}],
            [{"name": "c"}, {"name": "a", "value": 2}],
            [{"name": "a", "value": 2}, {"name": "b"}, {"name": "c"}],
        ),
        ([{"name": "a"}, {"name": "b"}], [{"name": "a", "$patch": "delete"}], [{"name": "b"}]),
        ([{"name": "a"}], [{"key": "b"}], [{"key": "b"}]),  # tolerations have no names
        (
            [{"name": "v", "mountPath": "/a"}],
            [{"name": "v", "mountPath": "/b"}],
            [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}],
        ),
        (None, [{"name": "a", "$patch": "delete"}, {"name": "b"}], [{"name": "b"}]),
    ],
)
def test_merging(base: Any, patch: Any, result: Any) -> None:
    before = repr(base)
    assert merge(base, patch) == result
    assert repr(base) == before


@pytest.mark.parametrize("controller", ["jobset", "job"])
def test_patches_reach_pods_and_jobs_of_both_controllers(controller: Any) -> None:
    lock = {"capabilities": {"add": ["IPC_LOCK"]}}
    env = [{"name": "NCCL_NET", "value": "gIB"}, {"name": "SAMESTEP_NODES", "$patch": "delete"}]
    pod = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "enableServiceLinks": None,
            "containers": [{"name": "samestep", "securityContext": lock, "env": env}],
            "initContainers": [{"name": "daemon", "image": "d", "restartPolicy": "Always"}],
        },
    }
    job = {"spec": {"activeDeadlineSeconds": 3600, "successPolicy": None}}
    config = replace(GPU, controller=controller, patch={"Pod": pod, "Job": job})
    *_, last, patched = valid(config)
    if controller == "jobset":
        last = last["spec"]["replicatedJobs"][0]["template"]
    assert last["spec"]["activeDeadlineSeconds"] == 3600
    assert "successPolicy" not in last["spec"]
    assert patched["metadata"]["annotations"] == {"a": "b"}
    spec = patched["spec"]
    assert "enableServiceLinks" not in spec
    (container,) = spec["containers"]
    # Beside what had been rendered.
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["image"] == GPU.image
    names = [variable["name"] for variable in container["env"]]
    assert "NCCL_NET" in names
    assert "SAMESTEP_JOB" in names
    assert "SAMESTEP_NODES" not in names


@pytest.mark.long
def test_patches_of_other_objects() -> None:
    annotated = {"metadata": {"annotations": {"a": "b"}}}
    for controller, kind in (("jobset", "JobSet"), ("job", "Service"), ("job", "ConfigMap")):
        config = replace(GPU, controller=controller, patch={kind: annotated})  # type: ignore[arg-type]
        for each in valid(config)[:-1]:
            assert ("annotations" in each["metadata"]) == (each["kind"] == kind)
    assert valid(replace(GPU, patch={"JobSet": annotated}), BUILD)  # which has no JobSet


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_limit": "400Gi"}, "memory_limit 400Gi is below memory 500Gi"),
        ({"cpu_limit": "500m"}, "cpu_limit 500m is below cpus_per_node 64"),
        ({"memory_limit": "lots"}, "memory_limit is 'lots'"),
        ({"resources": {"memory": "1Gi"}}, r"resources\.memory has a setting of its own"),
        ({"resources": {"nvidia.com/gpu": 8}}, "has a setting of its own"),
        ({"resources": {"vpc.amazonaws.com/efa": "many"}}, "is 'many'. Write a name"),
        ({"resources": {"a/b/c": 1}}, "a/b/c is 1"),
        ({"annotations": {"a b": "c"}}, "annotations: 'a b' is not a key"),
        (
            {"patch": {"Pods": {}}},
            r"patch\.Pods is for .* Use one of ConfigMap, NetworkPolicy, Job, JobSet, Pod",
        ),
        ({"patch": {"Service": {}}}, "controller=jobset does not create"),
        ({"patch": {"Pod": {"spec": {"$patch": "delete"}}}}, r"patch\.Pod\.spec has \$patch"),
        ({"patch": {"Pod": {"a": [{"name": "x", "$patch": "replace"}]}}}, r"Pod\.a\.0 has"),
        ({"patch": {"Pod": {"a": [{"key": "x", "$patch": "delete"}]}}}, "a name or mountPath"),
        (
            {"patch": {"Pod": {"c": [{"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}]}}},
            "HF_TOKEN looks like a secret",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(GPU, **settings)


@pytest.mark.parametrize(
    "patch",
    [
        {"JobSet": {"metadata": {"name": "mine"}}},
        {"JobSet": {"metadata": {"namespace": "other"}}},
        {"JobSet": {"metadata": {"labels": None}}},
        {"ConfigMap": {"kind": "Secret"}},
        {"Pod": {"metadata": {"labels": {"samestep.dev/job": "other"}}}},
        {"Pod": {"metadata": None}},
        {"Pod": {"spec": {"containers": []}}},
        {"JobSet": {"spec": {"replicatedJobs": [{"name": "second"}]}}},
    ],
)
def test_the_job_must_stay_one_that_can_be_found(patch: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="by which samestep finds the job"):
        replace(GPU, patch=patch).render(JOB)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", "patch has 'nope' where the object has a mapping"),
        ({"containers": {"name": "samestep"}}, "where the object has a list"),
        ({"containers": [{"name": "samestep", "env": "A=b"}]}, "patch has 'A=b' where"),
        ({"containers": [3]}, "by which samestep finds the job"),
    ],
)
def test_patches_of_another_shape_are_refused(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(GPU, patch={"Pod": {"spec": spec}}).render(JOB)
    env = {"containers": [{"name": "samestep", "env": [3]}]}  # the server's to refuse
    replace(GPU, patch={"Pod": {"spec": env}}).render(JOB)


def test_quantities() -> None:
    assert [amount(each) for each in ("2Ki", "1.5k", "500m", 3, "1Mi")] == [
        *(2048, 1500, 0.5, 3, 2**20)
    ]


@pytest.mark.parametrize("name", ["kubernetes_efa", "kubernetes_infiniband", "kubernetes_gke_rdma"])
def test_examples_of_fast_networks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    file, experiment = f"configs/launch/{name}.yaml", "configs/pretrain/bert_large.yaml"
    launch = submit.prepare(file, experiment, [])
    assert isinstance(launch.cluster, Config)
    pod = valid(launch.cluster, launch.job)[-1]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8

"""`samestep launch --dry-run`, and the same checks before a submission."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from launch import experiment
from launch.kinds.kubernetes import Config as Kubernetes
from launch.submission import checks, submit
from samestep.config import to_tree
from samestep.errors import ConfigError, LaunchError
from tests.integration.commands import Samestep

SBATCH = """#!/bin/bash
cat > '{folder}/script'
echo "$@" >> '{folder}/asked'
echo 'sbatch: Job 7 to start at 2026-11-22T10:00:00 using 4 processors on nodes n[1-2]' >&2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, and a Slurm whose sbatch only answers --test-only."""
    (tmp_path / "slurm.yaml").write_text("kind: slurm\nnodes: 2-3\ncode: installed\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(folder=tmp_path))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checklist(out: str) -> dict[str, str]:
    """The mark of each check."""
    return {name: mark for mark, name in re.findall(r"^  (ok|refused) +([\w ]+)", out, re.M)}


@pytest.mark.long
def test_a_dry_run_ends_with_would_start(
    project: Path, samestep: Samestep, experiment_file: str
) -> None:
    result = samestep("launch", "slurm.yaml", experiment_file, "output=run", "--dry-run")
    assert result.code == 0, result.err
    assert "#SBATCH --nodes=2-3\n" in result.out
    assert "\nsbatch --parsable " in result.out
    assert set(checklist(result.out).values()) == {"ok"}
    assert "cluster: Job 7 to start at 2026-11-22T10:00:00" in result.out
    last = result.out.splitlines()[-1]
    assert last == "would start: run on 2 to 3 nodes x 1 process (kind slurm)"
    assert (project / "asked").read_text() == "--test-only\n"
    assert (project / "script").read_text() in result.out
    assert not (project / "run").exists()


def test_rendering_prints_what_can_be_piped(
    project: Path, samestep: Samestep, experiment_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(checks, "_ask", lambda arguments, _: asked.append(arguments))
    result = samestep("launch", "slurm.yaml", experiment_file, "output=run", "--render")
    assert result.code == 0
    assert result.out.startswith("#!/bin/bash\n")
    assert result.out.endswith("exit $code\n")
    assert asked == [["config", experiment_file, "output=run", "--elsewhere"]]
    assert not (project / "asked").exists()
    cluster = {"kind": "kubernetes", "image": "i"}
    (project / "k8s.yaml").write_text(yaml.safe_dump(cluster))
    manifest = samestep("launch", "k8s.yaml", experiment_file, "output=run", "--render").out
    kinds = [document["kind"] for document in yaml.safe_load_all(manifest)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "JobSet"]
    with pytest.raises(SystemExit):
        samestep("launch", "k8s.yaml", experiment_file, "--render", "--dry-run")


@pytest.mark.long
def test_what_would_not_start_is_refused_by_a_dry_run_and_a_submission(
    project: Path, samestep: Samestep, experiment_file: str
) -> None:
    arguments = ("launch", "slurm.yaml", experiment_file, "output=run", "cluster.nodes=2-11")
    dry, wet = samestep(*arguments, "--dry-run"), samestep(*arguments)
    assert checklist(dry.out).pop("settings") == "refused"
    assert list(checklist(dry.out).values()).count("refused") == 1
    assert "would start" not in dry.out
    assert "global_batch_size 10 is less than the 11" in dry.message
    assert (dry.code, dry.message) == (wet.code, wet.message)
    assert not (project / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("option", ["--dry-run", "--render"])
def test_unknown_keys(project: Path, samestep: Samestep, experiment_file: str, option: str) -> None:
    wrong = ("output=run", "trainig.steps=5", option)
    result = samestep("launch", "slurm.yaml", experiment_file, *wrong)
    assert result.code == 2
    assert "did you mean 'training'" in result.message


@pytest.mark.long
def test_rendering_a_build_checks_its_keys_and_no_files(project: Path, samestep: Samestep) -> None:
    text = "output: built\nsource: {kind: jsonl, paths: [x]}\ntokenizer: {path: t}\n"
    (project / "data.yaml").write_text(text)
    arguments = ("launch", "slurm.yaml", "data.yaml", "--render")
    assert "job-%a.log\n" in samestep(*arguments).out
    result = samestep(*arguments, "source.pahts=[y]")
    assert (result.code, result.out) == (2, "")
    assert "did you mean 'paths'" in result.message


def test_swapped_files_are_recognized(
    project: Path, samestep: Samestep, experiment_file: str
) -> None:
    swapped = samestep("launch", experiment_file, "slurm.yaml", "output=run").message
    assert f"Swap the two: samestep launch slurm.yaml {experiment_file}" in swapped
    twice = samestep("launch", "slurm.yaml", "slurm.yaml", "output=run").message
    assert "Name an experiment or a dataset after the cluster's file" in twice
    none = samestep("launch", experiment_file, experiment_file, "output=run").message
    assert f"{experiment_file} has no kind, so it describes no cluster" in none


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["accelerator=cuda"], "cuda does not use 2 to 3 nodes x 1 process. Set accelerator=cpu"),
        (["accelerator={kind: xla}"], "accelerator xla does not use"),
        (["strategy=xla_spmd"], "strategy xla_spmd is for TPUs"),
        (
            ["accelerator=cpu", "cluster.gpus_per_node=8"],
            "accelerator cpu does not use 2 to 3 nodes x 8 GPUs. Set accelerator=cuda, or",
        ),
        (["accelerator=cpu"], None),
        (["accelerator=cuda", "cluster.gpus_per_node=8"], None),
        (["cluster.gpus_per_node=8"], None),
        (["accelerator=my_package.chips"], None),
    ],
)
def test_accelerators_must_use_the_nodes(
    project: Path,
    overrides: list[str],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_ask", lambda arguments, variables: None)
    (project / "run.yaml").write_text("output: run\n")
    launch = submit.prepare("slurm.yaml", "run.yaml", overrides)
    if message is None:
        checks.require(launch)
        return
    for check in (checks.require, lambda launch: list(checks.report(launch))):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check(launch)


@pytest.mark.long
def test_a_dry_run_tells_all_reasons(
    project: Path, samestep: Samestep, experiment_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(project))
    wrong = ("output=run", "accelerator=cuda", "data.path=nowhere")
    result = samestep("launch", "slurm.yaml", experiment_file, *wrong, "--dry-run")
    assert result.code == 1  # as the first refusal has
    assert "it would not start, for 3 reasons" in result.err
    for reason in ("sbatch is not on this machine", "accelerator cuda", "nowhere holds no"):
        assert reason in result.err
    assert "cluster" not in checklist(result.out)


def test_what_the_cluster_itself_refuses(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ask", lambda arguments, variables: None)
    said = "allocation failure: Invalid partition name specified"
    (project / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (project / "run.yaml").write_text("output: run\n")
    launch = submit.prepare("slurm.yaml", "run.yaml", [])
    checks.require(launch)  # the submission itself would ask
    with pytest.raises(LaunchError, match=r"Invalid partition name.*set cluster\.partition"):
        list(checks.report(launch))


def test_a_build(project: Path, samestep: Samestep, dataset_folder: Path) -> None:
    (project / "texts.jsonl").write_text(json.dumps({"text": "a"}))
    source = {"kind": "jsonl", "paths": ["texts.jsonl"]}
    recipe = {
        "output": "built",
        "source": source,
        "tokenizer": {"path": str(dataset_folder / "tokenizer")},
    }
    (project / "data.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ("launch", "slurm.yaml", "data.yaml", "--dry-run", "--tasks", "3")
    result = samestep(*arguments)
    assert result.code == 0, result.err
    assert result.out.endswith("would start: built, 3 tasks of a build (kind slurm)\n")
    assert "no-such" in samestep(*arguments, "source.paths=[no-such.jsonl]").message


class TestFiles:
    """Where the machines find files: launches on Kubernetes, whose rendered pods say so."""

    @pytest.fixture
    def launched(self, project: Path) -> Path:
        (project / "run.yaml").write_text("output: run\ndata: {path: data}\n")
        return project

    def launch(
        self, cluster: dict[str, object], *overrides: str, file: str = "run.yaml"
    ) -> submit.Launch:
        tree = {"kind": "kubernetes", "image": "i", **cluster}
        Path("k8s.yaml").write_text(yaml.safe_dump(tree))
        return submit.prepare("k8s.yaml", file, overrides)

    CLAIM: ClassVar[dict[str, object]] = {
        "directory": "/work",
        "volumes": [{"mount": "/work", "claim": "c"}],
    }

    def test_in_a_claim_a_bucket_or_a_url(self, launched: Path) -> None:
        launch = self.launch(self.CLAIM)
        assert checks._data(launch) == "data.path in claim c, unseen from here"
        assert checks._output(launch) == "output in claim c"
        bucket = {"volumes": [{"mount": "/corpora", "bucket": "b"}]}
        assert "bucket b" in checks._data(self.launch(bucket, "data.path=/corpora/x"))
        with pytest.raises(ConfigError, match="output /corpora/run is in bucket b, and what"):
            checks._output(self.launch(bucket, "output=/corpora/run"))
        urls = ("data.path=s3://b/x", "checkpoint.folder=s3://b/run", "init_from=hf://bert")
        assert "data.path is a URL" in checks._data(self.launch({}, *urls))
        assert "is a URL" in checks._output(self.launch({}, *urls))

    def test_nowhere(self, launched: Path) -> None:
        for cluster, path in (({}, "data"), (self.CLAIM, "/elsewhere"), (self.CLAIM, "../x")):
            with pytest.raises(
                ConfigError, match=r"data.path \S+ is not there.*data push.*cluster.volumes"
            ):
                checks._data(self.launch(cluster, f"data.path={path}"))

    def test_in_a_volume_that_a_patch_mounts(self, launched: Path) -> None:
        mount = {
            "containers": [
                {
                    "name": "samestep",
                    "volumeMounts": [
                        {"name": "lustre", "mountPath": "/lustre"},
                        {"name": "tmp", "mountPath": "/scratch"},
                    ],
                }
            ]
        }
        volumes = [
            {"name": "lustre", "nfs": {"server": "s", "path": "/"}},
            {"name": "tmp", "emptyDir": {}},
        ]
        patch = {"patch": {"Pod": {"spec": {**mount, "volumes": volumes}}}}
        launch = self.launch(patch, "data.path=/lustre/x", "output=/lustre/run")
        assert checks._data(launch).startswith("data.path in volume lustre (nfs)")
        assert checks._output(launch) == "output in volume lustre (nfs)"
        with pytest.raises(ConfigError, match=r"is in volume tmp \(emptyDir\)"):
            checks._output(self.launch(patch, "output=/scratch/run"))

    def test_of_a_build(self, launched: Path, samestep: Samestep) -> None:
        """Its source and tokenizer are in the pods, so only the settings are read here."""
        (launched / "data.yaml").write_text(
            "output: built\nsource: {kind: jsonl, paths: [/work/x*.jsonl]}\n"
            "tokenizer: {path: tokenizer}\n"
        )
        launch = self.launch(self.CLAIM, file="data.yaml")
        assert "tokenizer.path in claim c" in checks._data(launch)
        assert "source.paths.0 in claim c" in checks._data(launch)
        assert "unseen" in checks._settings(launch)
        with pytest.raises(ConfigError, match="shard_byte"):
            checks._settings(self.launch(self.CLAIM, "shard_byte=5", file="data.yaml"))
        with pytest.raises(ConfigError, match=r"source.paths.0 /x is not there"):
            checks._data(self.launch(self.CLAIM, "source.paths=[/x]", file="data.yaml"))
        alone = samestep("data", "build", "data.yaml", "--elsewhere")
        assert "Add --check" in alone.message

    def test_outside_a_container_on_slurm(self, launched: Path) -> None:
        def prepared(container: str, *overrides: str) -> submit.Launch:
            return submit.prepare(
                "slurm.yaml", "run.yaml", (f"cluster.container={container}", *overrides)
            )

        sqsh = "{image: a.sqsh, mounts: [/data, /big:/corpora]}"
        for path in ("data", "/data/x", "/corpora/x"):
            assert "a mount of the container" in checks._data(prepared(sqsh, f"data.path={path}"))
        for path in ("/database", "/big/x", str(Path.home() / "x")):
            with pytest.raises(ConfigError, match=r"Add its folder to cluster\.container\.mounts"):
                checks._data(prepared(sqsh, f"data.path={path}"))
        sif = "{kind: apptainer, image: a.sif}"
        assert "mount" in checks._data(prepared(sif, f"data.path={Path.home() / 'x'}"))
        with pytest.raises(ConfigError, match=r"checkpoint.folder /scratch/x is on"):
            checks._output(prepared(sif, "checkpoint.folder=/scratch/x"))


def test_tpus_of_kubernetes_need_their_accelerator(project: Path) -> None:
    tpu = {"accelerator": "tpu-v5-lite-podslice", "topology": "4x4"}
    (project / "k8s.yaml").write_text(
        yaml.safe_dump({"kind": "kubernetes", "image": "i", "tpu": tpu})
    )
    (project / "run.yaml").write_text("output: run\n")

    def found(*overrides: str) -> str:
        return checks._accelerator(submit.prepare("k8s.yaml", "run.yaml", overrides))

    with pytest.raises(
        ConfigError, match="accelerator is not set, and the job gets 4 nodes x 4 TPU"
    ):
        found()
    with pytest.raises(ConfigError, match="strategy fsdp is not for XLA"):
        found("accelerator=xla")
    assert found("accelerator=xla", "strategy=xla_spmd") == "xla, for 4 nodes x 4 TPU chips"
    assert found("accelerator=my.chips", "strategy=my.strategy").startswith("my.chips")


def test_sections_of_any_type_are_read() -> None:
    for odd in (None, 3, "x", [], [3], {"kind": 3}, {"path": 3, "sources": 3}):
        sections = ("data", "checkpoint", "objective", "phases", "source", "tokenizer", "strategy")
        sections += ("probes", "training")
        tree = dict.fromkeys(sections, odd)
        assert set(experiment.inputs(tree)) <= {"init_from"}
        assert experiment.own_modules(tree) == {}
        assert experiment.checkpoints(tree) == ("output", "None")
    tree = {"phases": [{"objective": "own.a"}], "objective": {"kind": "own.b"}, "model": "bert"}
    assert experiment.own_modules(tree) == {"objective": "own.b", "phases.0.objective": "own.a"}


def test_held_out_files_and_the_teacher_of_a_phase_are_read() -> None:
    tree = {"source": {"paths": ["a.tsv"], "heldout": ["b.tsv", "s3://c/d.tsv"]}}
    assert experiment.inputs(tree) == {
        "source.paths.0": "a.tsv",
        "source.heldout.0": "b.tsv",
        "source.heldout.1": "s3://c/d.tsv",
    }
    # A dataset of the Hub names a split.
    assert experiment.inputs({"source": {"dataset": {"path": "a/b", "heldout": "test"}}}) == {}
    distilled = {"kind": "distillation", "teacher": "runs/x"}
    tree = {"objective": "mlm", "phases": [{"objective": "mlm"}, {"objective": distilled}]}
    assert experiment.inputs(tree) == {"phases.1.objective.teacher": "runs/x"}


def test_data_of_probes_files_of_strategies_and_folders_of_the_hub_are_read() -> None:
    tree = {
        "probes": {"rte": {"path": "datasets/rte"}, "odd": 3},
        "training": {"retrieval": {"path": "beir/nq"}},
        "strategy": {"kind": "accelerate", "config": "accelerate.yaml"},
    }
    assert experiment.inputs(tree) == {
        "strategy.config": "accelerate.yaml",
        "probes.rte.path": "datasets/rte",
        "training.retrieval.path": "beir/nq",
    }
    assert experiment.inputs({"strategy": {"kind": "own.strategy", "config": "fast"}}) == {}
    for path in ("/corpora/x", "./x", "../x", "~/x"):
        found = {"source.path": os.path.expanduser(path)}
        assert experiment.inputs({"source": {"kind": "huggingface", "path": path}}) == found
        rows = {"kind": "classification", "dataset": {"path": path}}
        assert list(experiment.inputs({"source": rows})) == ["source.dataset.path"]
    assert experiment.inputs({"source": {"kind": "huggingface", "path": "owner/name"}}) == {}


def test_every_kind_says_its_size() -> None:
    assert Kubernetes("i", nodes="2-8", gpus_per_node=1).size == "2 to 8 nodes x 1 GPU"
    assert Kubernetes("i", processes_per_node=2).size == "1 node x 2 processes"
    assert to_tree(replace(Kubernetes("i"), nodes=3))["nodes"] == 3

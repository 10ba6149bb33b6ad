"""`samestep fetch` and hf:// addresses, with a Hub and an S3 server on loopback that are then
unplugged.
"""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from huggingface_hub import constants
from pyarrow import parquet as pq

from data_pipeline.format.manifest import Manifest
from samestep.storage import attempts, objects
from tests.hub import Hub, running_hub
from tests.integration.commands import Result, Samestep
from trainer.training.weights.loading import load_weights

TWO_STEPS = ("training.steps=2", "schedule.warmup_steps=0")
TEXTS = [f"The text number {i} says this and that to nobody." for i in range(400)]


@pytest.fixture
def hub(finished_run: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempts, "_DELAYS", (0.01,))
    with running_hub(tmp_path / "repositories", tmp_path / "cache") as hub:
        assert samestep("export", finished_run, hub.folder / "models" / "owner" / "tiny").code == 0
        yield hub


def settings(result: Result) -> list[str]:
    """The settings that a fetch says to use."""
    assert result.code == 0, result.err
    return shlex.split(result.out.partition(":")[2])


def unplug(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_model_is_fetched_and_trained_on_without_a_network(
    hub, samestep, experiment_file, tmp_path, monkeypatch
):
    hub.write("models/owner/tiny/README.md", b"---\nlicense: mit\nlanguage: en\n---\n")
    found = settings(samestep("fetch", "hf://owner/tiny"))
    unplug(hub, monkeypatch)
    assert len(found) == 1
    for number, start in enumerate((found[0], "init_from=hf://owner/tiny")):
        result = samestep(
            "train", experiment_file, f"output={tmp_path / str(number)}", start, *TWO_STEPS
        )
        assert result.code == 0, result.err
    weights = [load_weights(tmp_path / str(number)).tensors for number in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert samestep("export", tmp_path / "1", tmp_path / "exported").code == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "license: mit\nlanguage: en\nbase_model: owner/tiny\n---" in card


def test_a_teacher_is_fetched_beside_the_student(
    hub, samestep, experiment_file, tmp_path, monkeypatch
):
    student = (
        "init_from=hf://owner/tiny",
        "objective={kind: distillation, teacher: hf://owner/tiny, of: mlm}",
    )
    found = settings(samestep("fetch", experiment_file, *student, "--to", tmp_path / "raw"))
    assert found == [
        f"init_from={tmp_path / 'raw/model'}",
        f"objective.teacher={tmp_path / 'raw/teacher'}",
    ]
    unplug(hub, monkeypatch)
    result = samestep(
        "train", experiment_file, f"output={tmp_path / 'run'}", *student, *found, *TWO_STEPS
    )
    assert result.code == 0, result.err


def test_an_address_stands_for_a_checkpoint_in_every_command(hub, samestep, finished_run, tmp_path):
    text = "the value of [MASK]"
    assert samestep("fill", "hf://owner/tiny", text).out == samestep("fill", finished_run, text).out
    assert samestep("export", "hf://owner/tiny@main", tmp_path / "again").code == 0
    theirs = hub.folder / "models" / "owner" / "tiny" / "model.safetensors"
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == theirs.read_bytes()


def test_an_unknown_model_is_one_paragraph(hub, samestep, experiment_file, tmp_path, monkeypatch):
    arguments = (
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        "init_from=hf://owner/unknown",
    )
    assert "hf://owner/unknown is unknown to the Hub" in samestep(*arguments).message
    unplug(hub, monkeypatch)
    assert "`samestep fetch hf://owner/unknown --to DIR`" in samestep(*arguments).message


@pytest.fixture
def data_file(hub: Hub, tmp_path: Path) -> Path:
    """A dataset of 2 files of 200 documents, and a tokenizer, all on the Hub."""
    for number in range(2):
        file = io.BytesIO()
        pq.write_table(pa.table({"text": TEXTS[200 * number : 200 * (number + 1)]}), file)
        hub.write(f"datasets/owner/corpus/rows/{number}.parquet", file.getvalue())
    path = tmp_path / "data.yaml"
    path.write_text(
        f"""
source: {{kind: parquet, paths: ["hf://datasets/owner/corpus/rows/?.parquet"]}}
tokenizer: {{path: "hf://owner/tiny"}}
output: {tmp_path / "dataset"}
workers: 1
"""
    )
    return path


def test_data_and_tokenizer_are_fetched_once_and_built_from_without_a_network(
    hub, samestep, data_file, tmp_path, monkeypatch
):
    found = settings(samestep("fetch", data_file, "--to", tmp_path / "raw"))
    assert [setting.partition("=")[0] for setting in found] == ["tokenizer.path", "source.paths"]
    downloads = {
        path: count
        for path, count in hub.requests.items()
        if path.startswith("GET") and "/rows/" in path
    }
    assert settings(samestep("fetch", data_file, "--to", tmp_path / "raw")) == found
    assert downloads == {path: hub.requests[path] for path in downloads}
    unplug(hub, monkeypatch)
    assert samestep("data", "build", data_file, *found).code == 0


def test_files_that_would_overwrite_each_other_are_refused(hub, samestep, data_file, tmp_path):
    address = f"{hub.endpoint}/datasets/owner/corpus/resolve/main/rows/0.parquet"
    result = samestep(
        "fetch",
        data_file,
        f'source.paths=["{address}?part=0", "{address}?part=1"]',
        "--to",
        tmp_path / "raw",
    )
    assert "would get the same name" in result.message
    assert not list((tmp_path / "raw").rglob("*.parquet"))


def test_a_dataset_of_the_hub_is_fetched_by_its_name(
    hub, samestep, data_file, tmp_path, monkeypatch
):
    source = "source={kind: huggingface, path: owner/corpus}"
    found = settings(samestep("fetch", data_file, source, "--to", tmp_path / "raw"))
    unplug(hub, monkeypatch)
    assert samestep("data", "build", data_file, source, *found).code == 0
    assert sum(shard.documents for shard in Manifest.load(tmp_path / "dataset").shards) == len(
        TEXTS
    )


def test_both_files_of_parallel_text_are_fetched(hub, samestep, data_file, tmp_path):
    for name in ("en", "de"):
        hub.write(f"datasets/owner/pairs/train.{name}", b"one\ntwo\n")
    address = "hf://datasets/owner/pairs/train."
    source = f'source={{kind: parallel_text, source_paths: ["{address}en"], target_paths: ["{address}de"]}}'  # noqa: E501
    found = settings(samestep("fetch", data_file, source, "--to", tmp_path / "raw"))
    assert [setting.partition("=")[0] for setting in found[1:]] == [
        "source.source_paths",
        "source.target_paths",
    ]
    assert {path.name for path in (tmp_path / "raw").rglob("train.*")} == {"train.en", "train.de"}


def test_a_limit_is_fetched_as_far_as_it_reaches(hub, samestep, data_file, tmp_path, monkeypatch):
    found = settings(samestep("fetch", data_file, "limit=5kB", "--to", tmp_path / "raw"))
    assert [path.name for path in (tmp_path / "raw").rglob("*.parquet")] == ["0.parquet"]
    unplug(hub, monkeypatch)
    assert samestep("data", "build", data_file, *found, "limit=5kB").code == 0


def upload(dataset: Path, run: Path, url: str) -> None:
    """Copies a dataset to URL/data, and a run's checkpoints and tokenizer to URL/run."""
    for folder, name in ((dataset, "data"), (run / "checkpoints", "run"), (run, "")):
        for path in folder.glob("tokenizer/*") if not name else folder.rglob("*"):
            if path.is_file():
                objects.upload(path, f"{url}/{name or 'run'}/{path.relative_to(folder)}")


@pytest.mark.long
def test_a_dataset_and_a_checkpoint_are_fetched_from_a_store(
    s3_folder, samestep, experiment_file, dataset_folder, finished_run, tmp_path
):
    upload(dataset_folder, finished_run, s3_folder)
    remote = (f"data.path={s3_folder}/data", f"init_from={s3_folder}/run")
    found = settings(samestep("fetch", experiment_file, *remote, "--to", tmp_path / "data"))
    start, data = (setting.partition("=")[2] for setting in found)
    assert samestep("data", "verify", data).code == 0
    assert load_weights(start).step == load_weights(finished_run).step
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", *TWO_STEPS, *found)
    assert result.code == 0, result.err
    probe = f"probes.topic={{path: {s3_folder}/data, every: 2}}"
    (probed,) = settings(samestep("fetch", experiment_file, probe, "--to", tmp_path / "data"))
    assert probed == f"probes.topic.path={data}"
    mixture = "data.sources=" + json.dumps(
        [{"path": f"{s3_folder}/data", "weight": 2}, {"path": "here"}]
    )
    (mixed,) = settings(
        samestep("fetch", experiment_file, "data.path=null", mixture, "--to", tmp_path / "data")
    )
    assert [(each["path"], each["weight"]) for each in json.loads(mixed.partition("=")[2])] == [
        (data, 2),
        ("here", 1),
    ]


@pytest.mark.long
def test_files_with_another_content_are_fetched_again(
    s3_folder, samestep, experiment_file, dataset_folder, finished_run, tmp_path
):
    """Of the same sizes, as of a dataset or run that was replaced at its address."""
    upload(dataset_folder, finished_run, s3_folder)
    remote = (f"data.path={s3_folder}/data", f"init_from={s3_folder}/run")
    fetch = ("fetch", experiment_file, *remote, "--to", tmp_path / "raw")
    found = settings(samestep(*fetch))
    files = [path for path in (tmp_path / "raw").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    tensors, shards = (sorted(p for p in files if p.suffix == s) for s in (".safetensors", ".tar"))
    large = {path: path.stat().st_mtime_ns for path in (*tensors, *shards)}
    outdated = {shards[0], tensors[0], *(set(files) - large.keys())}
    assert {"COMMITTED", "checksums.json", "meta.json", "tokenizer.json", "manifest.json"} <= {
        path.name for path in outdated
    }
    for path in outdated:
        path.write_bytes(bytes(each ^ 1 for each in before[path]))
    assert settings(samestep(*fetch)) == found
    assert {path: path.read_bytes() for path in files} == before
    for path in large.keys() - outdated:
        assert path.stat().st_mtime_ns == large[path], f"{path} was downloaded again"


@pytest.mark.long
def test_frozen_weights_are_fetched_with_what_was_trained(
    hub, s3_folder, samestep, experiment_file, tmp_path, monkeypatch
):
    """Of a run with LoRA in a store, which went on from one that began with a model of the Hub."""
    lora = ("model.peft=lora", *TWO_STEPS)
    for name, start in (("first", "hf://owner/tiny"), ("second", f"{s3_folder}/first")):
        places = (
            f"init_from={start}",
            f"checkpoint.folder={s3_folder}/{name}",
            f"output={tmp_path / name}",
        )
        result = samestep("train", experiment_file, *places, *lora)
        assert result.code == 0, result.err
    student = (
        f"objective={{kind: distillation, teacher: {s3_folder}/second, of: mlm}}",
        *TWO_STEPS,
    )
    found = settings(samestep("fetch", experiment_file, *student, "--to", tmp_path / "raw"))
    exported = tmp_path / "exported"
    assert samestep("export", tmp_path / "second", exported, "--adapter").code == 0
    assert (
        json.loads((exported / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "owner/tiny"
    )
    assert "library_name: peft\n" in (card := (exported / "README.md").read_text())
    assert "base_model: owner/tiny\n" in card
    objects.remove_folder(s3_folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    unplug(hub, monkeypatch)
    result = samestep("train", experiment_file, f"output={tmp_path / 'student'}", *student, *found)
    assert result.code == 0, result.err


def test_nothing_remote_is_said_to_be_nothing(samestep, experiment_file):
    result = samestep("fetch", experiment_file)
    assert result.code == 2
    assert "names is on this machine already. There is nothing to fetch" in result.message
    assert "samestep fetch EXPERIMENT data.path=s3://a/b" in samestep("fetch", "s3://a/b").message

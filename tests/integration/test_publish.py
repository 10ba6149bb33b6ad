"""`samestep publish`: checkpoints become revisions on a Hub on loopback, and load again from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.integration.commands import Samestep
from tests.ports import free_port
from tests.writable_hub import READ, WRITE, WritableHub, running_writable_hub
from trainer.models.codecs import codec_of
from trainer.training.weights.loading import load_weights

REPO = "ada/bert"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[WritableHub]:
    with running_writable_hub(tmp_path / "cache", WRITE) as hub:
        yield hub


@pytest.mark.long
def test_each_checkpoint_is_a_revision(
    hub: WritableHub, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("publish", finished_run, REPO)
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "ada/bert step-000000: push to step-000000",
        "ada/bert step-000008: push to step-000008",
        "ada/bert step-000012: push to step-000012 and main",
    ]
    branches = hub.repositories[REPO]
    assert set(branches) == {"main", "step-000000", "step-000008", "step-000012"}
    assert REPO not in hub.private
    assert branches["main"] == branches["step-000012"]
    assert "model='ada/bert'" in branches["main"]["README.md"].decode()
    assert json.loads(branches["step-000008"]["samestep.json"])["step"] == 8
    assert len(hub.uploads) == 3, "main has the weights of step 12, which are there already"

    # transformers loads each revision, and step 0 is what the run's first step started with.
    config = load_weights(finished_run).config
    model = config.build()
    initial = {
        name: model.initial_values(name, 0, parameter.numel(), seed=0).view_as(parameter)
        for name, parameter in model.named_parameters()
    }
    expected = {
        "step-000000": codec_of(config).export_tensors(initial),
        "step-000008": exported(finished_run / "checkpoints" / "step-00000008"),
        "step-000012": exported(finished_run),
        "main": exported(finished_run),
    }
    for revision, tensors in expected.items():
        loaded = AutoModelForMaskedLM.from_pretrained(REPO, revision=revision).state_dict()
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor), (revision, name)
    tokenizer = AutoTokenizer.from_pretrained(REPO, revision="step-000008")
    ours = load_weights(finished_run).load_tokenizer()
    ids = tokenizer("a class", add_special_tokens=False)["input_ids"]
    assert ids == ours.encode_batch(["a class"])[0].tolist()

    # What is there stays, and samestep loads it, too.
    before = dict(hub.commits)
    again = samestep("publish", finished_run, REPO)
    assert again.out.count("is there already") == 3
    assert dict(hub.commits) == before
    assert samestep("export", f"hf://{REPO}@step-000008", tmp_path / "eight").code == 0


def exported(checkpoint: Path) -> dict[str, torch.Tensor]:
    weights = load_weights(checkpoint)
    return codec_of(weights.config).export_tensors(dict(weights.tensors))


@pytest.mark.long
def test_a_publication_is_continued(
    hub: WritableHub, finished_run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """After an error, and with the checkpoints of further training."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    dry = samestep("publish", run, REPO, "--dry-run")
    assert dry.out.count("push to") == 2
    assert not hub.repositories
    assert samestep("publish", run, REPO, "--revisions", "last", "--private").code == 0
    assert hub.private == {REPO}
    assert set(hub.repositories[REPO]) == {"main", "step-000008"}

    hub.refused = 1  # after the branch was made from main
    message = samestep("publish", run, REPO).message
    assert "ada/bert cannot be published" in message
    assert "Run the same command again" in message
    assert json.loads(hub.repositories[REPO]["step-000000"]["samestep.json"])["step"] == 8
    assert samestep("publish", run, REPO).out.splitlines() == [
        "ada/bert step-000000: push to step-000000",
        "ada/bert step-000008: is there already",
    ]
    assert json.loads(hub.repositories[REPO]["step-000000"]["samestep.json"])["step"] == 0

    assert samestep("train", run / "config.yaml", f"output={run}").code == 0
    hub.repositories[REPO]["main"]["model-00001-of-00002.safetensors"] = b"of an earlier export"
    own = ("LICENSE", "requirements.txt", "results.json", "onnx/model.safetensors", "x/config.json")
    hub.repositories[REPO]["main"] |= dict.fromkeys(own, b"of the user")
    hub.repositories[REPO]["main"]["1_Pooling/config.json"] = b"of an earlier export"
    assert samestep("publish", run, REPO).out.splitlines() == [
        "ada/bert step-000000: is there already",
        "ada/bert step-000008: is there already",
        "ada/bert step-000012: push to step-000012 and main",
    ]
    assert hub.commits == {
        (REPO, "step-000000"): 1,
        (REPO, "step-000008"): 1,
        (REPO, "step-000012"): 1,
        (REPO, "main"): 2,
    }
    files = hub.repositories[REPO]["main"]
    assert [files.get(name) for name in own] == [b"of the user"] * len(own)
    assert b"of an earlier export" not in files.values()
    assert json.loads(files["samestep.json"])["step"] == 12


@pytest.mark.long
def test_step_zero_of_a_run_that_started_from_weights(
    hub: WritableHub,
    finished_run: Path,
    dataset_folder: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    assert samestep("export", finished_run, tmp_path / "base").code == 0
    base, run = tmp_path / "base", tmp_path / "run"
    settings = ("training.steps=2", "schedule.warmup_steps=0", "model.layers=1", "init_layers=[1]")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    command = ("train", experiment_file, f"output={run}", f"init_from={base}", *settings)
    assert samestep(*command).code == 0
    assert samestep("publish", run, "ada/small").code == 0
    for files in hub.repositories["ada/small"].values():
        assert b"\nlicense: mit\n" in files["README.md"]
    loaded = AutoModelForMaskedLM.from_pretrained("ada/small", revision="step-000000").state_dict()
    trained = exported(finished_run)
    assert torch.equal(
        loaded["bert.embeddings.word_embeddings.weight"],
        trained["bert.embeddings.word_embeddings.weight"],
    )
    name = "bert.encoder.layer.{}.intermediate.dense.weight"
    assert torch.equal(loaded[name.format(0)], trained[name.format(1)])

    # Not from other weights that are in their place now, whatever they are.
    shutil.rmtree(base)
    assert samestep("export", run, base).code == 0
    left_out = "step 0 is left out, as its weights cannot be computed again"
    result = samestep("publish", run, "ada/other")
    assert f"{left_out}: {base} has other weights than when the run began" in result.err
    assert set(hub.repositories["ada/other"]) == {"main", "step-000002"}
    shutil.rmtree(base)
    result = samestep("publish", run, "ada/again")
    assert result.code == 0
    assert left_out in result.err
    assert set(hub.repositories["ada/again"]) == {"main", "step-000002"}


@pytest.mark.long
def test_step_zero_of_a_run_that_started_from_another_which_went_on(
    hub: WritableHub, finished_run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    first, run = Path(shutil.copytree(finished_run, tmp_path / "first")), tmp_path / "run"
    shutil.rmtree(first / "checkpoints" / "step-00000012")
    settings = ("schedule.warmup_steps=0", f"init_from={first}", f"output={run}")
    # Its second start must keep the record of the first, when `first` has a newer checkpoint.
    assert samestep("train", experiment_file, *settings, "training.steps=2").code == 0
    assert samestep("train", first / "config.yaml", f"output={first}").code == 0
    assert samestep("train", experiment_file, *settings, "training.steps=3").code == 0
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    result = samestep("publish", run, REPO)
    assert result.code == 0, result.err
    loaded = AutoModelForMaskedLM.from_pretrained(REPO, revision="step-000000").state_dict()
    for name, tensor in exported(first / "checkpoints" / "step-00000008").items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.long
def test_a_run_that_goes_on_with_other_settings_is_published(
    hub: WritableHub, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """Its oldest checkpoint has by then another dropout than when step 0 was published."""
    settings = ("schedule.warmup_steps=0", "schedule.decay=constant", f"output={tmp_path / 'run'}")
    train = ("train", experiment_file, *settings, "checkpoint={every: 1, keep_last: 2}")
    assert samestep(*train, "training.steps=2").code == 0
    assert samestep("publish", tmp_path / "run", REPO).code == 0
    assert samestep(*train, "training.steps=4", "model.dropout=0.2").code == 0
    result = samestep("publish", tmp_path / "run", REPO)
    assert result.out.splitlines() == [
        "ada/bert step-000000: is there already",
        "ada/bert step-000003: push to step-000003",
        "ada/bert step-000004: push to step-000004 and main",
    ], result.err


@pytest.mark.long
def test_main_of_another_run_is_not_replaced(
    hub: WritableHub, finished_run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    assert samestep("publish", finished_run, REPO, "--revisions", "last").code == 0
    other, averaged, mean = tmp_path / "other", tmp_path / "averaged", tmp_path / "mean"
    settings = ("training.steps=2", "schedule.warmup_steps=0", f"output={other}")
    assert samestep("train", experiment_file, *settings, "checkpoint.every=1").code == 0
    assert samestep("average", finished_run, averaged, "--last", "2").code == 0
    assert samestep("average", other, mean, "--last", "2").code == 0
    del hub.repositories[REPO]["step-000012"]  # so that only main is in the way of the average
    before = dict(hub.commits)
    for run in (other, averaged):
        message = samestep("publish", run, REPO, "--revisions", "last").message
        assert "ada/bert has a checkpoint of another run in main" in message
    assert dict(hub.commits) == before

    # Neither does an average replace one of another run. It has no start of its own.
    only = ["ada/mean step-000012: push to step-000012 and main"]
    assert samestep("publish", averaged, "ada/mean").out.splitlines() == only
    message = samestep("publish", mean, "ada/mean").message
    assert "ada/mean has a checkpoint of another run in main" in message
    assert set(hub.repositories["ada/mean"]) == {"main", "step-000012"}
    assert samestep("publish", averaged, "ada/mean").out.count("is there already") == 1


def test_what_cannot_be_published(
    hub: WritableHub, finished_run: Path, tmp_path: Path, samestep: Samestep, monkeypatch
) -> None:
    publish = ("publish", finished_run)
    assert "REPO is 'bert'. Write OWNER/NAME" in samestep(*publish, "bert").message
    assert "is neither a run" in samestep("publish", tmp_path, REPO).message
    message = samestep(*publish, REPO, "--revisions", "best").message
    assert "has no best checkpoint: it was trained without training.best" in message
    # No rights, neither by the token nor in this place.
    message = samestep(*publish, "someone/bert").message
    assert "does not let this token write to someone/bert (status 403)" in message
    monkeypatch.setenv("HF_TOKEN", READ)
    assert "does not let this token write to ada/bert" in samestep(*publish, REPO).message
    monkeypatch.delenv("HF_TOKEN")
    message = samestep(*publish, REPO).message
    assert "there is no token for the Hugging Face Hub. Log in with `hf auth login`" in message
    assert samestep(*publish, REPO, "--dry-run").out.count("push to") == 3
    monkeypatch.setenv("HF_TOKEN", WRITE)
    # Another run's revision, and a model from elsewhere, are not replaced.
    marker = json.dumps({"step": 8, "checkpoint": "0" * 64}).encode()
    hub.repositories[REPO] = {"main": {}, "step-000008": {"samestep.json": marker}}
    message = samestep(*publish, REPO).message
    assert "ada/bert has a revision step-000008 of another run" in message
    hub.repositories[REPO] = {"main": {"config.json": b"{}", "model.safetensors": b""}}
    message = samestep(*publish, REPO).message
    assert "has a model in main that samestep publish has not pushed" in message
    assert not hub.commits
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "ada/bert cannot be published" in samestep(*publish, REPO).message

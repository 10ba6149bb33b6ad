"""Trained models that are used without their objective."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.reading.dataset import Dataset
from tests.integration.commands import Samestep
from trainer.checkpoint.layout import StoredTensors
from trainer.errors import CheckpointError, ConfigError
from trainer.models import Model, bert
from trainer.training.initial_weights import stored_values
from trainer.training.weights import Weights, load_config, load_weights


@dataclass(frozen=True)
class Shared(bert.Config):
    """Token types are embedded by the table of positions."""

    def build(self) -> Model:
        model = super().build()
        model.get_submodule("embeddings").types = model.get_submodule("embeddings.positions")
        return model


@dataclass(frozen=True)
class Reading(bert.Config):
    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"gap"})


def trained(kind: type[bert.Config]) -> tuple[Weights, Model]:
    config = kind(vocab_size=40, layers=1, width=8, heads=2, ffn_width=16, max_positions=4)
    model = config.build()
    tensors = StoredTensors.of(dict(model.named_parameters()))
    return Weights(config, tensors, Path("w"), Path("t")), model


@pytest.mark.parametrize("kind", [bert.Config, Shared])
def test_it_has_the_trained_values(kind: type[bert.Config]) -> None:
    weights, model = trained(kind)
    loaded = weights.model(frozenset({"tokens", "layer.1"}))
    assert not loaded.training
    assert [name for name, _ in loaded.named_parameters()] == list(weights.tensors)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_run_does_not_start_from_weights_that_are_no_numbers(
    value: float,
    finished_run: Path,
    dataset_folder: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    """The message names the tensor and the file of a Hugging Face folder, or a run's parameter."""
    folder, name = tmp_path / "exported", "bert.encoder.layer.1.output.dense.weight"
    assert samestep("export", finished_run, folder).code == 0
    file = folder / "model.safetensors"
    tensors = {each: tensor.clone() for each, tensor in load_file(file).items()}
    tensors[name][3, 5] = value
    save_file(tensors, file, metadata={"format": "pt"})
    result = samestep("train", experiment_file, f"init_from={folder}", f"output={tmp_path / 'run'}")
    assert f"{name} in {file} holds NaN or infinity" in result.message
    weights = load_weights(finished_run)
    own = {each: tensor.clone() for each, tensor in weights.tensors.items()}
    own["layers.1.ffn.down.weight"][3, 5] = value
    weights = replace(weights, tensors=StoredTensors.of(own))
    values = stored_values(weights, weights.config.build(), Dataset.open(dataset_folder), seed=0)
    for read in (lambda: values("layers.1.ffn.down.weight", 0, 400), weights.model):
        with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.down\.weight of .* holds NaN"):
            read()
    assert len(values("layers.1.ffn.down.weight", 400, 410)) == 10


def test_it_has_to_offer_what_is_asked_of_it() -> None:
    weights, _ = trained(bert.Config)
    with pytest.raises(
        ConfigError, match="the model of w does not offer next_tokens; use another model"
    ):
        weights.model(frozenset({"tokens", "next_tokens"}))


def test_it_must_not_read_columns_that_an_objective_makes() -> None:
    weights, _ = trained(Reading)
    with pytest.raises(ConfigError, match=r"reads the column gap, .* use samestep evaluate"):
        weights.model()


def test_a_model_folder_cannot_name_a_module_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder holds the folder of a stranger, with a module of the stranger's."""
    folder = tmp_path / "nice_model"
    folder.mkdir()
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "nice_model.evil"}))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for load in (load_weights, load_config):
        with pytest.raises(CheckpointError, match=r"model_type 'nice_model.evil', a Python module"):
            load("nice_model")
    assert not Path("ran").exists()


def test_no_memory_is_allocated_for_a_model_that_the_tensors_are_not_of() -> None:
    weights, _ = trained(bert.Config)
    huge = replace(weights, config=replace(weights.config, vocab_size=10**13))
    with pytest.raises(CheckpointError, match="has vocab_size 10000000000000, which its"):
        huge.model()


def test_tensors_of_another_size_are_no_weights_of_the_model() -> None:
    weights, _ = trained(bert.Config)
    larger = replace(weights, config=replace(weights.config, vocab_size=1000))
    with pytest.raises(CheckpointError, match=r"of its model, first embeddings\.tokens\.weight"):
        larger.model()

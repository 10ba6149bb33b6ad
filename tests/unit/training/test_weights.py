"""Trained models that are used without their objective."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.reading.dataset import Dataset
from samestep.config import to_tree
from samestep.errors import CheckpointError, ConfigError
from tests.integration.commands import Samestep
from trainer.checkpoint.huggingface import save_folder
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.models import Model
from trainer.models.codecs import codec_of
from trainer.models.families import bert
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights, load_config, load_weights


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


def exported(folder: Path, **settings: object) -> Path:
    """A small BERT in Hugging Face format, with some settings of its config.json changed."""
    weights, model = trained(bert.Config)
    assert isinstance(weights.config, bert.Config)
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    tensors = {
        name: each.clone()
        for name, each in codec_of(weights.config).export_tensors(tensors).items()
    }
    save_folder(folder, codec_of(weights.config).to_huggingface() | settings, tensors)
    return folder


def test_settings_that_no_model_reads_may_be_any_numbers(tmp_path: Path) -> None:
    """As in files of well-known models, and of programs that add settings of their own."""
    plain = load_weights(exported(tmp_path / "plain"))
    others = {
        "bos_token_id": 2**31,
        "eos_token_id": [1, 106],
        "decoder_start_token_id": 250_004,
        "block_size": 4096,
        "attention_window": 512,
        "num_buckets": 1024,
        "n_groups": 4096,
        "model_max_length": 10**30,
        "n_positions": 10**9,
        "n_ctx": 2**21,
        "d_kv": 2**21,
        "max_window_layers": 1000,
        "rope_theta": 10_000_000,
        "rotary_emb_base": 500_000,
        "original_max_position_embeddings": 2**22,
        "seq_length": 10**7,
        "num_labels": 5000,
        "stage3_max_live_parameters": 10**9,
        "reduce_bucket_size": 5 * 10**8,
        "train_batch_size": 2**22,
        "num_experts_per_group": 1000,
        "layer_shift": 4096,
    }
    found = load_weights(exported(tmp_path / "others", **others))
    assert found.config == plain.config
    assert sorted(found.tensors) == sorted(plain.tensors)
    assert load_config(tmp_path / "others") == plain.config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 9_000}, "layers 9000, which its [0-9]+ tensors cannot have"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"vocab_size": 2**40}, r"\[40, 8\] instead of \[1099511627776, 8\]"),
        ({"intermediate_size": 2**62}, "no model can be built of the settings"),
        (
            {"num_labels": 10**12, "architectures": ["BertForSequenceClassification"]},
            "num_labels 1000000000000, more than",
        ),
    ],
)
def test_sizes_that_the_tensors_of_a_folder_cannot_have(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    folder = exported(tmp_path / "model", **settings)
    if "num_labels" in settings:
        tensors = load_file(folder / "model.safetensors")
        shapes = {"classifier": 2, "bert.pooler.dense": 8}
        head = {f"{name}.weight": torch.zeros(size, 8) for name, size in shapes.items()}
        head |= {f"{name}.bias": torch.zeros(size) for name, size in shapes.items()}
        save_file(tensors | head, folder / "model.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_weights(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 9_000}, r"layers 9000, which its [0-9]+ tensors cannot have"),
        ({"width": 2**20}, r"are of a model with [0-9]+ parameters, and its tensors have [0-9]+ "),
        ({"ffn_width": 2**62}, "no model can be built of the settings"),
        ({"peft": {"kind": "prompt", "length": 2**40}}, "are of a model with"),
    ],
)
def test_sizes_that_the_tensors_of_a_checkpoint_cannot_have(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    weights, _ = trained(bert.Config)
    tensors = {f"model/{name}": weights.tensors[name].detach() for name in weights.tensors}
    for name, changes in {"right": {}, "wrong": changed}.items():
        model = {"kind": "bert", **to_tree(weights.config), **changes}
        checkpoints = Checkpointer(
            tmp_path / name / "checkpoints", Config(asynchronous=False), rank=0, world_size=1
        )
        settings = {"objective": {"kind": "mlm"}, "output": "", "data": {}, "training": {}}
        checkpoints.save(3, tensors, {"config": {**settings, "model": model}})
        checkpoints.wait()
    assert load_weights(tmp_path / "right").config == weights.config
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "wrong")


def test_tensors_of_another_size_are_no_weights_of_the_model() -> None:
    weights, _ = trained(bert.Config)
    larger = replace(weights, config=replace(weights.config, vocab_size=1000))
    with pytest.raises(CheckpointError, match=r"of its model, first embeddings\.tokens\.weight"):
        larger.model()

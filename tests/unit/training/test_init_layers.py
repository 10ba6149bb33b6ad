"""Models that start from some of the layers of a trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.reading.dataset import Dataset
from samestep.errors import ConfigError
from tests.integration.commands import Samestep
from trainer.checkpoint.layout import StoredTensors
from trainer.models.families import bert, t5
from trainer.training.weights.initial import choose_layers, stored_values
from trainer.training.weights.loading import Weights, load_weights

SHAPE: dict[str, Any] = {"vocab_size": 40, "width": 8, "heads": 2, "ffn_width": 16}


def weights_of(config: Any) -> Weights:
    model = config.build()
    tensors = StoredTensors.of(dict(model.named_parameters()))
    return Weights(config, tensors, Path("w"), Path("t"))


@pytest.mark.parametrize(
    ("config", "stacks"),
    [
        (bert.Config(**SHAPE, layers=4), ["layers"]),
        (t5.Config(**SHAPE, layers=4, head_width=4), ["encoder", "decoder"]),
    ],
)
def test_layers_are_taken_in_the_order_in_which_they_are_named(
    config: Any, stacks: list[str]
) -> None:
    trained = weights_of(config)
    chosen = choose_layers(trained, [0, 3, 2, 3]).tensors
    for stack in stacks:
        for number, origin in enumerate([0, 3, 2, 3]):
            name = f"{stack}.{{}}.ffn.up.weight"
            assert torch.equal(chosen[name.format(number)], trained.tensors[name.format(origin)])
    few = choose_layers(trained, [0, 2]).tensors
    assert set(few) == {name for name, _ in replace(config, layers=2).build().named_parameters()}
    assert torch.equal(few["embeddings.tokens.weight"], trained.tensors["embeddings.tokens.weight"])
    with pytest.raises(
        ConfigError, match="init_layers names layer 4, and w has 4, numbered from 0; use 0 to 3"
    ):
        choose_layers(trained, [1, 4])


def test_a_run_starts_from_the_layers_that_it_names(
    finished_run: Path,
    dataset_folder: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    trained, start = load_weights(finished_run), f"init_from={finished_run}"
    config = replace(trained.config, layers=1)
    values = stored_values(
        choose_layers(trained, [1]), config.build(), Dataset.open(dataset_folder), seed=0
    )
    assert torch.equal(
        values("layers.0.ffn.up.bias", 0, 64), trained.tensors["layers.1.ffn.up.bias"]
    )
    train = (
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        "training.steps=1",
        "schedule.warmup_steps=0",
    )
    still = ("optimizer.lr=1e-12", "optimizer.weight_decay=0")
    assert samestep(*train, *still, start, "model.layers=1", "init_layers=[1]").code == 0
    found = load_weights(tmp_path / "run").tensors
    for name in ("layers.0.ffn.up.weight", "embeddings.norm.bias"):
        expected = trained.tensors[name.replace("layers.0", "layers.1")]
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)
    for settings, message in (
        (("init_layers=[1]", "model.layers=1"), "which are layers of init_from, and there is none"),
        (
            (start, "init_layers=[0,1]", "model.layers=1"),
            "and model.layers is 1; name a layer for each, or set model",
        ),
        ((start, "init_layers=[2]", "model.layers=1"), "init_layers names layer 2"),
        ((start, "init_layers=[-1]", "model.layers=1"), "init_layers names layer -1"),
    ):
        assert message in samestep(*train, "output=" + str(tmp_path / "other"), *settings).message

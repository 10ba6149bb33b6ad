"""Settings that may differ from those of a checkpoint."""

from __future__ import annotations

import copy

import pytest

from trainer.config import Tree, to_tree
from trainer.errors import ConfigError
from trainer.training.checkpoints import changes_since
from trainer.training.starting import load_experiment

ROBERTA = "model={kind: roberta, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64}"


def description(file: str, *overrides: str) -> Tree:
    experiment = load_experiment(file, ["model.kind=roberta", ROBERTA, *overrides])
    return {"config": to_tree(experiment), "teacher": None, "step": 3}


def test_settings_of_initial_weights_may_change(experiment_file: str) -> None:
    stored = description(experiment_file)
    now = description(experiment_file, "model.initialization=fairseq", "training.steps=20")
    changes = "model.initialization: bert -> fairseq, training.steps: 12 -> 20"
    assert changes_since(stored, now) == changes
    now = description(experiment_file, "model.initializer_range=0.1")
    assert changes_since(stored, now) == "model.initializer_range: 0.02 -> 0.1"
    now = description(experiment_file, "model.norm_eps=1e-6", "model.initialization=fairseq")
    with pytest.raises(ConfigError, match=r"of another model .*norm_eps: 1e-05 -> 1e-06"):
        changes_since(stored, now)


def test_settings_that_did_not_exist_have_their_defaults(experiment_file: str) -> None:
    stored = description(experiment_file)
    old = copy.deepcopy(stored)
    for section, name in (("model", "initialization"), ("model", "peft"), ("training", "faults")):
        del old["config"][section][name]
    assert changes_since(old, stored) == ""
    old["config"]["training"]["no_longer_there"] = 1
    assert "training.no_longer_there: 1 -> None" in changes_since(old, stored)

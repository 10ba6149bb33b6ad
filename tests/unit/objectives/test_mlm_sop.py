"""Masked LM with sentence order: the names of its terms, and the pairs that it needs."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.objectives.test_mlm_nsp import VOCABULARY, random_pairs
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives.kinds import mlm_nsp, mlm_sop


class Model(torch.nn.Module):
    """Logits that depend on the tokens."""

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, torch.Tensor]:
        assert inputs.predicted is not None
        sums = inputs.tokens.float().sum(1)
        tokens = torch.arange(100).expand(*inputs.predicted.shape, 100) / 50
        return {
            "tokens": tokens.clone(),
            "next_sentence": torch.stack((sums / 500, -sums / 700), 1),
        }


def test_it_is_next_sentence_prediction_on_pairs_in_order_or_swapped() -> None:
    objective = mlm_sop.Config().build(VOCABULARY)
    other = mlm_nsp.Config().build(VOCABULARY)
    assert objective.pack_spec(64).pairs == "order"
    examples = random_pairs(8, 64)
    batch, same = objective.collate(examples, 64), other.collate(examples, 64)
    assert batch.keys() == same.keys()
    assert all(np.array_equal(batch[name], same[name]) for name in batch)
    assert objective.weights(batch) == {
        "mlm": other.weights(batch)["mlm"],
        "sop": other.weights(batch)["nsp"],
    }
    columns = {name: torch.from_numpy(array) for name, array in batch.items()}
    losses = []
    for each in (objective, other):
        totals = {name: torch.tensor(value) for name, value in each.weights(batch).items()}
        losses.append(each.loss(Model(), columns, totals))
    assert torch.equal(losses[0].total, losses[1].total)
    assert set(losses[0].metrics) == {
        *("loss", "mlm_loss", "sop_loss", "accuracy", "sop_accuracy"),
    }

"""The vectors of `training.retrieval`: of all ranks together, and in batches of one shape."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.outputs import fill, random_parameters
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.families.bert import Config
from trainer.strategies import Replica
from trainer.training.observers import retrieval
from trainer.training.observers.retrieval import RetrievalScores, TokenizedCollection

LENGTHS = np.random.default_rng(0).integers(2, 33, 50)
TEXTS = [np.arange(length, dtype=np.uint16) % 40 + number for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def settings() -> Config:
    return Config(vocab_size=128, layers=1, width=16, heads=2, ffn_width=32, max_positions=32)


@pytest.fixture(scope="module")
def model(settings: Config) -> Any:
    model = settings.build().eval()
    fill(model, random_parameters(model))
    return model


def vectors(model: Any, settings: Config, replica: Replica, shapes: list[torch.Size]) -> Tensor:
    """What one rank puts into the table; batches of one shape, if `replica` has several devices."""

    def run(inputs: Any, outputs: Any) -> Any:
        shapes.append(inputs.tokens.shape)
        return model(inputs, outputs)

    strategy: Any = SimpleNamespace(
        replica=replica,
        compiles_layers=replica.devices > 1,
        accelerator=SimpleNamespace(compiles=False, graph=lambda work: nullcontext()),
        autocast=nullcontext,
        to_device=dict,
        keep_rows=lambda rows: rows,
        rows_on_host=list,
        all_reduce=lambda table: table,
    )
    texts = TokenizedCollection(Pooling(pool="weighted"), [], TEXTS, 32)
    collection: Any = SimpleNamespace(documents={})
    found = RetrievalScores(["ndcg@10"], collection, [texts], settings, run, strategy)  # type: ignore[arg-type]
    with torch.no_grad():
        return found._embed(texts, TEXTS)


def test_ranks_share_the_batches_of_one(
    model: Any, settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", 200)
    alone: list[torch.Size] = []
    expected = vectors(model, settings, Replica(0, 1), alone)
    torch.testing.assert_close(expected.norm(dim=1), torch.ones(50))
    for count in (2, 3, 12):  # more ranks than batches, too
        shapes: list[list[torch.Size]] = [[] for _ in range(count)]
        tables = [vectors(model, settings, Replica(n, count), shapes[n]) for n in range(count)]
        assert torch.equal(torch.stack(tables).sum(0), expected)
        assert {len(each) for each in shapes} == {-(-len(alone) // count)}


def test_compiled_layers_get_batches_of_one_shape(
    model: Any, settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", 200)
    expected = vectors(model, settings, Replica(0, 1), [])
    shapes: list[torch.Size] = []
    found = vectors(model, settings, Replica(0, 1, devices=4), shapes)
    assert {*shapes} == {(4, 32)}
    assert len(shapes) == 13  # 50 texts by 4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

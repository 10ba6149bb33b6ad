"""Models are converted to and from transformers' names without being in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.deferred import defer, stored
from trainer.checkpoint.layout import StoredPiece, StoredTensors
from trainer.models.codecs import codec_of
from trainer.models.families import bert, gpt2, t5

MODELS = {
    "bert": bert.Config(
        vocab_size=50, layers=2, width=12, heads=2, ffn_width=20, max_positions=16, nsp=True
    ),
    "untied": bert.Config(
        vocab_size=50, layers=1, width=12, heads=2, ffn_width=20, max_positions=16, tied=False
    ),
    "t5": t5.Config(vocab_size=50, layers=2, width=12, heads=2, head_width=6, ffn_width=20),
    "gpt2": gpt2.Config(vocab_size=50, layers=2, width=12, heads=2, ffn_width=20, max_positions=16),
}


@dataclass
class Counted:
    """Tensors that count how often they are read."""

    tensors: dict[str, Tensor]
    reads: Counter[str]

    def stored(self) -> StoredTensors:
        pieces = StoredTensors.of(self.tensors).pieces
        return StoredTensors({name: [self._counted(each)] for name, (each,) in pieces.items()})

    def _counted(self, piece: StoredPiece) -> StoredPiece:
        def elements(start: int, stop: int) -> Tensor:
            self.reads[piece.name] += 1
            return piece.elements(start, stop)

        return replace(piece, elements=elements)


@pytest.mark.parametrize("name", MODELS)
def test_deferred_conversion_equals_conversion_and_reads_tensors_one_by_one(name: str) -> None:
    config: Any = MODELS[name]
    ours = {
        name: torch.rand(parameter.shape) for name, parameter in config.build().named_parameters()
    }
    theirs = codec_of(config).export_tensors(ours)
    exported = stored(codec_of(config).export_tensors(defer(Counted(ours, Counter()).stored())))
    assert exported.keys() == theirs.keys()
    assert all(torch.equal(exported[name], theirs[name]) for name in theirs)

    source = Counted(theirs, Counter())
    imported = stored(codec_of(config).import_tensors(defer(source.stored())))
    assert imported.keys() == ours.keys()
    source.reads.clear()
    for number, name in enumerate(ours):
        assert torch.equal(imported[name], ours[name])
        assert len(source.reads) <= 3 * (number + 1), (
            "no more than queries, keys and values at a time"
        )
    assert set(source.reads.values()) == {1}

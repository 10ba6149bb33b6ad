"""A small training problem that needs no files: a BERT on random tokens, with dropout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samestep.examples import Examples, Vocabulary
from samestep.hashing import combine, hash_rows, name_key
from trainer.models import ModelConfig
from trainer.models.families import bert
from trainer.objectives import Objective
from trainer.objectives.kinds import mlm
from trainer.strategies import Replica
from trainer.training.passes import MicroBatches

SEED = 7
STEPS = 8

_UNITS, _ROWS, _LENGTH = 8, 4, 32  # of a global batch, of a unit, of a row
_COMMON = 20  # the tokens that occur: a model learns that soon
_TEXT = 14  # tokens; two texts with [CLS] and [SEP] fill a row
_TOKENS, _DROPOUT, _MASKS = map(name_key, ("certify.tokens", "certify.dropout", "certify.masks"))
_VOCABULARY = Vocabulary(size=512, pad=0, cls=1, sep=2, mask=3, special=(0, 1, 2, 3, 4))


def model_config() -> ModelConfig:
    return bert.Config(
        vocab_size=_VOCABULARY.size,
        layers=2,
        width=128,
        heads=2,
        ffn_width=256,
        max_positions=_LENGTH,
        dropout=0.1,
        attention_dropout=0.1,
    )


def objective() -> Objective:
    return mlm.Config().build(_VOCABULARY)


def units(step: int, replica: Replica) -> MicroBatches:
    """A replica's units of the global batch of a step; all replicas have the same number."""
    count = -(-_UNITS // replica.count)
    first = replica.index * count
    return [_unit(step, index, index < _UNITS) for index in range(first, first + count)]


def _unit(step: int, index: int, is_used: bool) -> dict[str, Tensor]:
    """One unit: columns [B, ...] on the host; an unused one has no weight."""
    number = (step * _UNITS + index) * _ROWS + np.arange(_ROWS)
    tokens = combine(SEED, _TOKENS, number[:, None], np.arange(2 * _TEXT)) % np.uint64(_COMMON)
    examples = Examples(
        tokens=(tokens.ravel() + np.uint64(len(_VOCABULARY.special))).astype(np.int32),
        row=np.arange(_ROWS).repeat(2),
        column=np.tile([1, _TEXT + 3], _ROWS),
        length=np.full(2 * _ROWS, _TEXT),
        key=combine(SEED, _MASKS, number),
        weight=np.full(_ROWS, is_used, dtype=np.float32),
        isolated=True,
    )
    columns = dict(objective().collate(examples, _LENGTH))
    columns["dropout_key"] = combine(SEED, _DROPOUT, number).astype(np.uint32).view(np.int32)
    columns["digest"] = hash_rows(tokens).view(np.int64) * is_used
    return {name: torch.from_numpy(column) for name, column in columns.items()}

"""SpanBERT's objective: spans of words, replaced as one, and their boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from samestep.hashing import mix
from trainer.models.families import bert
from trainer.models.inputs import Inputs
from trainer.objectives.kinds import mlm_sbo

PAD, CLS, SEP, MASK = 0, 1, 2, 3
CONTINUING = tuple(range(70, 100))
VOCABULARY = Vocabulary(100, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK), continuing=CONTINUING)
MODEL = bert.Config(
    vocab_size=100, layers=2, width=16, heads=2, ffn_width=32, max_positions=64, span_boundary=True
)


def examples(rows: int = 40, seed: int = 0) -> Examples:
    """Rows of two packed documents, [CLS] 30 [SEP] [CLS] 28 [SEP]; the last row only pads."""
    random = np.random.default_rng(seed)
    length = np.tile([30, 28], rows)
    weight = np.ones(rows, dtype=np.float32)
    weight[-1] = 0
    return Examples(
        tokens=random.integers(4, 100, length.sum()).astype(np.int32),
        row=np.repeat(np.arange(rows), 2),
        column=np.tile([1, 33], rows),
        length=length,
        key=mix(np.arange(rows)),
        weight=weight,
        isolated=True,
    )


def collate(**settings: Any) -> tuple[mlm_sbo.MaskedSpans, dict[str, Any], np.ndarray]:
    """The objective, a batch, and its original tokens."""
    objective = mlm_sbo.Config(**settings).build(VOCABULARY)
    assert isinstance(objective, mlm_sbo.MaskedSpans)
    batch = objective.collate(examples(), 64)
    original = batch["tokens"].copy()
    used = np.arange(batch["labels"].shape[1]) < (batch["labels"] > 0).sum(1)[:, None]
    row, entry = np.nonzero(used & (batch["predicted"] > 0))
    original[row, batch["predicted"][row, entry]] = batch["labels"][row, entry]
    return objective, batch, original


def test_spans_are_whole_words_with_their_boundaries() -> None:
    _, batch, original = collate()
    assert (batch["weights"].sum(1) > 0).sum() == 39
    lengths = []
    for row in range(39):
        used = int(batch["weights"][row].sum())
        predicted = batch["predicted"][row, :used].tolist()
        assert used <= 9  # 15 % of 58
        assert predicted == sorted(predicted)
        firsts = sorted(set(batch["span_first"][row, :used].tolist()))
        covered = []
        for first in firsts:
            entry = batch["span_first"][row, :used].tolist().index(first)
            last = int(batch["span_last"][row, entry])
            inside = list(range(first, last + 1))
            assert batch["span_offset"][row, entry : entry + len(inside)].tolist() == list(
                range(len(inside))
            )
            covered += inside
            lengths.append(len(inside))
            # Whole words of one document: it starts at a word, and no word goes on behind it.
            text = original[row]
            assert (text[inside] > 3).all()
            assert text[first] < 70 or text[first - 1] <= 3
            assert text[last + 1] < 70
        assert covered == predicted
    assert np.mean(lengths) > 2


def test_a_span_is_replaced_as_one() -> None:
    _, batch, original = collate(mask_fraction=0.5)
    kinds = set()
    for row in range(39):
        used = int(batch["weights"][row].sum())
        for first in set(batch["span_first"][row, :used].tolist()):
            entry = batch["span_first"][row, :used].tolist().index(first)
            inside = slice(first, int(batch["span_last"][row, entry]) + 1)
            new, old = batch["tokens"][row, inside], original[row, inside]
            kind = "mask" if (new == MASK).all() else "keep" if (new == old).all() else "random"
            if kind == "random":
                assert not (new == MASK).any()
            if len(new) > 1:
                kinds.add(kind)
    assert kinds == {"mask", "keep", "random"}


def test_unused_entries_have_positions_beside_them() -> None:
    _, batch, _ = collate()
    unused = batch["weights"] == 0
    assert (batch["span_first"] >= 1).all()
    assert (batch["span_last"] + 1 < 64).all()
    assert (batch["boundary_weights"][unused] == 0).all()


def test_far_tokens_are_not_predicted_from_boundaries() -> None:
    objective, batch, _ = collate(boundary_tokens=2)
    weights = objective.weights(batch)
    assert weights["sbo"] == (batch["weights"] * (batch["span_offset"] < 2)).sum()
    assert 0 < weights["sbo"] < weights["mlm"]


def test_the_losses_are_those_of_the_paper() -> None:
    """Equations (1) to (3) of section 3.2, token by token."""
    torch.manual_seed(0)
    objective, batch, _ = collate()
    model = MODEL.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    columns = {name: torch.from_numpy(np.asarray(array)) for name, array in batch.items()}
    totals = {name: torch.tensor(value) for name, value in objective.weights(batch).items()}
    loss = objective.loss(model, columns, totals)

    whole = model(
        Inputs(*(columns[n] for n in ("tokens", "segments", "positions"))), frozenset({"hidden"})
    )
    hidden, table = whole["hidden"], model.token_embeddings
    head, mlm_head = model.span_head, model.head
    own, boundary = [], []
    for row, entry in np.argwhere(batch["weights"] > 0).tolist():
        at, label = batch["predicted"][row, entry], columns["labels"][row, entry]
        first, last = batch["span_first"][row, entry], batch["span_last"][row, entry]
        own.append(F.cross_entropy(mlm_head(hidden[row, at][None, None], table)[0, 0], label))
        place = head.positions.weight[at - first]
        h0 = torch.cat([hidden[row, first - 1], hidden[row, last + 1], place])
        h1 = F.layer_norm(
            F.gelu(head.first(h0)), (16,), head.first_norm.weight, head.first_norm.bias, 1e-12
        )
        y = F.layer_norm(
            F.gelu(head.second(h1)), (16,), head.second_norm.weight, head.second_norm.bias, 1e-12
        )
        boundary.append(F.cross_entropy(table @ y, label))
    expected = torch.stack(own).mean() + torch.stack(boundary).mean()
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss.total, parameters, allow_unused=True, retain_graph=True)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    mean = {name: (total / weight).item() for name, (total, weight) in loss.metrics.items()}
    assert mean["loss"] == pytest.approx(loss.total.item(), rel=1e-6)
    assert mean["mlm_loss"] + mean["sbo_loss"] == pytest.approx(mean["loss"], rel=1e-6)


def test_spans_longer_than_the_sequence_are_refused() -> None:
    objective = mlm_sbo.Config().build(VOCABULARY)
    assert objective.pack_spec(12).sequence_length == 12
    with pytest.raises(ConfigError, match="longest_span is 10, but a sequence of 11"):
        objective.pack_spec(11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ngrams": 3}, "mlm_sbo masks spans"),
        ({"span_p": 1.0}, "span_p is 1.0"),
        ({"longest_span": 0}, "longest_span is 0"),
        ({"boundary_tokens": 0}, "boundary_tokens is 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mlm_sbo.Config(**settings)

"""Masked language modeling: the layout of rows, which tokens are masked and how, and the loss."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from samestep.hashing import mix
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives.kinds.mlm import Config

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = Vocabulary(
    size=1000, pad=PAD, cls=CLS, sep=SEP, mask=MASK, special=(PAD, CLS, SEP, MASK, 999)
)


def make_examples(
    rows: list[list[list[int]]], isolated: bool, keys: list[int] | None = None
) -> Examples:
    """Rows of chunks of tokens, packed without gaps."""
    tokens, row, column, length = [], [], [], []
    for number, chunks in enumerate(rows):
        position = 1
        for chunk in chunks:
            tokens += chunk
            row.append(number)
            column.append(position)
            length.append(len(chunk))
            position += len(chunk) + (2 if isolated else 1)
    as_int = [np.array(values, dtype=np.int64) for values in (row, column, length)]
    key = np.array(range(len(rows)) if keys is None else keys, dtype=np.uint64)
    return Examples(
        np.array(tokens, np.int32), *as_int, mix(key), np.ones(len(rows), np.float32), isolated
    )


def random_examples(batch: int, width: int, isolated: bool, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        chunks, left = [], width - (0 if isolated else 1)
        while (room := left - (2 if isolated else 1)) > 0 and len(chunks) < 5:
            size = int(rng.integers(1, room + 1))
            chunks.append(rng.integers(4, 999, size).tolist())
            left -= size + (2 if isolated else 1)
        rows.append(chunks)
    return make_examples(rows, isolated, keys=rng.integers(0, 2**62, batch).tolist())


def unmask(batch: dict[str, np.ndarray]) -> np.ndarray:
    tokens = batch["tokens"].copy()
    np.put_along_axis(tokens, batch["predicted"], batch["labels"].astype(np.int32), axis=1)
    return tokens


def test_isolated_rows_hold_sequences_with_their_own_specials_and_positions():
    examples = make_examples([[[10, 11, 12], [20]], [[30, 31]]], isolated=True)
    batch = Config().build(VOCABULARY).collate(examples, 10)
    assert unmask(batch).tolist() == [
        [CLS, 10, 11, 12, SEP, CLS, 20, SEP, 0, 0],
        [CLS, 30, 31, SEP, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["segments"].tolist() == [
        [1, 1, 1, 1, 1, 2, 2, 2, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["positions"].tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0, 0, 0],
    ]


def test_concatenated_rows_are_one_sequence_with_a_separator_after_each_chunk():
    examples = make_examples([[[10, 11, 12], [20]], [[30, 31]]], isolated=False)
    batch = Config().build(VOCABULARY).collate(examples, 8)
    assert unmask(batch).tolist() == [
        [CLS, 10, 11, 12, SEP, 20, SEP, 0],
        [CLS, 30, 31, SEP, 0, 0, 0, 0],
    ]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 0, 0, 0, 0]]


def test_gaps_that_the_packer_leaves_are_padding():
    column = np.array([3, 8], dtype=np.int64)
    ones = np.ones(2, dtype=np.int64)
    examples = Examples(
        np.array([50, 60], np.int32),
        ones,
        column,
        ones,
        mix([1, 2, 3]),
        np.ones(3, np.float32),
        True,
    )
    batch = Config().build(VOCABULARY).collate(examples, 12)
    assert unmask(batch)[1].tolist() == [0, 0, CLS, 50, SEP, 0, 0, CLS, 60, SEP, 0, 0]
    assert batch["segments"][1].tolist() == [0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 0, 0]
    assert batch["weights"].sum() == 1  # rows without chunks predict nothing
    assert not batch["tokens"][[0, 2]].any()


def test_arrays_have_the_promised_types_and_a_static_number_of_predictions():
    objective = Config().build(VOCABULARY)
    for width, predictions in ((128, 19), (512, 76), (3, 1)):
        batch = objective.collate(random_examples(4, width, isolated=False), width)
        assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
            "tokens": ("int32", (4, width)),
            "segments": ("int32", (4, width)),
            "positions": ("int32", (4, width)),
            "predicted": ("int64", (4, predictions)),
            "labels": ("int64", (4, predictions)),
            "weights": ("float32", (4, predictions)),
        }


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.5, 1.0])
def test_each_row_predicts_the_exact_number_of_its_own_tokens_and_only_those(
    isolated: bool, fraction: float
):
    width = 96
    examples = random_examples(200, width, isolated)
    batch = Config(mask_fraction=fraction).build(VOCABULARY).collate(examples, width)
    available = np.bincount(examples.row, examples.length, minlength=200)
    expected = [max(1, round(fraction * count)) for count in available]
    assert batch["weights"].sum(axis=1).tolist() == expected
    used = batch["weights"] > 0
    for row in range(200):
        assert len(set(batch["predicted"][row][used[row]])) == expected[row]
    assert (batch["labels"][used] > MASK).all()
    assert not batch["predicted"][~used].any()
    # Undoing the masks gives back the text, so the other positions were not touched.
    assert np.array_equal(unmask(batch)[unmask(batch) > MASK], examples.tokens)


def test_special_tokens_in_the_text_are_never_masked():
    examples = make_examples([[[999, 40, SEP, MASK, 999]]] * 50, isolated=False)
    batch = Config(mask_fraction=1.0).build(VOCABULARY).collate(examples, 8)
    assert batch["weights"].sum(axis=1).tolist() == [1.0] * 50
    assert set(batch["labels"][batch["weights"] > 0]) == {40}


def test_a_row_does_not_depend_on_its_batch():
    width = 64
    objective = Config().build(VOCABULARY)
    rng = np.random.default_rng(1)
    rows = [[rng.integers(4, 999, size).tolist()] for size in rng.integers(1, 60, 12)]
    whole = objective.collate(make_examples(rows, True, keys=list(range(12))), width)
    for order in ([5], [11, 0, 5, 5], list(range(11, -1, -1))):
        part = objective.collate(make_examples([rows[i] for i in order], True, keys=order), width)
        for name, array in part.items():
            assert np.array_equal(array, whole[name][order]), name


def test_masks_change_with_the_key_and_are_spread_evenly_over_the_row():
    row = [list(range(10, 72))]
    batch = Config().build(VOCABULARY).collate(make_examples([row] * 20_000, False), 64)
    counts = np.bincount(batch["predicted"].ravel(), minlength=64)
    assert counts[0] == counts[63] == 0
    expected = 20_000 * 9 / 62
    chi_square = ((counts[1:63] - expected) ** 2 / expected).sum()
    assert chi_square < 110  # 61 degrees of freedom: 99.99 % lie below


def test_a_row_has_as_many_maskings_as_are_asked_for():
    row = list(range(10, 40))
    examples = make_examples([[row]] * 200 + [[row[::-1]]], isolated=True)
    for maskings in (1, 3):
        predicted = Config(maskings=maskings).build(VOCABULARY).collate(examples, 32)["predicted"]
        assert len(np.unique(predicted[:200], axis=0)) == maskings
        assert not (predicted[:200] == predicted[200]).all(axis=1).any()
    predicted = Config().build(VOCABULARY).collate(examples, 32)["predicted"]
    assert len(np.unique(predicted[:200], axis=0)) > 190


def test_predicted_tokens_are_masked_replaced_and_kept_at_the_given_rates():
    examples = make_examples([[[500] * 62]] * 20_000, False)
    batch = Config(replace_mask=0.6, replace_random=0.3).build(VOCABULARY).collate(examples, 64)
    seen = np.take_along_axis(batch["tokens"], batch["predicted"], axis=1)
    assert (seen == MASK).mean() == pytest.approx(0.6, abs=0.005)
    assert (seen == 500).mean() == pytest.approx(0.1 + 0.3 / 995, abs=0.005)
    replaced = seen[(seen != MASK) & (seen != 500)]
    counts = np.bincount(replaced, minlength=1000)
    assert not counts[list(VOCABULARY.special)].any()
    expected = replaced.size / 994
    ordinary = np.setdiff1d(np.arange(1000), [*VOCABULARY.special, 500])
    assert (
        (counts[ordinary] - expected) ** 2 / expected
    ).sum() < 1170  # 993 degrees of freedom, 99.99 %


def test_masks_do_not_change_between_versions():
    batch = (
        Config()
        .build(VOCABULARY)
        .collate(make_examples([[list(range(10, 72))]], False, keys=[7]), 64)
    )
    seen = np.take_along_axis(batch["tokens"], batch["predicted"], axis=1)
    assert batch["predicted"].tolist() == [[7, 57, 27, 8, 14, 35, 62, 3, 48]]
    assert seen.tolist() == [[493, 3, 36, 3, 3, 3, 3, 3, 3]]


def test_rows_of_weight_zero_are_whole_but_count_for_nothing():
    examples = dataclasses.replace(
        random_examples(3, 32, True), weight=np.array([1, 0, 1], np.float32)
    )
    objective = Config().build(VOCABULARY)
    batch = objective.collate(examples, 32)
    assert not batch["weights"][1].any()
    assert batch["segments"][1].any()
    assert objective.weights(batch) == {"mlm": float(batch["weights"][[0, 2]].sum())}
    assert objective.weights(
        {name: torch.from_numpy(array) for name, array in batch.items()}
    ) == objective.weights(batch)


def test_a_batch_of_no_chunks_is_all_padding():
    batch = Config().build(VOCABULARY).collate(make_examples([[], []], False), 16)
    assert not any(array.any() for array in batch.values())


class Embedder(torch.nn.Module):
    """Logits that depend on nothing but the position; remembers what it was called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(
            torch.randn(width, 1000, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, torch.Tensor]:
        assert outputs == {"tokens"}
        self.inputs = inputs
        assert inputs.predicted is not None
        return {"tokens": self.table[inputs.predicted]}


def tensors(examples: Examples, width: int) -> dict[str, torch.Tensor]:
    batch = Config().build(VOCABULARY).collate(examples, width)
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def test_loss_is_the_mean_over_the_predictions_of_the_whole_step():
    objective = Config().build(VOCABULARY)
    model = Embedder(48)
    parts = [tensors(random_examples(3, 48, True, seed), 48) for seed in range(3)]
    totals = {"mlm": torch.tensor(sum(objective.weights(part)["mlm"] for part in parts))}
    losses = [objective.loss(model, part, totals) for part in parts]
    used = [part["weights"] > 0 for part in parts]
    logits = torch.cat(
        [model.table[part["predicted"]][mask] for part, mask in zip(parts, used, strict=True)]
    )
    labels = torch.cat([part["labels"][mask] for part, mask in zip(parts, used, strict=True)])
    torch.testing.assert_close(sum(loss.total for loss in losses), F.cross_entropy(logits, labels))

    sums = {
        name: [sum(loss.metrics[name][i] for loss in losses) for i in (0, 1)]
        for name in ("loss", "accuracy")
    }
    torch.testing.assert_close(
        sums["loss"][0] / sums["loss"][1], F.cross_entropy(logits, labels).detach()
    )
    assert sums["accuracy"][0] == (logits.argmax(dim=-1) == labels).sum()
    assert not any(
        value.requires_grad for loss in losses for pair in loss.metrics.values() for value in pair
    )


def test_unused_predictions_get_no_gradient():
    objective, model = Config().build(VOCABULARY), Embedder(16)
    batch = tensors(make_examples([[[10, 11]], [list(range(10, 24))]], False), 16)
    objective.loss(model, batch, {"mlm": torch.tensor(3.0)}).total.backward()
    assert model.table.grad is not None
    assert not model.table.grad[0].any()


def test_cross_entropy_is_in_float32_under_autocast():
    objective, model = Config().build(VOCABULARY), Embedder(16)
    model.table.data *= 30
    batch = tensors(random_examples(4, 16, False), 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective.loss(model.bfloat16(), batch, {"mlm": torch.tensor(1.0)})
    logits = model.table[batch["predicted"]].flatten(0, 1).double()
    exact = (
        F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        * batch["weights"].flatten()
    ).sum()
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total.double(), exact, rtol=1e-6, atol=0)


def test_the_model_gets_the_batch_and_the_dropout_key_where_there_is_one():
    objective, model = Config().build(VOCABULARY), Embedder(16)
    batch = tensors(random_examples(2, 16, False), 16)
    objective.loss(model, batch, {"mlm": torch.tensor(1.0)})
    assert model.inputs.dropout_key is None
    key = torch.tensor([1, 2], dtype=torch.int32)
    objective.loss(model, {**batch, "dropout_key": key}, {"mlm": torch.tensor(1.0)})
    assert model.inputs.dropout_key is key
    assert model.inputs.segments is batch["segments"]


@pytest.mark.parametrize("missing", ["pad", "cls", "sep", "mask"])
def test_a_tokenizer_without_the_special_tokens_is_rejected_by_name(missing: str):
    with pytest.raises(
        ConfigError, match=rf"(no|with) \[{missing.upper()}\]\. Use one made for BERT or RoBERTa"
    ):
        Config().build(dataclasses.replace(VOCABULARY, **{missing: None}))


def test_a_vocabulary_of_special_tokens_only_is_rejected():
    with pytest.raises(ConfigError, match="0 ordinary tokens"):
        Config().build(dataclasses.replace(VOCABULARY, size=4))


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_fraction": 0},
        {"mask_fraction": 1.5},
        {"mask_fraction": float("nan")},
        {"replace_mask": 0.95},
        {"replace_random": -0.1},
        {"maskings": 0},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        decode(Config, settings, "objective")


@pytest.mark.parametrize("length", [-1, 0, 2, 65_537])
def test_sequence_lengths_without_room_are_rejected(length: int):
    with pytest.raises(ConfigError, match=f"sequence_length is {length}"):
        Config().build(VOCABULARY).pack_spec(length)

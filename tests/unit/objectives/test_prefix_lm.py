"""Prefix LM: a text is cut at random, nothing is lost, encoder-decoder rows are full."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samestep.errors import ConfigError
from tests.outputs import predict
from tests.unit.objectives.texts import EOS, VOCABULARY, only, pack, pairs_of
from trainer.models.families import bert
from trainer.objectives.kinds.prefix_lm import Config

LAYOUTS = ("encoder_decoder", "prefix_lm")
LENGTHS = [1, 2, 3, 4, 5, 1, 700, *np.random.default_rng(0).integers(1, 90, 60)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded"])
def test_source_and_target_are_the_text_in_two(policy: str, layout: str) -> None:
    objective = Config(layout=layout).build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, texts = pack(LENGTHS, spec, policy)
    pairs = pairs_of(objective.collate(examples, spec.sequence_length))
    assert all(source[-1] == target[-1] == EOS for source, target in pairs)
    whole = [source[:-1] + target[:-1] for source, target in pairs]
    if layout == "encoder_decoder":  # two of each text, if it has two tokens
        halves = iter(whole)
        whole = [next(halves) + (next(halves) if len(text) > 1 else []) for text in texts]
    else:
        assert all(len(source) > 1 for source, _ in pairs)
    assert whole == texts


def test_rows_for_an_encoder_and_a_decoder_are_full_on_both_sides() -> None:
    objective = Config().build(VOCABULARY)
    spec = objective.pack_spec(64)
    assert spec.sequence_length == 2 * 62
    assert objective.predictions(64) == 64
    examples, _ = pack([20 * 124], spec, "concat")
    batch = objective.collate(examples, spec.sequence_length)
    assert batch["tokens"].shape == batch["labels"].shape == (20, 64)
    assert batch["segments"].all()
    assert batch["weights"].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_prefix_length_is_equally_likely(layout: str) -> None:
    objective = Config(layout=layout).build(VOCABULARY)
    length = 11 if layout == "prefix_lm" else 22
    spec = objective.pack_spec(12 if layout == "prefix_lm" else 13)
    assert spec.sequence_length == length
    examples, _ = pack([length] * 4000, spec, "padded")
    prefixes = np.array(
        [len(source) - 1 for source, _ in pairs_of(objective.collate(examples, length))]
    )
    for part in (prefixes,) if layout == "prefix_lm" else (prefixes[::2], prefixes[1::2]):
        counts = np.bincount(part, minlength=11)
        assert counts[0] == 0
        assert counts.size == 11
        chi_squared = ((counts[1:] - 400) ** 2 / 400).sum()
        assert chi_squared < 27.9  # 9 degrees of freedom: exceeded once in 1000 times


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit"])
def test_a_row_is_the_same_alone_and_in_any_batch(policy: str, layout: str) -> None:
    objective = Config(layout=layout).build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, _ = pack(LENGTHS, spec, policy)
    batch = objective.collate(examples, spec.sequence_length)
    for rows in ([3], [7, 0, 5, 5, 3]):
        some = objective.collate(only(examples, rows), spec.sequence_length)
        assert all(np.array_equal(some[name], batch[name][rows]) for name in batch)


def test_the_loss_is_on_what_follows_the_prefix_alone() -> None:
    objective = Config(layout="prefix_lm").build(VOCABULARY)
    spec = objective.pack_spec(16)
    examples, _ = pack([40, 3], spec, "best_fit")
    batch = objective.collate(examples, spec.sequence_length)
    (used,) = np.nonzero(batch["weights"][0])
    positions = batch["predicted"][0][used]
    in_prefix = batch["prefix"][0]
    assert in_prefix[positions[0]]  # from the prefix's end on
    assert not in_prefix[positions[1:]].any()
    assert in_prefix.sum() == positions[0] + 1


def test_no_prediction_sees_what_it_predicts() -> None:
    """A token of a target changes no logits before its own position."""
    objective = Config(layout="prefix_lm").build(VOCABULARY)
    spec = objective.pack_spec(24)
    examples, _ = pack([12, 9], spec, "best_fit")
    batch = {
        name: torch.from_numpy(a)
        for name, a in objective.collate(examples, spec.sequence_length).items()
    }
    config = bert.Config(
        vocab_size=1100, layers=2, width=16, heads=2, ffn_width=32, max_positions=24, causal=True
    )
    model = config.build().eval()
    rows = {name: batch[name] for name in ("tokens", "segments", "positions", "predicted")}
    before = predict(model, **rows)
    last = int((batch["weights"][0] > 0).sum()) - 1
    changed = batch["tokens"].clone()
    changed[0, batch["predicted"][0, last]] += 1  # what the prediction before it is about
    after = predict(model, **rows | {"tokens": changed})
    differs = (before != after).any(-1)[0]
    assert not differs[:last].any()
    assert differs[last]


def test_sequences_without_room_for_text_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"sequence_length is 1\. Use 2 to"):
        Config().build(VOCABULARY).pack_spec(1)
    with pytest.raises(ConfigError, match="z_loss"):
        Config(z_loss=-0.1)

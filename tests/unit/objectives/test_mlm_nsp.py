"""Masked LM with next-sentence prediction: batch, loss terms and their denominators."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samestep.examples import Examples, Vocabulary
from samestep.hashing import mix
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives.kinds import mlm, mlm_nsp

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = Vocabulary(100, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK))


def make_pairs(rows: list[tuple[list[int], list[int]]], random: list[bool]) -> Examples:
    pieces = [piece for row in rows for piece in row]
    column = [at for a, _ in rows for at in (1, len(a) + 2)]
    return Examples(
        tokens=np.concatenate(pieces).astype(np.int32),
        row=np.repeat(np.arange(len(rows)), 2),
        column=np.array(column, dtype=np.int64),
        length=np.array([len(piece) for piece in pieces], dtype=np.int64),
        key=mix(np.arange(len(rows))),
        weight=np.ones(len(rows), dtype=np.float32),
        isolated=False,
        random=np.array(random),
    )


def random_pairs(rows: int, width: int, seed: int = 0) -> Examples:
    random = np.random.default_rng(seed)
    cut = random.integers(1, width - 4, rows)
    made = [
        (random.integers(4, 100, a).tolist(), random.integers(4, 100, width - 3 - a).tolist())
        for a in cut.tolist()
    ]
    return make_pairs(made, (random.random(rows) < 0.5).tolist())


def test_a_row_is_a_pair_with_types_and_a_label() -> None:
    examples = make_pairs([([10, 11], [20]), ([12], [21, 22, 23])], [True, False])
    batch = mlm_nsp.Config().build(VOCABULARY).collate(examples, 8)
    tokens = batch["tokens"].copy()
    np.put_along_axis(tokens, batch["predicted"], batch["labels"].astype(np.int32), axis=1)
    assert tokens.tolist() == [
        [CLS, 10, 11, SEP, 20, SEP, PAD, PAD],
        [CLS, 12, SEP, 21, 22, 23, SEP, PAD],
    ]
    assert batch["token_types"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert batch["segments"].tolist() == [
        [1] * 6 + [0] * 2,
        [1] * 7 + [0],
    ]  # both segments see each other
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert batch["next_labels"].tolist() == [1, 0]  # as in BERT: 0 is "B is the next sentence"


def test_masks_and_token_types_are_those_of_masked_language_modeling() -> None:
    examples = random_pairs(20, 64)
    ours, plain = (
        mlm_nsp.Config().build(VOCABULARY).collate(examples, 64),
        mlm.Config().build(VOCABULARY),
    )
    for name, array in plain.collate(examples, 64).items():
        np.testing.assert_array_equal(ours[name], array)
    without = plain.collate(dataclasses.replace(examples, random=None), 64)
    assert "token_types" not in without


def test_examples_must_be_pairs() -> None:
    spec = mlm_nsp.Config().build(VOCABULARY).pack_spec(128)
    assert (spec.prefix, spec.suffix, spec.pairs) == (1, 1, "next")
    assert not mlm.Config().build(VOCABULARY).pack_spec(128).pairs


class TwoTables(torch.nn.Module):
    """Logits that depend on the position and on the first token only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = torch.nn.Parameter(torch.randn(width, 100, generator=generator))
        self.next = torch.nn.Parameter(torch.randn(100, 2, generator=generator))

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, torch.Tensor]:
        assert outputs == {"tokens", "next_sentence"}
        assert inputs.token_types is not None
        assert inputs.token_types.any()
        words, following = self.words[inputs.predicted], self.next[inputs.tokens[:, -2].long()]
        return {"tokens": words.clone(), "next_sentence": following.clone()}


def test_the_loss_is_the_sum_of_two_means_over_the_whole_step() -> None:
    objective, model = mlm_nsp.Config().build(VOCABULARY), TwoTables(32)
    parts = []
    for seed, size in enumerate((3, 1, 5)):
        examples = random_pairs(size, 32, seed)
        examples.weight[0] = seed != 2  # a row that only pads
        parts.append(
            {
                name: torch.from_numpy(array)
                for name, array in objective.collate(examples, 32).items()
            }
        )
    weights = [objective.weights(part) for part in parts]
    totals = {name: torch.tensor(sum(w[name] for w in weights)) for name in ("mlm", "nsp")}
    assert totals["nsp"] == 8
    losses = [objective.loss(model, part, totals) for part in parts]

    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    both = model(Inputs.of(whole), frozenset({"tokens", "next_sentence"}))
    logits, next_logits = both["tokens"], both["next_sentence"]
    used, real = whole["weights"] > 0, whole["next_weights"] > 0
    of_words = F.cross_entropy(logits[used], whole["labels"][used])
    of_pairs = F.cross_entropy(next_logits[real], whole["next_labels"][real])
    torch.testing.assert_close(sum(loss.total for loss in losses), of_words + of_pairs)

    means = {
        name: sum(loss.metrics[name][0] for loss in losses)
        / sum(loss.metrics[name][1] for loss in losses)
        for name in losses[0].metrics
    }
    expected = {
        "loss": of_words + of_pairs,
        "mlm_loss": of_words,
        "nsp_loss": of_pairs,
        "accuracy": (logits[used].argmax(-1) == whole["labels"][used]).float().mean(),
        "nsp_accuracy": (next_logits[real].argmax(-1) == whole["next_labels"][real]).float().mean(),
    }
    torch.testing.assert_close(means, {name: value.detach() for name, value in expected.items()})
    assert not any(
        value.requires_grad for loss in losses for pair in loss.metrics.values() for value in pair
    )


@pytest.mark.parametrize("whole_words", [False, True])
def test_whole_words_are_a_setting_of_both_objectives(whole_words: bool) -> None:
    vocabulary = dataclasses.replace(VOCABULARY, continuing=tuple(range(50, 100)))
    examples = random_pairs(20, 64)
    config = {"whole_words": whole_words}
    ours = mlm_nsp.Config(**config).build(vocabulary).collate(examples, 64)
    plain = mlm.Config(**config).build(vocabulary).collate(examples, 64)
    np.testing.assert_array_equal(ours["predicted"], plain["predicted"])

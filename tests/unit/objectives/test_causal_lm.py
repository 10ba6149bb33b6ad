"""Left-to-right language modeling predicts each token of a sequence but its first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from tests.outputs import predict
from tests.unit.objectives.texts import pack
from trainer.models import Outputs
from trainer.models.families import bert
from trainer.models.inputs import Inputs
from trainer.objectives.kinds.causal_lm import Config

VOCABULARY = Vocabulary(size=50, pad=0, cls=1, sep=2, mask=3, special=(0, 1, 2, 3))
PAD, CLS, SEP = 0, 1, 2


def _examples(isolated: bool) -> Examples:
    """A row of two chunks, 10 11 12 and 13 14, and a row of one, 15, of weight 0."""
    return Examples(
        tokens=np.arange(10, 16, dtype=np.int32),
        row=np.array([0, 0, 1]),
        column=np.array([1, 6 if isolated else 5, 1]),
        length=np.array([3, 2, 1]),
        key=np.arange(2, dtype=np.uint64),
        weight=np.array([1, 0], dtype=np.float32),
        isolated=isolated,
    )


@pytest.mark.parametrize(
    ("isolated", "pairs"),
    [
        (True, [(CLS, 10), (10, 11), (11, 12), (12, SEP), (CLS, 13), (13, 14), (14, SEP)]),
        (False, [(CLS, 10), (10, 11), (11, 12), (12, SEP), (SEP, 13), (13, 14), (14, SEP)]),
    ],
)
def test_each_token_predicts_the_next_one_of_its_sequence(
    isolated: bool, pairs: list[tuple[int, int]]
) -> None:
    batch = Config().build(VOCABULARY).collate(_examples(isolated), 12)
    used = batch["weights"] > 0
    inputs = np.take_along_axis(batch["tokens"], batch["predicted"], axis=1)
    assert list(zip(inputs[used].tolist(), batch["labels"][used].tolist(), strict=True)) == pairs


def test_end_tokens_surround_texts_if_there_are_no_others() -> None:
    """GPT-2's <|endoftext|>, which is its padding as well."""
    objective = Config().build(Vocabulary(50, None, None, None, None, (49,), eos=49))
    batch = objective.collate(_examples(True), 12)
    assert batch["tokens"][0].tolist() == [49, 10, 11, 12, 49, 49, 13, 14, 49, 49, 49, 49]
    assert batch["segments"][0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch["weights"][0].sum() == 7
    with pytest.raises(ConfigError, match="to end texts with"):
        Config().build(Vocabulary(50, 0, 1, None, 2, (0, 1, 2)))


@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded"])
def test_all_tokens_are_predicted_once_and_no_end_of_a_cut_text(policy: str) -> None:
    objective = Config().build(Vocabulary(1000, PAD, None, None, None, (PAD, SEP), eos=SEP))
    lengths = [35, 10, 3, 14, 28, 4, 15]
    examples, _ = pack(lengths, objective.pack_spec(16), policy)  # 14 tokens of text in a row
    batch = objective.collate(examples, 16)
    labels = batch["labels"][batch["weights"] > 0]
    assert np.array_equal(np.sort(labels[labels != SEP]), np.sort(examples.tokens))
    # A chunk that fills a row may go on elsewhere; under `concat` no text ends where a row does.
    known = lengths if policy == "concat" else [length for length in lengths if length % 14]
    assert (labels == SEP).sum() == len(known)


def test_no_prediction_sees_what_it_predicts() -> None:
    """Changing a token changes no logits before it, and some at and after it."""
    config = bert.Config(
        vocab_size=50, layers=2, width=16, heads=2, ffn_width=32, max_positions=12, causal=True
    )
    model = config.build().eval()
    batch = {
        name: torch.from_numpy(array)
        for name, array in Config().build(VOCABULARY).collate(_examples(True), 12).items()
    }
    rows = {name: batch[name] for name in ("tokens", "segments", "positions")}
    before = predict(model, **rows)
    changed = batch["tokens"].clone()
    changed[0, 2] = 20
    after = predict(model, **rows | {"tokens": changed})
    differs = (before != after).any(-1)[0]
    assert differs.tolist() == [False, False, True, True, True] + [False] * 7


def test_loss_is_the_mean_over_predictions_that_count() -> None:
    objective = Config().build(VOCABULARY)
    batch = objective.collate(_examples(True), 12)
    assert objective.weights(batch) == {"lm": 7.0}
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    logits = torch.randn(2, 11, 50, generator=torch.Generator().manual_seed(0))

    class Fixed(torch.nn.Module):
        def forward(self, _inputs: Inputs, _outputs: Outputs) -> dict[str, torch.Tensor]:
            return {"next_tokens": logits.clone()}

    loss = objective.loss(Fixed(), tensors, {"lm": torch.tensor(7.0)})
    used = tensors["weights"] > 0
    expected = torch.nn.functional.cross_entropy(logits[used], tensors["labels"][used])
    torch.testing.assert_close(loss.total, expected)

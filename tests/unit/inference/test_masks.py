"""Words for masks: texts with masks of their own, and tables wider than the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.outputs import predict
from tests.unit.inference.conftest import WORDS
from trainer.inference.augment import Augmenter
from trainer.inference.candidates import CandidateScorer, Cloze
from trainer.inference.fill import fill_masks
from trainer.models.families import bert
from trainer.training.weights.loading import load_weights

CONFIG = bert.Config(
    vocab_size=32, layers=2, width=16, heads=2, ffn_width=24, max_positions=32, norm_eps=1e-5
)
ID = {word: 5 + number for number, word in enumerate(WORDS)}
Save = Callable[[Any], Path]


@pytest.mark.parametrize("text", ["use [MASK] here", "use the <mask> here"])
def test_words_are_proposed_for_a_text_that_names_a_mask(text: str, save: Save) -> None:
    """Such a mask is text: the tokens of the word and its brackets."""
    folder = save(CONFIG)
    (found,) = Augmenter(str(folder), 30)([text], 4096)
    words = text.lower().replace("[", "[ ").replace("]", " ]").replace("<", "< ")
    words = words.replace(">", " >")
    assert len(found) == sum(word.isalpha() for word in words.split())
    tokens = torch.tensor([[2, 4, *(ID[word] for word in words.split()[1:]), 3]])
    logits = predict(load_weights(str(folder)).model(), tokens=tokens, positions=_places(tokens))
    likely = logits[0, 1, : 5 + len(WORDS)].argsort(descending=True).tolist()
    names = {number: word for word, number in ID.items() if word.isalpha() and word != "use"}
    assert found[0] == [names[number] for number in likely if number in names]


def test_only_tokens_of_the_tokenizer_are_offered(save: Save) -> None:
    """The table has 13 rows more, here the likeliest ones."""
    config = replace(CONFIG, tied=False)
    folder = save(config)
    weights = load_weights(str(folder))
    model, tokenizer = weights.model(), weights.load_tokenizer()
    size = tokenizer.vocabulary.size
    assert size == 19 < config.vocab_size
    with torch.no_grad():
        model.get_parameter("head.bias")[size:] += 20
    (found,) = fill_masks(model, tokenizer, "the [MASK] runs", size)
    assert {each.token for each in found} == {tokenizer.decode([n]).strip() for n in range(size)}
    assert sum(each.probability for each in found) == pytest.approx(1, abs=1e-5)

    tokens = torch.tensor([[2, ID["the"], 4, ID["runs"], 3]])
    logits = predict(model, tokens=tokens, positions=_places(tokens))[0, 2, :size]
    scorer = CandidateScorer(weights)
    scorer._model = model
    words = ("dog", "cat")
    (scores,) = scorer([Cloze("the [MASK] runs", words)])
    expected = logits.log_softmax(-1)[[ID[word] for word in words]]
    np.testing.assert_allclose(scores, expected.detach().numpy(), rtol=1e-4)


def _places(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1])[None]

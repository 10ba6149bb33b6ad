"""A learned temperature, and candidates that a guide masks, beside plain autograd and others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError
from tests.unit.objectives.test_sentence_pairs import (
    LENGTH,
    VOCABULARY,
    assert_is_loss,
    embedded,
    retrieval,
    rows,
    table_of,
    tensors,
)
from tests.unit.objectives.tiny_bert import tiny_bert
from trainer.models import Stored
from trainer.models.families import bert, llama, t5, xlnet
from trainer.models.inputs import Inputs
from trainer.objectives.guide import Guide
from trainer.objectives.kinds import contrastive


def model(logit_scale: float | None = None) -> Any:
    built = tiny_bert(
        layers=1,
        width=16,
        ffn_width=32,
        max_positions=LENGTH,
        head="embedding",
        logit_scale=logit_scale is not None,
        attention_dropout=0.0,
        dropout=0.0,
    )
    if logit_scale is not None:
        with torch.no_grad():
            built.get_parameter("logit_scale").fill_(logit_scale)
    return built


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("parts", [[6], [4, 2], [1, 2, 3]])
def test_the_gradient_of_a_learned_temperature_is_that_of_the_whole_batch(
    parts: list[int], symmetric: bool
) -> None:
    """In any micro-batches; the last row only pads."""
    config = contrastive.Config(positive=1, symmetric=symmetric, learn_temperature=True)
    objective: Any = config.build(VOCABULARY)
    examples, texts = rows(objective, labels=[1, 0, 1, 1, 2, 1])
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, LENGTH))
    built = model(0.25)
    scale = (built.get_parameter("logit_scale") - 1).exp() / 0.05
    pairs = [[embedded(built, text) for text in row] for row in texts[:5]]
    losses = []
    for number in (0, 2, 3):
        for side in (0, 1) if symmetric else (0,):
            own = pairs[number][side]
            cosines = [F.cosine_similarity(own, pair[1 - side], dim=0) for pair in pairs]
            losses.append(F.cross_entropy(torch.stack(cosines) * scale, torch.tensor(number)))
    assert_is_loss(objective, built, batch, parts, torch.stack(losses).mean(), anchors=3)


@pytest.mark.parametrize("rises", [True, False])
def test_a_scale_of_100_can_only_fall(rises: bool) -> None:
    """Its value stays, and its gradient is left out where it would rise (0.05 / 0.01 = 5)."""
    config = contrastive.Config(learn_temperature=True)
    objective: Any = config.build(VOCABULARY)
    # The right text is a little nearer than the others, or farther.
    second = 0.5 + (0.02 if rises else -0.02) * torch.eye(4)
    pairs = torch.stack((torch.eye(4), second), 1)
    table = table_of(pairs, [[2 * row, 2 * row + 1] for row in range(4)])
    found = {}
    for scale in (50.0, 100.0, 120.0):
        parameter = torch.full((4, 1), 1 + math.log(scale * 0.05))
        result = objective.over_batch(torch.cat((table, parameter), 1))
        found[scale] = result[:, -2].sum(), result[:, -3].sum()
    torch.testing.assert_close(found[120.0], found[100.0])
    assert (found[50.0][1] < 0) == rises
    assert (found[120.0][1] == 0) == rises
    examples, _ = rows(objective, 4, [0] * 4)
    batch = tensors(objective.collate(examples, LENGTH))
    batch["over_batch"] = torch.zeros(4, 2 * 16 + 3)
    loss = objective.loss(model(9.0), batch, {"examples": torch.tensor(4.0)})
    value, weight = loss.metrics["temperature"]
    assert float(value / weight) == pytest.approx(0.01)


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature is 0.005, and a learned one is at least"):
        contrastive.Config(learn_temperature=True, temperature=0.005)
    distill = contrastive.Distill()
    with pytest.raises(ConfigError, match=r"distill.loss is kl, which divides"):
        contrastive.Config(learn_temperature=True, negatives=1, distill=distill)
    with pytest.raises(ConfigError, match=r"guide.margin is 3. Use -2 to 2"):
        Guide("guide", margin=3)
    with pytest.raises(ConfigError, match=r"logit_scale is true, but a language_model head"):
        tiny_bert(logit_scale=True)


def gist(guide: Guide, temperature: float, embeddings: Tensor, guided: Tensor) -> tuple[Any, Any]:
    """Loss and gradient of sentence-transformers, for embeddings [N, T, D] and the guide's."""
    import tokenizers
    from sentence_transformers.sentence_transformer import losses
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))

    class Given(torch.nn.Sequential):
        """Stands for a model: only its tokenizer is asked for."""

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        max_seq_length = 9

    given: Any = Given(torch.nn.Identity())
    theirs = losses.CachedGISTEmbedLoss(
        given,
        given,
        temperature=temperature,
        margin_strategy="relative" if guide.relative else "absolute",
        margin=guide.margin,
        contrast_anchors=False,
        contrast_positives=False,
    )
    columns = [[column.detach().requires_grad_()] for column in embeddings.unbind(1)]
    value = theirs.calculate_loss(
        columns, [[each] for each in guided.unbind(1)], with_backward=True
    )
    return value, torch.stack([column[0].grad for column in columns], 1)


@pytest.mark.parametrize("family", [bert, llama, t5, xlnet])
def test_each_way_to_build_a_model_has_a_scale(family: Any) -> None:
    """It begins at the objective's temperature, and other objectives have a model without it."""
    sizes = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 32}
    more = {"causal": False, "kv_heads": 2} if family is llama else {}
    config = family.Config(100, **sizes, **more, head="embedding", logit_scale=True)
    built = config.build()
    with torch.no_grad():
        for name, each in built.named_parameters():
            each.copy_(built.initial_values(name, 0, each.numel(), 0).view_as(each))
    inputs = Inputs(torch.full((2, 8), 9), positions=torch.arange(8)[None])
    found = built(inputs, frozenset({"embedding", "logit_scale"}))
    assert found["logit_scale"].tolist() == [1.0]
    assert built.role("logit_scale").part == "head"
    own = config.for_needs(frozenset({"embedding"}))
    assert "logit_scale" not in dict(own.build().named_parameters())
    stored = Stored(config, {name: tuple(each.shape) for name, each in built.named_parameters()})
    assert built.start_from(stored).sources["logit_scale"] is None
    assert "logit_scale" in own.build().start_from(stored).unused


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize(
    "guide", [Guide("g"), Guide("g", 0.1), Guide("g", -0.2), Guide("g", 0.3, relative=True)]
)
def test_a_guide_masks_as_in_sentence_transformers(guide: Guide, negatives: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(7, 2 + negatives, 16, generator=generator)
    guided = torch.randn(7, 2 + negatives, 6, generator=generator)
    config = contrastive.Config(guide=guide, negatives=negatives, mask_equal=False)
    objective: Any = config.build(VOCABULARY)
    objective.guide_width = 6
    texts = torch.arange(pairs[..., 0].numel()).view(7, -1).tolist()
    table = torch.cat((table_of(pairs, texts), guided.flatten(1)), 1)
    found = objective.over_batch(table)
    value, slope = gist(guide, config.temperature, pairs, guided)
    torch.testing.assert_close(found[:, -2].mean(), value, rtol=1e-5, atol=1e-5)
    own = found[:, :-2].view_as(pairs) / 7
    torch.testing.assert_close(own, slope, rtol=1e-5, atol=1e-5)
    alone: Any = contrastive.Config(negatives=negatives, mask_equal=False).build(VOCABULARY)
    assert not torch.allclose(alone.over_batch(table_of(pairs, texts))[:, -2].mean(), value)


def test_both_directions_have_a_mask_of_the_guide() -> None:
    """A text that the guide puts nearer to a second text than its first one is masked there."""
    pairs = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    guided = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(2))
    config = contrastive.Config(guide=Guide("g"), symmetric=True, mask_equal=False)
    objective: Any = config.build(VOCABULARY)
    objective.guide_width = 4
    table = torch.cat((table_of(pairs, [[0, 1], [2, 3], [4, 5]]), guided.flatten(1)), 1)
    first, second = (F.normalize(side, dim=-1) for side in pairs.unbind(1))
    own, other = (F.normalize(side, dim=-1) for side in guided.unbind(1))
    expected = torch.zeros(())
    for scores, cosines in (
        (first @ second.mT, own @ other.mT),
        (second @ first.mT, other @ own.mT),
    ):
        masked = cosines > cosines.diagonal()[:, None]
        scores = (scores / 0.05).masked_fill(masked, -torch.inf)
        expected = expected + F.cross_entropy(scores, torch.arange(3)) / 2
    torch.testing.assert_close(objective.over_batch(table)[:, -2].mean(), expected)


@pytest.mark.parametrize("parts", [[4], [1, 3]])
def test_positives_that_a_row_has_not_drawn_are_no_negatives(parts: list[int]) -> None:
    """Where other rows have them, as their positive or as a hard negative."""
    config = contrastive.Config(negatives=1, known_positives=2, mask_equal=False)
    objective: Any = config.build(VOCABULARY)
    examples, texts = retrieval(1, 4)
    # The positive and the negative of each row, and all its positives: row 0 has drawn 7 and knows
    # 8, which is the positive of row 1 and the negative of row 2; row 3 has drawn the same as 0.
    passages = np.array([[7, 1, 8, 7], [8, 2, 8, 8], [9, 8, 9, 9], [7, 9, 7, 7]]) + 2**47
    assert examples.labels is not None
    examples = replace(examples, labels=replace(examples.labels, passages=passages))
    batch = tensors(objective.collate(examples, 48))
    built = model()
    found = [[embedded(built, text) for text in row] for row in texts]
    # Columns: the positives of rows 0 to 3, then the negatives.
    allowed = [[1, 0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1, 0]]
    allowed.append([0, 1, 1, 1, 1, 1, 1, 1])
    candidates = torch.stack([row[1] for row in found] + [row[2] for row in found])
    losses = []
    for number, row in enumerate(found):
        scores = F.cosine_similarity(row[0][None], candidates) / 0.05
        scores = scores.masked_fill(torch.tensor(allowed[number]) == 0, -torch.inf)
        losses.append(F.cross_entropy(scores, torch.tensor(number)))
    assert_is_loss(objective, built, batch, parts, torch.stack(losses).mean(), anchors=4)
    with pytest.raises(ConfigError, match=r"known_positives is -1. Use the most that a row has"):
        contrastive.Config(known_positives=-1)

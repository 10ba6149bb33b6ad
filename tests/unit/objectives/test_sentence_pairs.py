"""Embeddings of pairs: their layout, and both losses, however a step's batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.building.task_rows import join, pack
from samestep.errors import ConfigError
from samestep.examples import Examples, Labels, Vocabulary
from tests.unit.objectives.tiny_bert import tiny_bert
from trainer.models.inputs import Inputs
from trainer.objectives.kinds import contrastive, cosine

VOCABULARY = Vocabulary(100, 0, 1, 2, 3, (0, 1, 2, 3))
LENGTH = 24


def model(dropout: float = 0.0) -> Any:
    return tiny_bert(
        layers=2,
        width=16,
        ffn_width=32,
        max_positions=LENGTH,
        head="embedding",
        dropout=dropout,
        attention_dropout=0.0,
    )


def rows(objective: Any, count: int = 6, labels: Any = None) -> tuple[Examples, list[Any]]:
    random = np.random.default_rng(0)
    texts = [
        [random.integers(4, 100, random.integers(2, 9)).astype(np.uint16) for _ in range(2)]
        for _ in range(count)
    ]
    found = []
    for number, both in enumerate(texts):
        document = join(both)
        label = float(number) if labels is None else labels[number]
        object.__setattr__(document, "labels", np.array([label], dtype=np.float32))
        found.append(document)
    return pack(found, objective.pack_spec(LENGTH)), texts


def tensors(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def embedded(of: Any, text: Any) -> Tensor:
    """A text by itself, as sentence-transformers reads it."""
    tokens = torch.tensor([[1, *text.tolist(), 2]])
    positions = torch.arange(tokens.shape[1])[None]
    hidden = of(Inputs(tokens, positions=positions), frozenset({"embedding"}))["embedding"]
    mean: Tensor = hidden[0].mean(0)
    return mean


def test_both_texts_are_embedded_as_if_alone() -> None:
    objective: Any = cosine.Config().build(VOCABULARY)
    examples, texts = rows(objective)
    batch = objective.collate(examples, LENGTH)
    line = batch["tokens"][0].tolist()
    first, second = (len(text) for text in texts[0])
    assert line[: first + 2] == [1, *texts[0][0].tolist(), 2]
    assert line[first + 2 : first + second + 4] == [1, *texts[0][1].tolist(), 2]
    assert not any(line[first + second + 4 :])
    built = model().eval()
    found = objective.embed(built, tensors(batch))
    expected = torch.stack([torch.stack([embedded(built, text) for text in row]) for row in texts])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_of_cosines() -> None:
    objective: Any = cosine.Config(highest=5.0).build(VOCABULARY)
    examples, texts = rows(objective)
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, LENGTH))
    built = model()
    loss = objective.loss(built, batch, {"examples": torch.tensor(5.0)})
    expected = 0.0
    for number, (one, other) in enumerate(texts[:-1]):
        similarity = F.cosine_similarity(embedded(built, one), embedded(built, other), dim=0)
        expected += float((similarity - number / 5) ** 2) / 5
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)


def contrastive_loss(
    built: Any, texts: Any, anchors: list[int], used: int, symmetric: bool
) -> Tensor:
    pairs = [[embedded(built, text) for text in row] for row in texts[:used]]
    losses = []
    for number in anchors:
        for side in (0, 1) if symmetric else (0,):
            own = pairs[number][side]
            others = [F.cosine_similarity(own, pair[1 - side], dim=0) for pair in pairs]
            losses.append(F.cross_entropy(torch.stack(others) / 0.05, torch.tensor(number)))
    return torch.stack(losses).mean()


def losses_of(
    objective: Any, built: Any, batch: dict[str, Tensor], parts: list[int]
) -> tuple[list[Any], Tensor]:
    """The losses of a batch in micro-batches of these rows, and the number of its anchors.

    Their gradients are added to the parameters.
    """
    batches = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(torch.split(each, parts) for each in batch.values()), strict=True)
    ]
    with torch.no_grad():
        table = torch.cat([objective.summary(built, each) for each in batches])
    columns = torch.split(objective.over_batch(table), parts)
    anchors = torch.tensor(sum(objective.weights(each)["examples"] for each in batches))
    losses = []
    for each, own in zip(batches, columns, strict=True):
        loss = objective.loss(built, {**each, "over_batch": own}, {"examples": anchors})
        loss.total.backward()
        losses.append(loss)
    return losses, anchors


def assert_is_loss(
    objective: Any,
    built: Any,
    batch: dict[str, Tensor],
    parts: list[int],
    expected: Tensor,
    anchors: int,
) -> None:
    """Compares loss and gradients of a batch, in micro-batches of these rows, with a loss."""
    losses, total = losses_of(objective, built, batch, parts)
    assert total == anchors
    value, count = (sum(loss.metrics["loss"][place] for loss in losses) for place in (0, 1))
    assert count == anchors
    assert float(value / count) == pytest.approx(expected.item(), rel=1e-5)
    found = {name: each.grad for name, each in built.named_parameters()}
    built.zero_grad()
    expected.backward()
    actual = {name: each.grad for name, each in built.named_parameters()}
    torch.testing.assert_close(found, actual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("parts", [[6], [4, 2], [1, 2, 3]])
def test_the_contrastive_loss_is_over_the_whole_batch(parts: list[int], symmetric: bool) -> None:
    """In any micro-batches; the last row only pads, and rows of another label are negatives."""
    objective: Any = contrastive.Config(positive=1, symmetric=symmetric).build(VOCABULARY)
    examples, texts = rows(objective, labels=[1, 0, 1, 1, 2, 1])
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, LENGTH))
    built = model()
    expected = contrastive_loss(built, texts, [0, 2, 3], 5, symmetric)
    assert_is_loss(objective, built, batch, parts, expected, anchors=3)


def table_of(embeddings: Tensor, texts: list[list[int]]) -> Tensor:
    """Summaries of rows that are all anchors; `texts` has a number for each text."""
    numbers = torch.tensor(texts).float().repeat_interleave(2, 1)
    return torch.cat((embeddings.flatten(1), numbers, torch.ones(len(embeddings), 2)), 1)


def over_batch(
    config: contrastive.Config, embeddings: Tensor, texts: Any = None
) -> tuple[Any, Any]:
    """The mean loss and its gradient for the embeddings [N, T, D]."""
    objective: Any = config.build(VOCABULARY)
    count, width = embeddings.shape[:2]
    texts = texts or np.arange(count * width).reshape(count, width).tolist()
    found = objective.over_batch(table_of(embeddings.detach(), texts))
    return found[:, -2].mean(), found[:, :-2].view_as(embeddings) / count


@pytest.mark.parametrize("negatives", [0, 3])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("widths", [(), (4, 8, 16)])
def test_losses_are_those_of_sentence_transformers(
    symmetric: bool, widths: tuple[int, ...], negatives: int
) -> None:
    from sentence_transformers.sentence_transformer import losses

    class Given(torch.nn.Module):
        """Returns the embeddings that it is given."""

        def forward(self, features: Any) -> Any:
            return {"sentence_embedding": features["sentence_embedding"]}

        def get_embedding_dimension(self) -> int:
            return 16

    model: Any = Given()
    # The loss that was called MultipleNegativesSymmetricRankingLoss.
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs: Any = losses.MultipleNegativesRankingLoss(model, **(both if symmetric else {}))
    if widths:
        theirs = losses.MatryoshkaLoss(model, theirs, [*widths])
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(7, 2 + negatives, 16, generator=generator, requires_grad=True)
    sides = [{"sentence_embedding": side} for side in texts.unbind(1)]
    expected = theirs(sides, None)
    expected.backward()
    config = contrastive.Config(symmetric=symmetric, widths=widths, negatives=negatives)
    value, slope = over_batch(config, texts)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, texts.grad, rtol=1e-5, atol=1e-5)


def retrieval(negatives: int, count: int = 6) -> tuple[Examples, list[Any]]:
    """Rows of a query, a positive and negatives, packed as the data pipeline does."""
    random = np.random.default_rng(1)
    texts = [
        [random.integers(4, 100, random.integers(2, 9)).astype(np.int32) for _ in range(width)]
        for width in [2 + negatives] * count
    ]
    length = np.array([[len(text) for text in row] for row in texts])
    scores = np.zeros((count, 1 + negatives), np.float32)
    scores[:, 0] = 1
    zeros, ones = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    examples = Examples(
        tokens=np.concatenate([text for row in texts for text in row]),
        row=np.repeat(np.arange(count), 2 + negatives),
        column=(1 + np.cumsum(length + 2, axis=1) - length - 2).reshape(-1),
        length=length.reshape(-1),
        key=np.arange(count, dtype=np.uint64),
        weight=np.ones(count, dtype=np.float32),
        isolated=False,
        labels=Labels(
            scores.reshape(-1),
            ones * (1 + negatives),
            np.arange(count),
            zeros,
            ones,
            ranks=ones > 0,
        ),
    )
    return examples, texts


def hard_loss(built: Any, texts: list[Any], used: int) -> Tensor:
    """Every positive and negative of the batch is a candidate for each query."""
    found = [[embedded(built, text) for text in row] for row in texts[:used]]
    candidates = torch.stack([row[1] for row in found] + [e for row in found for e in row[2:]])
    losses = [
        F.cross_entropy(F.cosine_similarity(row[0][None], candidates) / 0.05, torch.tensor(number))
        for number, row in enumerate(found)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("parts", [[6], [1, 2, 3]])
def test_hard_negatives_of_all_rows_are_candidates(parts: list[int]) -> None:
    """In any micro-batches; the last row only pads the batch."""
    length = 48
    objective: Any = contrastive.Config(negatives=2).build(VOCABULARY)
    examples, texts = retrieval(2)
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, length))
    built = model()
    assert_is_loss(objective, built, batch, parts, hard_loss(built, texts, 5), anchors=5)


def test_equal_and_likely_hard_negatives_are_masked() -> None:
    embeddings = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(0))
    # The hard negative of row 0 is the positive of row 1, that of row 1 is the query of row 2, and
    # rows 0 and 2 have one query: a hard negative of row 2 stays one for row 0.
    texts = [[0, 1, 2], [3, 2, 0], [0, 4, 5]]
    unit = F.normalize(embeddings, dim=-1)
    cosines = torch.cat((unit[:, 0] @ unit[:, 1].mT, unit[:, 0] @ unit[:, 2].mT), 1)
    allowed = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 1]])
    scores = (cosines / 0.05).masked_fill(allowed == 0, -torch.inf)
    value, _ = over_batch(contrastive.Config(negatives=1), embeddings, texts)
    torch.testing.assert_close(value, F.cross_entropy(scores, torch.arange(3)))
    highest = cosines.diagonal()[:, None] + 0.1
    scores = (cosines / 0.05).masked_fill(cosines > highest, -torch.inf)
    config = contrastive.Config(negatives=1, margin=0.1, mask_equal=False)
    value, _ = over_batch(config, embeddings, texts)
    torch.testing.assert_close(value, F.cross_entropy(scores, torch.arange(3)))


def test_the_lengths_of_both_sides_must_fit() -> None:
    config = contrastive.Config(negatives=2, query_length=8, passage_length=16)
    objective: Any = config.build(VOCABULARY)
    assert objective.pack_spec(56).parts.passage_length == 16
    with pytest.raises(ConfigError, match=r"sequence_length is 55, .* take 56 with"):
        objective.pack_spec(55)
    # A text without a length of its own needs three positions.
    for lengths, least in (({"query_length": 50}, 56), ({"passage_length": 26}, 55), ({}, 12)):
        some: Any = contrastive.Config(negatives=1 + (not lengths), **lengths).build(VOCABULARY)
        some.pack_spec(least)
        with pytest.raises(ConfigError, match=f"take {least} with"):
            some.pack_spec(least - 1)
    with pytest.raises(ConfigError, match=r"passage_length is 2. Use at least 3"):
        contrastive.Config(passage_length=2)
    with pytest.raises(ConfigError, match=r"negatives is -1. Use 0 or more"):
        contrastive.Config(negatives=-1)


def test_equal_texts_and_likely_positives_are_no_negatives() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(4, 2, 8, generator=generator)
    # Texts 0 1, 2 1, 0 3, 4 0: rows 0 and 1 have one second text, rows 0 and 2 one first text, and
    # the second text of row 3 is the first one of rows 0 and 2.
    texts = [[0, 1], [2, 1], [0, 3], [4, 0]]
    cosines = F.cosine_similarity(pairs[:, None, 0], pairs[None, :, 1], dim=-1)
    allowed = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    scores = (cosines / 0.05).masked_fill(allowed == 0, -torch.inf)
    expected = F.cross_entropy(scores, torch.arange(4))
    value, _ = over_batch(contrastive.Config(), pairs, texts)
    torch.testing.assert_close(value, expected)
    everything, _ = over_batch(contrastive.Config(mask_equal=False), pairs, texts)
    torch.testing.assert_close(everything, F.cross_entropy(cosines / 0.05, torch.arange(4)))
    own = cosines.diagonal()[:, None]
    scores = (cosines / 0.05).masked_fill(cosines > own + 0.1, -torch.inf)
    value, _ = over_batch(contrastive.Config(margin=0.1, mask_equal=False), pairs)
    torch.testing.assert_close(value, F.cross_entropy(scores, torch.arange(4)))


def test_texts_have_numbers_of_their_own() -> None:
    objective: Any = contrastive.Config().build(VOCABULARY)
    examples, texts = rows(objective, labels=[0] * 6)
    found = objective.collate(examples, LENGTH)["texts"].reshape(12, 2)
    assert found.min() >= 0
    assert found.max() < 2**24
    assert len({*map(tuple, found.tolist())}) == 12
    examples.tokens[:] = 7
    found = objective.collate(examples, LENGTH)["texts"].reshape(12, 2)
    lengths = [len(text) for row in texts for text in row]
    assert len({*map(tuple, found.tolist())}) == len({*lengths})


@pytest.mark.parametrize("how", ["mean", "first", "last", "max", "weighted"])
def test_poolings_of_packed_texts_are_those_of_texts_alone(how: Any) -> None:
    objective: Any = cosine.Config(pool=how).build(VOCABULARY)
    examples, texts = rows(objective, 3)
    built = model()
    found = objective.embed(built, tensors(objective.collate(examples, LENGTH)))
    for row, both in enumerate(texts):
        for column, text in enumerate(both):
            tokens = torch.tensor([[1, *text.tolist(), 2]])
            positions = torch.arange(tokens.shape[1])[None]
            inputs = Inputs(tokens, positions=positions)
            hidden = built(inputs, frozenset({"embedding"}))["embedding"][0]
            count = torch.arange(1, len(hidden) + 1)[:, None]
            expected = {
                "mean": hidden.mean(0),
                "first": hidden[0],
                "last": hidden[-1],
                "max": hidden.amax(0),
                "weighted": (hidden * count).sum(0) / count.sum(),
            }[how]
            # Products of other shapes add in another order: 3e-5 of 2.0 on some CPUs.
            torch.testing.assert_close(found[row, column], expected, rtol=1e-4, atol=1e-4)


def test_embeddings_have_fp32_under_autocast() -> None:
    objective: Any = cosine.Config().build(VOCABULARY)
    batch = tensors(objective.collate(rows(objective, 3)[0], LENGTH))
    hidden = torch.randn(3, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    expected = objective.embed(lambda *_: {"embedding": hidden}, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = objective.embed(lambda *_: {"embedding": hidden}, batch)
    assert torch.equal(found, expected)


def test_products_of_embeddings_of_any_length() -> None:
    pairs = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    products = pairs[:, 0] @ pairs[:, 1].mT
    dot = contrastive.Config(similarity="dot", temperature=1.0)
    value, _ = over_batch(dot, pairs)
    torch.testing.assert_close(value, F.cross_entropy(products, torch.arange(5)))
    objective: Any = dot.build(VOCABULARY)
    torch.testing.assert_close(objective.similarities(pairs), products.diagonal())
    # Of embeddings of length 1, products are cosines.
    cosines, _ = over_batch(contrastive.Config(temperature=1.0), pairs)
    both, _ = over_batch(
        contrastive.Config(similarity="dot", normalize=True, temperature=1.0), pairs
    )
    assert both == cosines != value


def test_wrong_settings_and_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts has the role 'passage'. Use query, document"):
        contrastive.Config(prompts={"passage": "passage: "})
    with pytest.raises(ConfigError, match=r"max_length is 2. Use 3 or more"):
        cosine.Config(max_length=2)
    with pytest.raises(ConfigError, match=r"temperature is 0. Use a number above 0, such as 0.05"):
        contrastive.Config(temperature=0)
    with pytest.raises(ConfigError, match=r"positive is -1. Use the index of a label"):
        contrastive.Config(positive=-1)
    with pytest.raises(ConfigError, match=r"margin is -1"):
        contrastive.Config(margin=-1)
    with pytest.raises(ConfigError, match=r"margin is a cosine, and similarity is dot"):
        contrastive.Config(margin=0.1, similarity="dot")
    contrastive.Config(margin=0.1, similarity="dot", normalize=True)
    with pytest.raises(ConfigError, match=r"widths are \[4, 4\]"):
        contrastive.Config(widths=(4, 4))
    wide: Any = contrastive.Config(widths=(4, 32)).build(VOCABULARY)
    examples, _ = rows(wide, 2)
    with pytest.raises(ConfigError, match=r"widths are \[4, 32\], and the embeddings have 16"):
        wide.summary(model(), tensors(wide.collate(examples, LENGTH)))
    with pytest.raises(ConfigError, match=r"highest is 0. Use a number above 0, such as 5"):
        cosine.Config(highest=0)
    objective: Any = cosine.Config().build(VOCABULARY)
    examples, _ = rows(objective, 1)
    object.__setattr__(examples, "row", np.array([0]))
    with pytest.raises(ConfigError, match="a row of the dataset has 1 text"):
        objective.collate(examples, LENGTH)

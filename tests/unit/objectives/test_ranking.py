"""Ranking by cross-encoders: the losses, their batches and the scores of rankings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.building.task_rows import join, pack
from samestep.errors import ConfigError
from samestep.examples import Examples, TaskRow, Vocabulary
from tests.unit.objectives.tiny_bert import tiny_bert
from trainer.models.inputs import Inputs
from trainer.objectives import Predictions
from trainer.objectives.kinds import contrastive, distillation, ranking
from trainer.objectives.ranking_losses import (
    Distill,
    binary,
    kl,
    listwise,
    margin_mse,
    mse,
    pairwise,
    softmax,
)

VOCABULARY = Vocabulary(100, 0, 1, 2, 3, (0, 1, 2, 3))
LENGTH, PASSAGES = 16, 3
Row = list[np.ndarray[Any, Any]]


def model(dropout: float = 0.0) -> Any:
    return tiny_bert(
        layers=1,
        width=8,
        ffn_width=16,
        max_positions=LENGTH,
        head="classification",
        labels=("score",),
        dropout=dropout,
        attention_dropout=0.0,
    )


def rows(objective: Any, count: int = 5, scores: bool = True) -> tuple[Examples, list[Row]]:
    """A query, a positive and two negatives each, with a teacher's scores or without."""
    random = np.random.default_rng(0)
    texts = [
        [random.integers(4, 100, random.integers(2, 6)).astype(np.uint16) for _ in range(4)]
        for _ in range(count)
    ]
    documents = []
    for row in texts:
        labels = random.uniform(size=PASSAGES) if scores else np.eye(PASSAGES)[0]
        documents.append(replace(join(row), labels=labels.astype(np.float32)))
    return pack(documents, objective.pack_spec(LENGTH)), texts


def tensors(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def test_a_sequence_is_the_query_and_a_passage() -> None:
    objective: Any = ranking.Config(negatives=2).build(VOCABULARY)
    spec = objective.pack_spec(LENGTH)
    assert (spec.parts.kind, spec.parts.layout, spec.parts.choices) == ("retrieval", "choices", 3)
    examples, texts = rows(objective)
    batch = objective.collate(examples, LENGTH)
    for line, (query, *passages) in zip(batch["tokens"], texts, strict=True):
        for sequence, passage in zip(line.reshape(PASSAGES, LENGTH), passages, strict=True):
            expected = [1, *query.tolist(), 2, *passage.tolist(), 2]
            assert sequence[: len(expected)].tolist() == expected
            assert not sequence[len(expected) :].any()
    built = model().eval()
    loss = objective.loss(built, tensors(batch), {"examples": torch.tensor(5.0)})
    query, passage = texts[1][0], texts[1][2]
    tokens = torch.tensor([[1, *query.tolist(), 2, *passage.tolist(), 2]])
    positions = torch.arange(tokens.shape[1])[None]
    types = (positions > len(query) + 1).int()
    inputs = Inputs(tokens, positions=positions, token_types=types, predicted=torch.zeros(1, 1))
    alone = built(
        replace(inputs, predicted=torch.zeros(1, 1).long()), frozenset({"classification"})
    )
    torch.testing.assert_close(loss.outputs[1, 1], alone["classification"].flatten()[0].detach())


LOSSES = {
    "binary": {"positive_weight": 2.0},
    "softmax": {},
    "listwise": {},
    "pairwise": {"pair_weights": "ndcg_loss2++"},
    "mse": {},
    "margin_mse": {},
    "kl": {"temperature": 2.0},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up_to_the_batch(loss: Any) -> None:
    """With dropout, whose masks belong to the sequences; the last row only pads."""
    objective: Any = ranking.Config(loss, negatives=2, **LOSSES[loss]).build(VOCABULARY)
    examples, _ = rows(objective)
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, LENGTH))
    batch["dropout_key"] = torch.arange(15, dtype=torch.int32).view(5, 3)
    totals = {name: torch.tensor(each) for name, each in objective.weights(batch).items()}
    assert totals == {"examples": 4.0}
    built, found = model(dropout=0.2), []
    for sizes in ([5], [2, 1, 2]):
        built.zero_grad()
        total = 0.0
        for part in zip(*(each.split(sizes) for each in batch.values()), strict=True):
            of_part = objective.loss(built, dict(zip(batch, part, strict=True)), totals)
            of_part.total.backward()
            total += of_part.total.item()
        found.append((total, {name: each.grad for name, each in built.named_parameters()}))
    assert found[0][0] > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def theirs(loss: Any, scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of a class of sentence-transformers, of a cross-encoder with these scores."""
    from sentence_transformers.cross_encoder import CrossEncoder

    class Given(CrossEncoder):
        """Scores the pair (query b, passage m) by scores[b, m]."""

        num_labels, device = 1, torch.device("cpu")

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def preprocess(self, pairs: Any, **_: Any) -> Any:
            return {"pairs": torch.tensor([[int(one), int(two)] for one, two in pairs])}

        def forward(self, features: Any) -> Any:
            return {"scores": scores[tuple(features["pairs"].T)]}

    built, (count, width) = loss(Given()), scores.shape
    queries, passages = [str(row) for row in range(count)], [str(each) for each in range(width)]
    if "Net" in type(built).__name__ or "Lambda" in type(built).__name__:
        return built([queries, [passages] * count], [*labels])
    if type(built).__name__ == "MarginMSELoss":
        return built([queries, *([each] * count for each in passages)], labels)
    pairs = [(query, passage) for query in queries for passage in passages]
    return built([*map(list, zip(*pairs, strict=True))], labels.flatten())


def graded(count: int) -> Tensor:
    """Scores of a teacher; each row has one order of its own, without ties."""
    return torch.rand(count, 5, generator=torch.Generator().manual_seed(1))


def hard(count: int) -> Tensor:
    return torch.eye(5)[:1].repeat(count, 1)


@pytest.mark.long
@pytest.mark.parametrize("labels", [graded, hard])
def test_losses_are_those_of_sentence_transformers(labels: Callable[[int], Tensor]) -> None:
    from sentence_transformers.cross_encoder import losses
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

    def of_lambda(scheme: Any) -> Callable[[Any], Any]:
        return lambda model: losses.LambdaLoss(model, weighting_scheme=scheme)

    def weighted(model: Any) -> Any:
        return losses.BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(3.0))

    def softened(model: Any) -> Any:
        """Their class for embeddings, given scores in place of similarities."""
        divergence = DistillKLDivLoss(model, similarity_fct=lambda one, two: one * two)
        divergence.temperature = divergence.student_temperature = 2.0
        divergence.teacher_temperature = 2.0
        return divergence

    pairs: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
        (losses.BinaryCrossEntropyLoss, binary),
        (weighted, lambda scores, labels: binary(scores, labels, 3.0)),
        (losses.ListNetLoss, listwise),
        (of_lambda(None), lambda scores, labels: pairwise(scores, labels, "none")),
        (
            of_lambda(losses.LambdaRankScheme()),
            lambda scores, labels: pairwise(scores, labels, "lambda_rank"),
        ),
        (losses.LambdaLoss, lambda scores, labels: pairwise(scores, labels, "ndcg_loss2++")),
        (losses.MSELoss, mse),
        (losses.MarginMSELoss, margin_mse),
        (softened, lambda scores, labels: kl(scores, labels, 2.0)),
    ]
    for loss, ours in pairs:
        scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
        taught = labels(4)
        if loss is softened:
            built = softened(torch.nn.Identity())
            columns = [torch.ones(4), *scores.unbind(1)]
            expected = built.compute_loss_from_embeddings(columns, taught)
        else:
            expected = theirs(loss, scores, taught)
        (slope,) = torch.autograd.grad(expected, scores)
        value = ours(scores, taught).mean()
        assert value.item() > 0
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(value, scores)[0], slope, rtol=1e-5, atol=1e-5
        )


@pytest.mark.long
def test_distilled_embeddings_have_the_losses_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import pairwise_cos_sim

    embedded = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    scores = graded(4)
    model: Any = torch.nn.Identity()
    softened = losses.DistillKLDivLoss(
        model, pairwise_cos_sim, student_temperature=0.05, teacher_temperature=2.0
    )
    margins = losses.MarginMSELoss(model, pairwise_cos_sim)
    terms = [
        (Distill("kl", weight=3.0, temperature=2.0), softened, 3 / 0.05**2),
        (Distill("margin_mse", weight=0.5), margins, 0.5),
    ]
    for ours, theirs, factor in terms:
        cosines = torch.cosine_similarity(embedded[:, :1], embedded[:, 1:], dim=-1)
        value = ours(cosines, scores, 0.05).mean()
        expected = theirs.compute_loss_from_embeddings([*embedded.unbind(1)], scores) * factor
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        slopes = [torch.autograd.grad(each, embedded)[0] for each in (value, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(), (2, 8)])
def test_contrastive_adds_the_distance_from_a_teacher(widths: tuple[int, ...]) -> None:
    """To each row that is an anchor, whatever the micro-batch; beside the term of the batch.

    At each width of a Matryoshka embedding.
    """
    distill = Distill("kl", weight=2.0)
    config = contrastive.Config(positive=1, negatives=2, distill=distill, widths=widths)
    objective: Any = config.build(VOCABULARY)
    embedded = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    scores = graded(3)[:, :3]
    expected = torch.zeros(())
    for width in widths or (8,):
        query, passages = embedded[:, :1, :width], embedded[:, 1:, :width]
        cosines = torch.cosine_similarity(query, passages, dim=-1)
        expected = expected + 2 * kl(cosines / 0.05, scores)[:2].sum() / 2
    batch = {
        "labels": torch.tensor([1.0, 1.0, 0.0]),
        "weights": torch.ones(3),
        "scores": scores,
        "over_batch": torch.zeros(3, 4 * 8 + 2),  # the gradient, the loss and the success of a row
    }
    batch["over_batch"][:, -2] = torch.tensor([0.5, 1.5, 0])
    total, value = torch.zeros(()), 0.0
    for sizes in ([3], [1, 2]):
        losses = []
        for rows, *parts in zip(
            embedded.split(sizes), *(each.split(sizes) for each in batch.values()), strict=True
        ):
            objective.outputs = lambda *_, rows=rows: (rows, None)
            part = dict(zip(batch, parts, strict=True))
            losses.append(objective.loss(None, part, {"examples": torch.tensor(2.0)}))
        total = torch.stack([each.total for each in losses]).sum()
        value = sum(float(each.metrics["loss"][0]) for each in losses) / 2
        torch.testing.assert_close(total, expected)
        assert value == pytest.approx(1 + expected.item())
        slopes = [
            torch.autograd.grad(each, embedded, retain_graph=True)[0] for each in (total, expected)
        ]
        torch.testing.assert_close(*slopes)


def test_distilling_without_a_second_passage_is_refused() -> None:
    assert contrastive.Config().needs_scores is None
    config = contrastive.Config(distill=Distill("margin_mse"), negatives=1)
    assert config.needs_scores == "objective.distill.loss=margin_mse"
    labels = np.float32([0.3, 0.7])
    of_two: Any = ranking.Config(negatives=1).build(VOCABULARY)
    row = join([np.array([5 + text], np.uint16) for text in range(3)])
    examples = pack([replace(row, labels=labels)], of_two.pack_spec(LENGTH))
    assert Distill("margin_mse").scores(examples).tolist() == [[*labels]]
    contrastive.Config(distill=Distill("mse"))
    with pytest.raises(ConfigError, match="margin_mse, which compares passages, and rows have one"):
        contrastive.Config(distill=Distill("margin_mse"))
    for name in ("weight", "temperature"):
        with pytest.raises(ConfigError, match=f"distill.{name} is 0. Use more than 0"):
            Distill(**{name: 0})


def test_softmax_is_of_the_positive_whatever_the_labels() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0]])
    expected = -math.log(math.e / (math.e + 1 + math.e**2))
    for labels in ([[1.0, 0.0, 0.0]], [[-3.0, 5.0, 1.0]]):
        assert softmax(scores, torch.tensor(labels)).item() == pytest.approx(expected)


def test_a_row_of_equal_labels_has_no_pair() -> None:
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0]], requires_grad=True)
    for weights in ("none", "lambda_rank", "ndcg_loss2++"):
        found = pairwise(scores, torch.tensor([[0.5, 0.5], [1.0, 0.0]]), weights)
        assert found[0] == 0
        assert found[1] > 0
        (slope,) = torch.autograd.grad(found.sum(), scores)
        assert slope[0].tolist() == [0, 0]


def test_scores_are_of_the_rank_of_the_positive() -> None:
    """Ranks 1, 2 and 3; equal scores and what is no number do not count as right."""
    objective: Any = ranking.Config(negatives=2).build(VOCABULARY)
    outputs = np.array([[2, 1, 0], [1, 0, 1], [0, 1, 3]], np.float32)
    assert ranking.ranks(outputs).tolist() == [1, 2, 3]
    assert ranking.ranks(np.full((1, 3), np.nan, np.float32)).tolist() == [3]
    number = np.arange(3)
    columns = dict.fromkeys(("begin", "column", "length"), number)
    task_rows = [TaskRow(("query", "positive"))] * 3
    found = Predictions(outputs, number, rows=task_rows, number=number, labels=(), **columns)
    assert objective.score_names == ("accuracy", "mrr", "ndcg")
    assert objective.scores(found) == pytest.approx(
        {"accuracy": 1 / 3, "mrr": (1 + 1 / 2 + 1 / 3) / 3, "ndcg": (1.5 + 1 / math.log2(3)) / 3}
    )
    said = [*objective.row_predictions(found)]
    assert said[1] == {"rank": 2, "scores": [1, 1, 0]}
    assert said[2] == {"rank": 3, "scores": [0, 3, 1]}
    examples, _ = rows(objective)
    loss = objective.loss(model(), tensors(objective.collate(examples, LENGTH)), {"examples": 5.0})
    first = (ranking.ranks(loss.outputs.numpy()) == 1).sum()
    assert [float(each) for each in loss.metrics["accuracy"]] == [first, 5]


def test_losses_name_the_scores_that_they_are_defined_for() -> None:
    for expected, loss, settings in (
        ((0, 1), "binary", {}),
        ((0, 64), "pairwise", {}),
        (None, "pairwise", {"pair_weights": "none"}),
        (None, "listwise", {}),
    ):
        config: Any = ranking.Config(loss, negatives=2, **settings)
        assert config.build(VOCABULARY).pack_spec(LENGTH).parts.score_range == expected


def test_wrong_settings_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"negatives": 0}, "negatives is 0. Use at least 1"),
        ({"positive_weight": 0.0}, "positive_weight is 0.0. Use a number above 0"),
        ({"loss": "kl", "temperature": math.nan}, "temperature is nan. Use a number above 0"),
        ({"temperature": 2.0}, "temperature is 2.0, which is for loss kl, and loss is binary"),
        ({"loss": "mse", "positive_weight": 2.0}, "which is for loss binary, and loss is mse"),
        ({"pair_weights": "none"}, "which is for loss pairwise"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ranking.Config(**settings)
    needing = [loss for loss in LOSSES if ranking.Config(loss).needs_scores]
    assert needing == ["mse", "margin_mse", "kl"]
    assert ranking.Config("mse").needs_scores == "objective.loss=mse"
    with pytest.raises(ConfigError, match="of is ranking, whose predictions cannot be compared"):
        distillation.Config("teacher", ranking.Config())

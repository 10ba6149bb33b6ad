"""SPLADE: its embeddings, loss and regularizer are those of sentence-transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from tests.unit.objectives.test_sentence_pairs import VOCABULARY, losses_of, retrieval, tensors
from tests.unit.objectives.tiny_bert import tiny_bert
from trainer.models.codecs import codec_of
from trainer.models.pooling import pool
from trainer.objectives.guide import Guide
from trainer.objectives.kinds import splade as kind

LENGTH = 48
FLOPS = {"flops_query": 0.05, "flops_passage": 0.03}


def model() -> Any:
    size = {"layers": 2, "width": 16, "ffn_width": 32, "max_positions": LENGTH}
    built = tiny_bert(**size, dropout=0.0, attention_dropout=0.0)
    with torch.no_grad():  # products of larger logits round more than 1e-5
        for parameter in built.parameters():
            parameter.mul_(0.3)
    return built


class Reference(nn.Module):
    """BertForMaskedLM of transformers, and SpladePooling of sentence-transformers."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        from sentence_transformers.sparse_encoder.modules import SpladePooling
        from transformers import BertConfig, BertForMaskedLM

        codec = codec_of(ours.config)
        config = BertConfig(**codec.to_huggingface())
        self.bert = BertForMaskedLM(config)
        parameters = {name: each.detach() for name, each in ours.named_parameters()}
        found = self.bert.load_state_dict(codec.export_tensors(parameters), strict=False)
        assert not found.unexpected_keys
        self.bert.tie_weights()
        self.pooling = SpladePooling()

    def forward(self, features: Any) -> Any:
        logits = self.bert(**features).logits
        return self.pooling({"token_embeddings": logits, **features})

    def get_embedding_dimension(self) -> int:
        return 100


def padded(texts: list[Any]) -> dict[str, Tensor]:
    """A column of texts, as the tokenizer of sentence-transformers gives it."""
    rows = [torch.tensor([1, *text.tolist(), 2]) for text in texts]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}


def expected_loss(reference: Any, texts: list[Any], share: float) -> dict[str, Tensor]:
    from sentence_transformers.sparse_encoder import losses

    ranking = losses.SparseMultipleNegativesRankingLoss(reference)
    weights = (FLOPS["flops_passage"] * share, FLOPS["flops_query"] * share)
    found = losses.SpladeLoss(reference, ranking, *weights)
    columns = [padded(column) for column in zip(*texts, strict=True)]
    return found(columns)  # type: ignore[no-any-return]


def step(
    objective: Any, built: Any, batch: dict[str, Tensor], parts: list[int]
) -> dict[str, float]:
    """Gradients of a batch in micro-batches of these rows; returns the means of its metrics."""
    sums: dict[str, list[Tensor]] = {}
    for loss in losses_of(objective, built, batch, parts)[0]:
        for name, values in loss.metrics.items():
            sums.setdefault(name, []).append(torch.stack(values).detach())
    means = {name: sum(values) for name, values in sums.items()}
    return {name: float(value / count) for name, (value, count) in means.items()}


@pytest.mark.parametrize(
    ("parts", "negatives", "taken"),
    [([6], 0, None), ([4, 2], 2, None), ([1, 2, 3], 2, 25), ([6], 2, 0), ([3, 3], 0, 200)],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(
    parts: list[int], negatives: int, taken: int | None
) -> None:
    """The last row only pads the batch; weights of the regularizer rise over 100 steps."""
    built = model()
    config = kind.Config(negatives=negatives, flops_warmup_steps=100, **FLOPS)
    objective: Any = config.build(VOCABULARY)
    objective.step = taken
    examples, texts = retrieval(negatives)
    examples.weight[-1] = 0
    batch = tensors(objective.collate(examples, LENGTH))
    found = step(objective, built, batch, parts)

    reference = Reference(built)
    share = 1.0 if taken is None else min(1.0, (taken / 100) ** 2)
    expected = expected_loss(reference, texts[:5], share)
    assert found["loss"] == pytest.approx(expected["base_loss"].item(), rel=1e-5)
    for ours, theirs in (("query", "query"), ("passage", "document")):
        weighted = FLOPS[f"flops_{ours}"] * share * found[f"flops_{ours}"]
        regularizer = expected[f"{theirs}_regularizer_loss"].item()
        assert weighted == pytest.approx(regularizer, rel=1e-5)
    torch.stack(list(expected.values())).sum().backward()
    gradients = {name: each.grad for name, each in built.named_parameters()}
    gradients = codec_of(built.config).export_tensors(gradients)
    by_name = {name: each.grad for name, each in reference.bert.named_parameters()}
    highest = max(float(gradient.abs().max()) for gradient in by_name.values())
    for name, gradient in by_name.items():  # the tied matrix has one name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * highest)


def test_weights_rise_as_in_sentence_transformers() -> None:
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.sparse_encoder.callbacks import splade_callbacks
    from transformers import TrainerState

    theirs = losses.SpladeLoss(nn.Module(), losses.SparseMarginMSELoss(nn.Module()), 3.0, 5.0)
    callback = splade_callbacks.SpladeRegularizerWeightSchedulerCallback(theirs, warmup_ratio=0.5)
    state: Any = TrainerState(max_steps=16)
    callback.on_train_begin(None, state, None)  # type: ignore[arg-type]
    config = kind.Config(flops_query=5.0, flops_passage=3.0, flops_warmup_steps=8)
    objective: Any = config.build(VOCABULARY)
    for taken in range(12):
        state.global_step = objective.step = taken
        callback.on_step_begin(None, state, None)  # type: ignore[arg-type]
        expected = [theirs.query_regularizer_weight, theirs.document_regularizer_weight]
        assert objective._weights(torch.device("cpu")).tolist() == pytest.approx(expected)


def test_the_regularizer_makes_embeddings_sparser() -> None:
    active = []
    for weight in (0.0, 10.0):
        built = model()
        config = kind.Config(flops_query=weight, flops_passage=weight)
        objective: Any = config.build(VOCABULARY)
        batch = tensors(objective.collate(retrieval(0)[0], LENGTH))
        optimizer = torch.optim.SGD(built.parameters(), lr=0.02)
        for _ in range(20):
            optimizer.zero_grad()
            means = step(objective, built, batch, [6])
            optimizer.step()
        active.append(means["active_query"])
    assert active[1] < 0.7 * active[0]


def test_active_numbers_are_counted() -> None:
    objective: Any = kind.Config(negatives=1, mask_equal=False).build(VOCABULARY)
    embeddings = torch.tensor(
        [[[0.0, 1, 2], [1, 0, 0], [0, 0, 0]], [[0, 0, 3], [1, 1, 1], [1, 0, 0]]]
    )
    table = torch.cat((embeddings.flatten(1), torch.zeros(2, 6), torch.ones(2, 2)), 1)
    found = objective.over_batch(table)
    assert found[:, 2:4].tolist() == [[2, 0.5], [1, 2]]
    # Means of the queries 0, 0.5, 2.5, of the passages 0.75, 0.25, 0.25.
    torch.testing.assert_close(found[0, :2], torch.tensor([6.5, 0.6875]))


def test_the_maximum_is_of_the_positions_of_a_text() -> None:
    logits = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    texts = torch.zeros(2, 3, 7, dtype=torch.bool)
    texts[:, 0, :3] = texts[:, 1, 3:5] = True
    texts[0, 2, 5:] = True  # the other row has no third text
    found = pool(logits, texts, "splade")
    for row in range(2):
        for text, (first, end) in enumerate(((0, 3), (3, 5), (5, 7))[: 3 - row]):
            expected = logits[row, first:end].relu().log1p().amax(0)
            torch.testing.assert_close(found[row, text], expected)
    assert not found[1, 2].any()
    torch.testing.assert_close(pool(logits, texts[:, 0], "splade"), found[:, 0])
    assert pool(logits.bfloat16(), texts, "splade").dtype == torch.float32


def test_settings_of_dense_embeddings_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"normalize": True}, "an inverted index compares by dot products. Leave both out"),
        ({"similarity": "cosine"}, "normalize is False and similarity cosine"),
        ({"widths": (4,)}, r"widths are \[4\].* Leave widths out"),
        ({"margin": 0.1}, "margin is a cosine, and SPLADE compares by products"),
        ({"guide": Guide("teacher")}, "guide is set, which only objective.kind=contrastive has"),
        ({"learn_temperature": True}, "learn_temperature is set"),
        ({"flops_query": -1.0}, "flops_query is -1.0. Use 0 or more"),
        ({"flops_passage": float("nan")}, "flops_passage is nan"),
        ({"flops_warmup_steps": -1}, "flops_warmup_steps is -1"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            kind.Config(**settings)

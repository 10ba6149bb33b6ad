"""The conditional random field, against all sequences of tags."""

from __future__ import annotations

import itertools

import pytest
import torch

from samestep.examples import Vocabulary
from trainer.objectives import crf
from trainer.objectives.kinds import tagging

CLASSES, WORDS = 3, 4


@pytest.fixture
def chain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Emissions of rows with 4, 2, 1 and 0 words, which are used, and transitions."""
    generator = torch.Generator().manual_seed(3)
    emissions = torch.randn(4, WORDS, CLASSES, generator=generator)
    used = torch.arange(WORDS) < torch.tensor([[4], [2], [1], [0]])
    transitions = torch.randn(CLASSES + 1, CLASSES + 1, generator=generator)
    return emissions, used, transitions


def score(emissions: torch.Tensor, transitions: torch.Tensor, tags: tuple[int, ...]) -> float:
    path = [CLASSES, *tags, CLASSES]
    between = sum(float(transitions[pair]) for pair in itertools.pairwise(path))
    return between + sum(float(emissions[at, tag]) for at, tag in enumerate(tags))


def test_against_all_sequences(chain: tuple[torch.Tensor, ...]) -> None:
    emissions, used, transitions = chain
    best = crf.best_tags(emissions, used, transitions)
    for row, count in enumerate(used.sum(1).tolist()[:3]):
        every = list(itertools.product(range(CLASSES), repeat=count))
        scores = torch.tensor(
            [score(emissions[row], transitions, tags) for tags in every], dtype=torch.float64
        )
        expected = scores - scores.logsumexp(0)
        assert tuple(best[row, :count].tolist()) == every[int(scores.argmax())]
        for tags, value in zip(every, expected.tolist(), strict=True):
            padded = torch.zeros(4, WORDS, dtype=torch.long)
            padded[row, :count] = torch.tensor(tags)
            found = crf.log_likelihood(emissions, padded, used, transitions)
            assert float(found[row]) == pytest.approx(value, abs=1e-5)


def test_unused_words_count_for_nothing(chain: tuple[torch.Tensor, ...]) -> None:
    emissions, used, transitions = chain
    tags = torch.tensor([[0, 1, 2, 1]] * 4)
    expected = crf.log_likelihood(emissions, tags, used, transitions)
    assert expected[3] == 0
    other = torch.where(used[..., None], emissions, 99.0)
    tags = torch.where(used, tags, 2)
    assert torch.equal(crf.log_likelihood(other, tags, used, transitions), expected)
    best = crf.best_tags(emissions, used, transitions)
    assert torch.equal(crf.best_tags(other, used, transitions)[used], best[used])


def test_gradients(chain: tuple[torch.Tensor, ...]) -> None:
    emissions, used, transitions = (each.double() for each in chain)
    tags = torch.tensor([[0, 1, 2, 1]] * 4)
    inputs = (emissions.requires_grad_(), transitions.requires_grad_())

    def loss(emissions: torch.Tensor, transitions: torch.Tensor) -> torch.Tensor:
        return crf.log_likelihood(emissions, tags, used.bool(), transitions)

    assert torch.autograd.gradcheck(loss, inputs)


def test_the_objective_reads_first_tokens_of_words() -> None:
    """Of five positions with words at 1 and 3, and a row of one word."""
    vocabulary = Vocabulary(size=9, pad=0, cls=1, sep=2, mask=3, special=(0, 1, 2, 3))
    objective = tagging.Config(crf=True).build(vocabulary)
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 5, CLASSES, generator=generator, requires_grad=True)
    transitions = torch.randn(CLASSES + 1, CLASSES + 1, generator=generator)
    labels = torch.tensor([[-1, 2, -1, 0, -1], [-1, -1, 1, -1, -1]])
    weights = (labels >= 0).float() * torch.tensor([[1.0], [0.0]])  # the second row is padding
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int32), "labels": labels, "weights": weights}

    def model(_inputs: object, outputs: frozenset[str]) -> dict[str, torch.Tensor]:
        assert outputs == objective.needs
        return {"tagging": scores, "tag_transitions": transitions}

    loss = objective.loss(model, batch, {"tags": torch.tensor(4.0)})  # type: ignore[arg-type]
    words, used = scores[:1, [1, 3]], torch.ones(1, 2, dtype=torch.bool)
    expected = -crf.log_likelihood(words, torch.tensor([[2, 0]]), used, transitions)[0]
    torch.testing.assert_close(loss.total, expected / 4)
    assert float(loss.metrics["loss"][1]) == 2
    best = crf.best_tags(words, used, transitions)[0].float()
    assert loss.outputs is not None
    assert loss.outputs[0, [1, 3]].tolist() == best.tolist()
    correct = (best == torch.tensor([2.0, 0.0])).sum()
    assert float(loss.metrics["accuracy"][0]) == float(correct)
    loss.total.backward()
    assert scores.grad is not None
    assert not scores.grad[0, [0, 2, 4]].any()
    assert not scores.grad[1].any()

"""CBoW and a BiLSTM with attention, against references that read each text by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from tests.outputs import outputs
from trainer.models import Model, Stored
from trainer.models.families import bilm, lstm, word_vectors
from trainer.models.recurrent.lstm_layers import RecurrentLayer
from trainer.models.recurrent.sentences import SentenceClassifier, Sentences, number_words

CBOW = Sentences(layers=0, pooling="mean", classifier_width=12, dropout=0.0)
BILSTM = Sentences(layers=2, hidden_size=5, classifier_width=12, dropout=0.0)
KINDS = {"cbow": CBOW, "bilstm": BILSTM, "attention": replace(BILSTM, attention=True)}
CLS, SEP = 1, 2
PAIRS: list[list[list[int]]] = [
    [[5, 6, 7, 8], [9, 10]],  # texts of a row, as tokens
    [[11], [12, 13, 14]],
    [[15, 16, 17]],
    [[18, 19], []],
    [[]],
]


def make(config: Any) -> Any:
    model = config.build().eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(3 * model.initial_values(name, 0, each.numel(), 0).view_as(each))
            if name.endswith("bias"):
                each.copy_(torch.linspace(-1, 1, each.numel()))
    return model


def rows(pairs: list[list[list[int]]], width: int = 11) -> dict[str, Tensor]:
    """[CLS] first [SEP] second [SEP], with padding."""
    found: dict[str, list[list[int]]] = {"tokens": [], "token_types": [], "segments": []}
    for first, *second in pairs:
        tokens = [CLS, *first, SEP]
        types = [0] * len(tokens)
        if second and second[0]:
            tokens += [*second[0], SEP]
            types += [1] * (len(second[0]) + 1)
        more = width - len(tokens)
        found["tokens"].append(tokens + [0] * more)
        found["token_types"].append(types + [0] * more)
        found["segments"].append([1] * len(tokens) + [0] * more)
    return {name: torch.tensor(values) for name, values in found.items()}


def bidirectional(layers: Any) -> nn.LSTM:
    """PyTorch's own layers with our weights."""
    ahead, back = list(layers.forward_layers), list(layers.backward_layers)
    inputs, hidden = ahead[0].weight_ih.shape[1], ahead[0].hidden_size
    found = nn.LSTM(inputs, hidden, len(ahead), batch_first=True, bidirectional=True)
    with torch.no_grad():
        for number, pair in enumerate(zip(ahead, back, strict=True)):
            for layer, ending in zip(pair, ("", "_reverse"), strict=True):
                assert isinstance(layer, RecurrentLayer)
                getattr(found, f"weight_ih_l{number}{ending}").copy_(layer.weight_ih)
                getattr(found, f"weight_hh_l{number}{ending}").copy_(layer.weight_hh)
                getattr(found, f"bias_ih_l{number}{ending}").copy_(layer.bias)
                getattr(found, f"bias_hh_l{number}{ending}").zero_()
    return found


def reference(head: SentenceClassifier, texts: list[Tensor]) -> Tensor:
    """The logits of one row, from the vectors [n, D] of the words of each of its texts."""
    config = head.config
    states = texts
    if head.lstm is not None:
        run = bidirectional(head.lstm)
        states = [run(each[None])[0][0] if len(each) else each for each in texts]
    is_pair = len(states) == 2 and len(states[1]) > 0
    if head.attended is not None and is_pair:
        first, second = states
        run, products = bidirectional(head.attended), first @ second.T
        read = (products.softmax(1) @ second, products.T.softmax(1) @ first)
        states = [
            run(torch.cat([own, other], 1)[None])[0][0]
            for own, other in zip(states, read, strict=True)
        ]
    width = head.dense.in_features // 4
    pooled = [
        torch.zeros(width)
        if not len(each)
        else (each.mean(0) if config.pooling == "mean" else each.max(0).values)
        for each in states
    ]
    u, v = pooled[0], pooled[1] if is_pair else torch.zeros(width)
    compared = [v, (u - v).abs(), u * v] if is_pair else [torch.zeros(width)] * 3
    inner: Tensor = F.relu(head.dense(torch.cat([u, *compared])))
    return head.classifier(inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    ["cbow", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "cbow")],
)
def test_logits_and_gradients_are_the_reference_s(kind: str) -> None:
    config = word_vectors.Config(20, 6, KINDS[kind], ("a", "b", "c"))
    model = make(config)
    (found,) = outputs(model, "classification", **rows(PAIRS))
    assert found.shape == (5, 1, 3)
    table = model.token_embeddings
    expected = torch.stack([reference(model.head, [table[text] for text in row]) for row in PAIRS])
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, 15).view(5, 3)
    slopes = [
        torch.autograd.grad((each * weights).sum(), [table, model.head.dense.weight])
        for each in (found[:, 0], expected)
    ]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-4, atol=1e-5)


def test_words_are_all_but_special_tokens() -> None:
    texts = torch.tensor([[1, 1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0]])
    assert number_words(texts).tolist() == [[0, 1, 1, 0, 2, 0, 0], [0] * 7]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_padding_or_on_each_other(kind: str) -> None:
    model = make(word_vectors.Config(20, 6, KINDS[kind], ("a", "b")))
    (whole,) = outputs(model, "classification", **rows(PAIRS))
    for number, row in enumerate(PAIRS):
        short = rows([row], width=2 + sum(map(len, row)) + (len(row) == 2 and bool(row[1])))
        (alone,) = outputs(model, "classification", **{**short, "segments": None})
        torch.testing.assert_close(alone[0], whole[number], rtol=1e-5, atol=1e-5)


def test_dropout_follows_the_keys() -> None:
    sentences = replace(KINDS["attention"], dropout=0.5)
    model = make(word_vectors.Config(20, 6, sentences, ("a", "b"))).train()
    keys = torch.tensor([3, 4, 3, 3, 3], dtype=torch.int32)
    same = rows([PAIRS[0]] * 5)
    (found,) = outputs(model, "classification", **same, dropout_key=keys)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", [lstm, bilm])
def test_on_a_language_model(family: Any) -> None:
    """ELMo's row: the classifier reads the learned mean of the layers."""
    shape: dict[str, Any] = {"layers": 1, "hidden_size": 8, "proj_size": 0, "embedding_width": 8}
    config = family.Config(20, **shape, head="classification", labels=("a", "b"), scalar_mix=True)
    model = make(replace(config, sentences=KINDS["attention"]))
    given = rows(PAIRS[:1])
    (found,) = outputs(model, "classification", **given)
    layers = torch.stack(outputs(model, "layer.0", "layer.1", **given))
    (mean,) = layers.mean(0)
    n, m = map(len, PAIRS[0])
    expected = reference(model.head, [mean[1 : n + 1], mean[n + 2 : n + 2 + m]])
    torch.testing.assert_close(found[0, 0], expected, rtol=1e-5, atol=1e-5)


def test_other_labels_have_a_new_classifier() -> None:
    config = word_vectors.Config(20, 6, CBOW, ("a", "b"))
    shapes = {name: tuple(each.shape) for name, each in config.build().named_parameters()}
    start = replace(config, labels=("c", "d")).build().start_from(Stored(config, shapes))
    assert start.sources["head.classifier.weight"] is None
    assert start.sources["head.dense.weight"] == "head.dense.weight"
    assert config.build().start_from(Stored(config, shapes)).unused == frozenset()


def test_facts_of_its_parameters() -> None:
    model = word_vectors.Config(20, 6, KINDS["attention"], ("a", "b")).build()
    assert isinstance(model, Model)
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "embeddings.tokens.weight"
    assert {model.role(name).part for name in names} == {"embedding", "head"}
    assert not model.initial_values("head.dense.bias", 2, 5, seed=0).any()
    assert len(model.sharding_units()) == 6
    # Each direction: 4 gates of 5 units that read 6 or 10 inputs, or 20 with attention, and 5.
    weights = 2 * 20 * ((6 + 5) + (10 + 5) + (20 + 5))
    classifier = 40 * 12 + 12 * 2
    expected = 6 * weights + 24 * 7 * 5 + 6 * classifier / 7
    assert model.flops_per_token(7, 1 / 7) == pytest.approx(expected)


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="attention is true without LSTM layers"):
        Sentences(layers=0, attention=True)
    with pytest.raises(ConfigError, match="classification head needs at least 1"):
        word_vectors.Config(20).build()
    with pytest.raises(ConfigError, match="no tagging head"):
        word_vectors.Config(20).for_needs(frozenset({"tagging"}), ("O", "B"))
    with pytest.raises(ConfigError, match="sentences is set, but head is tagging"):
        lstm.Config(20, head="tagging", labels=("O", "B"), sentences=BILSTM)
    model = make(word_vectors.Config(20, 6, CBOW, ("a", "b")))
    with pytest.raises(ConfigError, match="rows of this tokenizer have no token types"):
        outputs(model, "classification", tokens=torch.ones(1, 4, dtype=torch.long))

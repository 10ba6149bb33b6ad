"""ELMo: embeddings from characters, and heads of tasks, against modules of torch, word by word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from tests.outputs import outputs
from trainer.models import Stored, give_spellings
from trainer.models.families import bilm, lstm
from trainer.models.recurrent.characters import Characters, spell
from trainer.models.recurrent.model import RecurrentConfig

WORDS = ["[PAD]", "a", "cat", "cats", "naïve", "zyzzyva", "unbelievably", "."]
FILTERS = ((1, 4), (2, 3), (3, 5))
CONFIG = bilm.Config(
    vocab_size=12,  # four rows belong to no word
    hidden_size=9,
    proj_size=5,
    embedding_width=5,
    dropout=0.0,
    tied=False,
    characters=Characters(longest=6, width=3, filters=FILTERS),
)
TOKENS = torch.tensor([[1, 2, 7, 3, 4, 5, 6], [6, 1, 2, 0, 0, 0, 0]])
SEGMENTS = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])


def make(config: RecurrentConfig) -> Any:
    model = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    give_spellings(model, lambda: WORDS)
    return model


class Reference(nn.Module):
    """ELMo's embedding of a word (allenai/bilm-tf, bilm/model.py), one word at a time."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.bytes = nn.Embedding(259, 3)
        self.convolutions = nn.ModuleList(nn.Conv1d(3, n, w) for w, n in FILTERS)
        self.highways = nn.ModuleList(nn.Linear(12, 24) for _ in range(2))
        self.projection = nn.Linear(12, 5)
        state = embeddings.state_dict()
        with torch.no_grad():
            self.bytes.weight.copy_(state["bytes.weight"])
            for number, (width, count) in enumerate(FILTERS):
                own, flat = self.convolutions[number], state[f"filters.{number}.weight"]
                for place in range(width):  # the bytes of a window lie one after the other
                    own.weight[:, :, place] = flat[:, 3 * place : 3 * place + 3]
                own.bias.copy_(state[f"filters.{number}.bias"])
                assert own.weight.shape == (count, 3, width)
            for number, highway in enumerate(self.highways):
                for part, name in enumerate(("transform", "gate")):
                    rows = slice(12 * part, 12 * part + 12)
                    highway.weight[rows] = state[f"highways.{number}.{name}.weight"]
                    highway.bias[rows] = state[f"highways.{number}.{name}.bias"]
            self.projection.load_state_dict(
                {name: state[f"projection.{name}"] for name in ("weight", "bias")}
            )

    def forward(self, word: str) -> Tensor:
        content = [1 + byte for byte in word.encode()[:6]]
        ids = [257, *content, 258] + [0] * (6 - len(content))
        columns = self.bytes(torch.tensor([ids])).transpose(1, 2)
        features = [conv(columns).max(-1).values for conv in self.convolutions]
        x = torch.cat(features, -1).relu()
        for highway in self.highways:
            transformed, gate = highway(x).chunk(2, -1)
            carried = torch.sigmoid(gate)
            x = carried * x + (1 - carried) * torch.relu(transformed)
        return self.projection(x)[0]


def test_a_word_is_embedded_by_its_bytes() -> None:
    """With the same gradients; letters of several bytes, and words that are too long, too."""
    model = make(CONFIG)
    characters = model.embeddings.characters
    theirs = Reference(characters)
    own = characters(TOKENS)
    expected = torch.stack(
        [torch.stack([theirs(WORDS[token]) for token in row]) for row in TOKENS.tolist()]
    )
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    (own * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(
        characters.bytes.weight.grad, theirs.bytes.weight.grad, rtol=1e-5, atol=1e-5
    )
    for ours, other in zip(characters.filters, theirs.convolutions, strict=True):
        flat = other.weight.grad.transpose(1, 2).flatten(1)
        torch.testing.assert_close(ours.weight.grad, flat, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.bias.grad, other.bias.grad, rtol=1e-5, atol=1e-5)
    for ours, other in zip(characters.highways, theirs.highways, strict=True):
        gradient = torch.cat([ours.transform.weight.grad, ours.gate.weight.grad])
        torch.testing.assert_close(gradient, other.weight.grad, rtol=1e-5, atol=1e-5)


def test_the_model_reads_nothing_else_of_a_word() -> None:
    """Two words with the same first bytes are one word to it."""
    model = make(CONFIG).eval()
    words = [*WORDS[:5], "unbelief", *WORDS[6:]]
    whole = outputs(model, "hidden", tokens=TOKENS, segments=SEGMENTS)[0]
    give_spellings(model, lambda: words)  # "zyzzyva" is now read as "unbeli", as the last word is
    other = outputs(model, "hidden", tokens=TOKENS, segments=SEGMENTS)[0]
    assert (whole - other).abs().max() > 1e-3
    swapped = TOKENS.clone()
    swapped[TOKENS == 5] = 6
    same = outputs(model, "hidden", tokens=swapped, segments=SEGMENTS)[0]
    assert torch.equal(other, same)


def test_spellings() -> None:
    """Marks around bytes; é has two."""
    assert spell(["", "ab", "é", "abcdef"], 4).tolist() == [
        [257, 258, 0, 0, 0, 0],
        [257, 98, 99, 258, 0, 0],
        [257, 196, 170, 258, 0, 0],
        [257, 98, 99, 100, 101, 258],
    ]


def test_a_model_without_spellings_says_so() -> None:
    with pytest.raises(AssertionError, match="spellings are not there"):
        outputs(CONFIG.build(), "hidden", tokens=TOKENS)


@pytest.mark.parametrize("kind", ["lstm", "bilm"])
@pytest.mark.parametrize("head", ["tagging", "question_answering", "classification"])
def test_a_tasks_head_reads_the_mix_of_all_layers_through_an_lstm(kind: str, head: str) -> None:
    """Equation 1 of the paper, a BiLSTM of torch, and a linear layer."""
    base: RecurrentConfig = CONFIG
    if kind == "lstm":
        base = lstm.Config(12, hidden_size=6, embedding_width=6, dropout=0.0)
    labels = () if head == "question_answering" else ("x", "y", "z")
    config = replace(base, head=head, labels=labels, scalar_mix=True, head_lstm=2)
    model = make(config).eval()
    given = {"tokens": TOKENS, "segments": SEGMENTS}
    states = torch.stack(outputs(model, *(f"layer.{n}" for n in range(3)), **given))
    shares = model.mix.scores.softmax(0)
    mixed = (1 + model.mix.gain) * (shares[:, None, None, None] * states).sum(0)
    width = config.width
    theirs = nn.LSTM(width, width // 2, 2, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            for layer in range(2):
                own = getattr(model.head_lstm, f"{direction}_layers")[layer]
                for name in ("weight_ih", "weight_hh"):
                    getattr(theirs, f"{name}_l{layer}{suffix}").copy_(getattr(own, name))
                getattr(theirs, f"bias_ih_l{layer}{suffix}").copy_(own.bias)
                getattr(theirs, f"bias_hh_l{layer}{suffix}").zero_()
    assert outputs(model, "hidden", **given)[0].shape == (2, 7, width)
    (found,) = outputs(model, head, **given)
    for row, length in enumerate((7, 3)):
        read, _ = theirs(mixed[row : row + 1, :length])
        if head == "classification":
            ahead, back = read[0].chunk(2, -1)
            pooled = [
                *(ahead[-1], ahead.max(0).values, ahead.mean(0)),
                *(back[0], back.max(0).values, back.mean(0)),
            ]
            inner = torch.relu(model.head.dense(torch.cat(pooled)))
            expected, own = model.head.classifier(inner), found[row, 0]
        else:
            expected, own = model.head.classifier(read[0]), found[row, :length]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"have no matrix of tokens\. Set tied to false"):
        replace(CONFIG, tied=True)
    with pytest.raises(ConfigError, match="scalar_mix is for a task's head"):
        replace(CONFIG, scalar_mix=True)
    task: dict[str, Any] = {"head": "tagging", "labels": ("x", "y")}
    with pytest.raises(ConfigError, match="Set embedding_width to a layer's width, 5"):
        replace(CONFIG, **task, scalar_mix=True, embedding_width=8)
    odd = lstm.Config(12, hidden_size=5, embedding_width=5)
    with pytest.raises(ConfigError, match="head_lstm is 1, each direction of which is half"):
        replace(odd, **task, head_lstm=1)
    with pytest.raises(ConfigError, match=r"model\.characters is set, so the model has no token"):
        _ = CONFIG.build().token_embeddings
    with pytest.raises(ConfigError, match="crf is true, but head is language_model"):
        replace(CONFIG, crf=True)
    for wrong in ({"longest": 0}, {"width": 0}, {"highways": -1}):
        with pytest.raises(ConfigError, match="Use 1 or more"):
            Characters(**wrong)
    with pytest.raises(ConfigError, match="Use pairs of a width from 1 to 4"):
        Characters(longest=2, filters=((5, 3),))


def test_parts_that_are_added_to_a_head_begin_at_random() -> None:
    """Everything else of the same head is loaded."""
    before = replace(CONFIG, head="tagging", labels=("x", "y"))
    model: Any = replace(before, scalar_mix=True, head_lstm=1, crf=True).build()
    stored = {name: tuple(each.shape) for name, each in before.build().named_parameters()}
    sources = model.start_from(Stored(before, stored)).sources
    new = {name for name, source in sources.items() if source is None}
    assert new == {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("mix.", "head_lstm.", "tag_transitions"))
    }


def test_initial_values_and_work() -> None:
    """Highways pass most of their input at first, and all layers count alike."""
    config = replace(CONFIG, head="tagging", labels=("x", "y"), scalar_mix=True, crf=True)
    model: Any = config.build()
    for name, parameter in model.named_parameters():
        values = model.initial_values(name, 0, parameter.numel(), 0)
        if name.endswith("gate.bias"):
            assert (values == 2).all()
        elif name.startswith(("mix.", "tag_transitions")):
            assert not values.any()
        elif name.endswith("weight"):
            assert values.std() > 0
    # Windows of a word of 8 bytes, times bytes in a window, times filters.
    products = 3 * (8 * 1 * 4 + 7 * 2 * 3 + 6 * 3 * 5) + 4 * 12 * 12 + 12 * 5
    assert model.embeddings.characters.flops() == 6 * products
    plain = replace(config, characters=None).build()
    spelled, table = (each.flops_per_token(7) for each in (model, plain))
    assert spelled - table == 6 * products

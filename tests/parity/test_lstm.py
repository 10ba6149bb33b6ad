"""Recurrent models against compositions of torch.nn.LSTM, nn.Embedding and nn.Linear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.outputs import outputs
from trainer.models.families import bilm, lstm
from trainer.models.inputs import Inputs
from trainer.models.recurrent.model import RecurrentConfig

SHAPE: dict[str, Any] = {"vocab_size": 50, "layers": 3, "hidden_size": 24, "dropout": 0.0}
MODELS: dict[str, RecurrentConfig] = {
    "lstm": lstm.Config(**SHAPE, embedding_width=24),
    "lstm, projected to tie": lstm.Config(**SHAPE, embedding_width=16),
    "lstm, all": lstm.Config(
        **SHAPE, embedding_width=20, proj_size=12, residual=True, norm=True, tied=False
    ),
    "bilm": bilm.Config(**SHAPE, embedding_width=12, proj_size=12),
    "bilm, all": bilm.Config(
        **SHAPE, embedding_width=20, proj_size=0, residual=True, norm=True, tied=False
    ),
}
# Lengths of the packed sequences of rows of 20 tokens; the rest is padding.
ROWS = ((7, 9, 4), (11,), (20,), (3, 3, 3, 3), (1, 1, 16))


class Reference(nn.Module):
    """The same model of modules of torch, which reads one sequence at a time."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        width, inputs = config.output_width, config.embedding_width
        self.embeddings = nn.Embedding(config.vocab_size, inputs)
        stacks = 2 if isinstance(config, bilm.Config) else 1
        self.stacks = nn.ModuleList(
            nn.ModuleList(
                nn.LSTM(inputs, size, proj_size=config.proj_size)
                for inputs, size in zip(config.input_widths, config.hidden_sizes, strict=True)
            )
            for _ in range(stacks)
        )
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.LayerNorm(width) for _ in range(config.layers)) for _ in range(stacks)
        )
        self.projection = nn.Linear(width, inputs)
        self.output = nn.Linear(inputs if config.tied else width, config.vocab_size)
        if config.tied:
            self.output.weight = self.embeddings.weight
        self.dense = nn.Linear(3 * stacks * width, config.head_width)
        self.classifier = nn.Linear(config.head_width, max(1, len(config.labels)))

    def states(self, tokens: Tensor, direction: int) -> list[Tensor]:
        """The states after each layer, [S, D] each."""
        hidden = self.embeddings(tokens.flip(0) if direction else tokens)
        found = []
        for number, layer in enumerate(self.stacks[direction]):
            output = layer(hidden[:, None])[0][:, 0]
            if self.config.norm:
                output = self.norms[direction][number](output)
            hidden = output + hidden if self.config.residual and number else output
            found.append(hidden.flip(0) if direction else hidden)
        return found

    def forward(self, tokens: Tensor, direction: int) -> Tensor:
        """int [S] -> the logits [S, V] of each state of a direction."""
        hidden = self.states(tokens, direction)[-1]
        if self.config.tied and hidden.shape[1] != self.config.embedding_width:
            hidden = self.projection(hidden)
        return self.output(hidden)

    def classify(self, tokens: Tensor) -> Tensor:
        """int [S] -> logits [C], by the pooling functions that ULMFiT's code uses."""
        pooled = []
        for direction in range(len(self.stacks)):
            states = self.states(tokens, direction)[-1]
            units = states.T[None]
            highest, mean = F.adaptive_max_pool1d(units, 1), F.adaptive_avg_pool1d(units, 1)
            pooled += [states[0 if direction else -1], highest.flatten(), mean.flatten()]
        return self.classifier(torch.relu(self.dense(torch.cat(pooled))))


def pair(config: RecurrentConfig) -> tuple[Any, Any]:
    """Our model, and the reference with its weights; all values are far from symmetric."""
    ours, theirs = config.build(), Reference(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        for name, parameter in ours.named_parameters():
            if (own := counterpart(theirs, name)) is not None:
                own.copy_(parameter)
        for stack in theirs.stacks:
            for layer in stack:
                layer.bias_hh_l0.zero_()
    return ours, theirs


def counterpart(reference: Any, name: str) -> Tensor:
    """The reference's parameter for one of ours."""
    parts = name.split(".")
    if parts[:2] in (["head", "dense"], ["head", "classifier"]):
        return getattr(getattr(reference, parts[1]), parts[2])
    if parts[0] == "embeddings":
        return reference.embeddings.weight
    if parts[0] == "head":
        if parts[1] == "projection":
            return getattr(reference.projection, parts[2])
        return reference.output.bias if parts[1] == "bias" else reference.output.weight
    direction, number = int(parts[0] == "backward_layers"), int(parts[1])
    if parts[2] == "norm":
        return getattr(reference.norms[direction][number], parts[3])
    own = "bias_ih" if parts[2] == "bias" else parts[2]
    return getattr(reference.stacks[direction][number], f"{own}_l0")


def packed(rows: tuple[tuple[int, ...], ...], length: int = 20) -> dict[str, Tensor]:
    tokens = torch.randint(0, 50, (len(rows), length), generator=torch.Generator().manual_seed(1))
    segments = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for number, (size, end) in enumerate(zip(lengths, ends, strict=True), 1):
            segments[row, end - size : end] = number
    return {"tokens": tokens, "segments": segments}


def sequences(columns: dict[str, Tensor]) -> list[tuple[int, slice]]:
    """The row and the positions of each sequence."""
    found = []
    for row, segments in enumerate(columns["segments"]):
        for number in range(1, int(segments.max()) + 1):
            places = (segments == number).nonzero()[:, 0]
            found.append((row, slice(int(places[0]), int(places[-1]) + 1)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_of_packed_rows_are_those_of_separate_sequences(
    name: str,
) -> None:
    config = MODELS[name]
    ours, theirs = pair(config)
    columns = packed(ROWS)
    directions = ["next_tokens", "previous_tokens"][: 2 if name.startswith("bilm") else 1]
    found = outputs(ours, *directions, **columns)
    losses, expected = [], []
    for row, at in sequences(columns):
        tokens = columns["tokens"][row, at]
        for direction, logits in enumerate(found):
            # The last state of a sequence predicts nothing, nor does the first one backward.
            reference = theirs(tokens, direction)
            reference = reference[1:] if direction else reference[:-1]
            labels = tokens[:-1] if direction else tokens[1:]
            own = logits[row, at.start : at.stop - 1]
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-5)
            losses.append(F.cross_entropy(own, labels, reduction="sum"))
            expected.append(F.cross_entropy(reference, labels, reduction="sum"))
    loss, reference_loss = sum(losses), sum(expected)
    torch.testing.assert_close(loss, reference_loss, rtol=1e-5, atol=1e-5)
    (loss / len(losses)).backward()  # type: ignore[union-attr]
    (reference_loss / len(losses)).backward()  # type: ignore[union-attr]
    for own_name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, counterpart(theirs, own_name).grad, rtol=1e-5, atol=1e-5, msg=own_name
        )


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hidden_states_of_all_layers(name: str) -> None:
    """Without resets at the end of a row, those of the last position too."""
    config = MODELS[name]
    ours, theirs = pair(config)
    ours.eval()
    columns = packed(((20,), (13,)))
    numbers = range(config.layers + 1)
    offered = [f"layer.{n}" for n in numbers if f"layer.{n}" in ours.offers]
    assert ("layer.0" in offered) == (config.embedding_width == config.output_width)
    found = dict(zip(offered, outputs(ours, *offered, **columns), strict=True))
    (hidden,) = outputs(ours, "hidden", **columns)
    assert torch.equal(hidden, found[f"layer.{config.layers}"])
    assert hidden.shape == (2, 20, config.width)
    for row, at in sequences(columns):
        tokens = columns["tokens"][row, at]
        embedded = theirs.embeddings(tokens)
        states = [[embedded, *theirs.states(tokens, n)] for n in range(len(theirs.stacks))]
        for layer in offered:
            own = torch.cat([each[int(layer[6:])] for each in states], -1)
            torch.testing.assert_close(found[layer][row, at], own, rtol=1e-5, atol=1e-5)


def hashed(x: np.ndarray) -> np.ndarray:
    """lowbias32 (Wellons 2018), of uint32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def weight_mask(step_key: int, layer: int, shape: torch.Size, rate: float) -> Tensor:
    """What multiplies a recurrent matrix of AWD-LSTM, element by element.

    Computed with numpy from the definition: the key of a layer is a hash of the step's and the
    layer's number, and an element is dropped if its own hash is among the lowest `rate` of all.
    """
    own = hashed(np.array([step_key], np.int32).view(np.uint32))
    key = hashed(own ^ (np.array([layer], np.uint32) * np.uint32(0x9E3779B9)))
    bits = (hashed(np.arange(shape.numel(), dtype=np.uint32)) ^ key) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    is_kept = bits.view(np.int32).astype(np.int64) + 2**31 >= round(rate * 2**32)
    return torch.from_numpy(is_kept / (1 - rate)).float().view(shape)


@pytest.mark.parametrize("kind", ["lstm", "bilm"])
def test_dropped_recurrent_weights_are_those_of_awd_lstm(kind: str) -> None:
    """The reference's layers get masked matrices, one mask for all rows (Merity et al. 2018)."""
    config: RecurrentConfig = lstm.Config(**SHAPE, embedding_width=16, last_hidden_size=16)
    if kind == "bilm":
        config = MODELS["bilm"]
    config = replace(config, weight_dropout=0.4, dropout=0.0)
    ours, theirs = pair(config)
    ours.train()
    step_key, masks = -123456789, {}
    for number, (name, parameter) in enumerate(
        (name, each) for name, each in ours.named_parameters() if name.endswith("weight_hh")
    ):
        masks[name] = weight_mask(step_key, number, parameter.shape, 0.4)
        with torch.no_grad():
            counterpart(theirs, name).mul_(masks[name])
    dropped = torch.cat([mask.flatten() == 0 for mask in masks.values()]).float().mean()
    assert dropped == pytest.approx(0.4, abs=0.05)
    columns: dict[str, Any] = packed(ROWS)
    columns |= {
        "dropout_key": torch.arange(len(ROWS), dtype=torch.int32),
        "extra": {"step_key": torch.full((len(ROWS),), step_key, dtype=torch.int32)},
    }
    directions = ["next_tokens", "previous_tokens"][: len(theirs.stacks)]
    found = outputs(ours, *directions, **columns)
    losses = []
    for row, at in sequences(columns):
        tokens = columns["tokens"][row, at]
        for direction, logits in enumerate(found):
            reference = theirs(tokens, direction)
            reference = reference[1:] if direction else reference[:-1]
            own = logits[row, at.start : at.stop - 1]
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-5)
            losses.append(torch.stack([own.square().sum(), reference.square().sum()]))
    (torch.stack(losses).sum() / 1000).backward()
    for own_name, parameter in ours.named_parameters():
        gradient = counterpart(theirs, own_name).grad
        expected = gradient * masks[own_name] if own_name in masks else gradient
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5, msg=own_name)
    ours.eval()
    (evaluated,) = outputs(ours, "next_tokens", **columns)
    assert (evaluated - found[0]).abs().max() > 1e-2


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_a_classifier_of_padded_rows_is_that_of_separate_sequences(name: str, padding: str) -> None:
    """Logits, loss and gradients; and rows without padding need no segments."""
    config = replace(MODELS[name], head="classification", labels=("a", "b", "c"), head_width=10)
    ours, theirs = pair(replace(config, head_dropout=(0.0, 0.0)))
    columns = packed(((20,), (13,), (2,), (1,)))
    if padding == "left":
        columns = {each: column.flip(1) for each, column in columns.items()}
    (logits,) = outputs(ours, "classification", **columns)
    expected = torch.stack([theirs.classify(columns["tokens"][at]) for at in sequences(columns)])
    torch.testing.assert_close(logits[:, 0], expected, rtol=1e-5, atol=1e-5)
    (whole,) = outputs(ours, "classification", tokens=columns["tokens"][:1])
    torch.testing.assert_close(whole[:, 0], expected[:1], rtol=1e-5, atol=1e-5)
    labels = torch.tensor([0, 2, 1, 1])
    for found in (logits[:, 0], expected):
        F.cross_entropy(found, labels).backward()
    for own_name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, counterpart(theirs, own_name).grad, rtol=1e-5, atol=1e-5, msg=own_name
        )


@pytest.mark.parametrize("name", MODELS)
def test_neighbors_of_a_row_are_invisible_to_the_last_bit(name: str) -> None:
    """Other tokens before and after a sequence change nothing, and get no gradient of it."""
    ours, _ = pair(MODELS[name])
    columns = packed(((7, 9, 4),))
    other = {**columns, "tokens": columns["tokens"].clone()}
    other["tokens"][0, :7] += 1
    other["tokens"][0, 16:] += 2
    other["tokens"] %= 50
    embedded = {}
    for key, given in (("one", columns), ("other", other)):
        seen: list[Tensor] = []
        handle = ours.embeddings.register_forward_hook(
            lambda *call, seen=seen: seen.append(call[2][0])
        )
        names = [each for each in ("next_tokens", "previous_tokens") if each in ours.offers]
        embedded[key] = (outputs(ours, *names, **given), seen[0], names)
        handle.remove()
    (one, rows, names), (two, *_) = embedded["one"], embedded["other"]
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first[0, 7:15], second[0, 7:15])
        assert not torch.equal(first[0, :6], second[0, :6])
    (gradient,) = torch.autograd.grad(sum(each[0, 7:15].square().sum() for each in one), rows)
    assert not gradient[0, :7].any()
    assert not gradient[0, 16:].any()
    assert gradient[0, 7:15].abs().sum(-1).all()


def test_a_fault_in_the_resets_would_be_noticed() -> None:
    """Without segments the state goes on, and the logits of a second sequence are others."""
    ours, _ = pair(replace(MODELS["lstm"], layers=1))
    columns = packed(((7, 13),))
    (with_resets,) = outputs(ours, "next_tokens", **columns)
    (without,) = outputs(ours, "next_tokens", tokens=columns["tokens"])
    torch.testing.assert_close(with_resets[0, :6], without[0, :6], rtol=1e-5, atol=1e-5)
    assert (with_resets[0, 7:] - without[0, 7:]).abs().max() > 1e-2


@torch.no_grad()
def test_decoding_token_by_token() -> None:
    """Prompts of several lengths, padded on the left, and rows that are reordered."""
    for name in ("lstm", "lstm, projected to tie", "lstm, all"):
        ours, theirs = pair(MODELS[name])
        ours.eval()
        texts = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(2))
        padding = torch.tensor([0, 3, 5])
        real = torch.arange(8) >= padding[:, None]
        prompts = torch.where(real, texts[:, :8], 7)
        logits, cache = ours.start(Inputs(prompts, real.int()), 12)
        rows = [texts[row, int(skip) : 8] for row, skip in enumerate(padding)]
        order = torch.tensor([2, 0, 0, 1])
        for place in range(8, 12):
            expected = torch.stack([theirs(row, 0)[-1] for row in rows])
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            rows = [rows[n] for n in order.tolist()] if place == 9 else rows
            if place == 9:
                cache.select(order)
            tokens = torch.arange(len(rows)) + place
            rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
            logits = ours.step(tokens, cache)

"""Token by token, a decoder says what it says of the whole text at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.outputs import predict
from trainer.models import Model
from trainer.models.families import bart, gpt2, llama, modernbert, openai_gpt, t5
from trainer.models.inputs import Inputs

SHAPE = {"vocab_size": 97, "layers": 2, "width": 32, "heads": 4, "ffn_width": 48}
T5 = t5.Config(**SHAPE, head_width=12)
BART = bart.Config(**SHAPE, max_positions=16)
LLAMA = llama.Config(
    **SHAPE, kv_heads=2, head_width=8, window=4, causal=False, decoder_layers=2, start_token=1
)
DECODERS = [
    gpt2.Config(**SHAPE, max_positions=24),
    openai_gpt.Config(**SHAPE, max_positions=24),
    dataclasses.replace(T5, architecture="language_model"),
    dataclasses.replace(T5, architecture="prefix_lm"),
    modernbert.Config(**SHAPE, max_positions=24, causal=True, local_window=4, global_every=2),
    llama.Config(**SHAPE, kv_heads=2, head_width=8, window=4, unplaced_every=2),
    llama.Config(**SHAPE, kv_heads=2, head_width=8, joint_qk_norm=True, output_norm=True),
]


def make(build: Callable[..., Model], config: Any) -> Model:
    model = build(config).eval()
    for parameter in model.parameters():  # larger than at initialization, so that the tokens matter
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(0)
        )
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "config",
    DECODERS,
    ids=["gpt2", "openai_gpt", "t5_language_model", "t5_prefix_lm", "modernbert", "llama", "olmo2"],
)
def test_decoders(build: Callable[..., Model], config: Any):
    """Prompts of 5, 3 and 1 tokens, padded at the left, and 10 tokens after them."""
    model, text = make(build, config), tokens(3, 15)
    padding = torch.tensor([0, 2, 4])
    segments = (torch.arange(15) >= padding[:, None]).int()
    positions = (torch.arange(15) - padding[:, None]).clamp(min=0)
    prefix = None
    if getattr(config, "architecture", None) == "prefix_lm":
        prefix = (torch.arange(15) < 5).expand(3, -1)
    whole = predict(model, tokens=text, segments=segments, positions=positions, prefix=prefix)
    first = Inputs(text[:, :5], segments[:, :5], prefix=None if prefix is None else prefix[:, :5])
    logits, cache = model.start(first, 15)
    steps = [logits] + [model.step(text[:, position], cache) for position in range(5, 15)]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 4:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [T5, dataclasses.replace(T5, architecture="shared_encoder_decoder"), BART, LLAMA],
    ids=["t5", "t5_shared", "bart", "llama"],
)
def test_encoder_decoders(build: Callable[..., Model], config: Any):
    """Sources of 12, 7 and 1 tokens; a prompt of two tokens, and 10 after it."""
    model = make(build, config)
    source, target = tokens(3, 12), tokens(3, 12)
    segments = (torch.arange(12) < torch.tensor([12, 7, 1])[:, None]).int()
    of_target = {"target_tokens": target, "target_segments": torch.ones_like(target)}
    whole = predict(model, tokens=source, segments=segments, **of_target)
    logits, cache = model.start(Inputs(source, segments, target_tokens=target[:, :2]), capacity=12)
    steps = [logits] + [model.step(target[:, position], cache) for position in range(2, 12)]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 1:], rtol=1e-5, atol=1e-5)


def test_rows_can_be_repeated_moved_and_dropped(build: Callable[..., Model]):
    """As beams are: each goes on from the positions of the row that it was taken from."""
    for config in (T5, BART, LLAMA, DECODERS[0], DECODERS[-1]):
        model, text = make(build, config), tokens(3, 9)
        segments = (torch.arange(4) >= torch.tensor([[0], [1], [2]])).int()
        start = Inputs(text[:, :4], segments, target_tokens=None if config.causal else text[:, :1])
        _, cache = model.start(start, capacity=8)
        model.step(text[:, 4], cache)
        rows, after = torch.tensor([2, 0, 2, 2]), text[:, 5]
        cache.select(rows)
        expected = []
        for row in rows.tolist():
            _, alone = model.start(
                start.map(lambda column, row=row: column[row : row + 1]), capacity=8
            )
            model.step(text[row : row + 1, 4], alone)
            expected.append(model.step(after[row : row + 1], alone))
        torch.testing.assert_close(
            model.step(after[rows], cache), torch.cat(expected), rtol=1e-5, atol=1e-5
        )

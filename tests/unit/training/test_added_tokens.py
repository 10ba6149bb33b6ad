"""Tokens that a tokenizer has in addition to the one of a trained model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import CheckpointError, ConfigError
from trainer.checkpoint.huggingface import save_folder
from trainer.checkpoint.layout import StoredTensors
from trainer.models import ModelConfig
from trainer.models.codecs import codec_of
from trainer.models.families import albert, bert, electra, gpt2, t5
from trainer.models.inputs import Inputs
from trainer.models.peft.kinds import lora
from trainer.training.weights.added_tokens import with_row_per_token
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights, load_weights

SHAPE: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "ffn_width": 16}
# The width and the vocabulary are equal in size: shapes do not tell which is which.
CONFIGS = {
    "bert": bert.Config(vocab_size=16, **{**SHAPE, "width": 16}, max_positions=16),
    "bert-untied": bert.Config(vocab_size=64, **SHAPE, max_positions=16, tied=False),
    "albert": albert.Config(vocab_size=64, **SHAPE, max_positions=16, embedding_width=4),
    "gpt2": gpt2.Config(vocab_size=64, **SHAPE, max_positions=16),
    "t5": t5.Config(vocab_size=64, **SHAPE, head_width=4, tied=False),
    "electra": electra.Config(vocab_size=64, **SHAPE, max_positions=16, generator_divisor=2),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"embeddings.tokens.weight", "head.bias"}),
        ("bert-untied", {"embeddings.tokens.weight", "head.bias", "head.decoder.weight"}),
        ("albert", {"embeddings.tokens.weight", "head.bias"}),
        ("gpt2", {"embeddings.tokens.weight"}),
        ("t5", {"embeddings.tokens.weight", "head.decoder.weight"}),
        ("electra", {"embeddings.tokens.weight", "generator.head.bias"}),
    ],
)
def test_parameters_with_a_row_per_token(name: str, expected: set[str]) -> None:
    assert with_row_per_token(CONFIGS[name]) == expected


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """60 tokens."""
    words = "the quick brown fox jumps over a lazy dog and runs away"
    trained = TokenizerConfig("", vocab_size=60).train([words] * 9)
    assert trained.vocabulary.size == 60
    return trained


def saved(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> Weights:
    """Random weights as a folder of Hugging Face, biases included."""
    model, generator = config.build(), torch.Generator().manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        parameter.normal_(0, 0.5, generator=generator)
    tokenizer.save(folder / "tokenizer")
    tensors = codec_of(config).export_tensors(dict(model.named_parameters()))
    save_folder(folder / "saved", codec_of(config).to_huggingface(), tensors, folder / "tokenizer")
    return load_weights(folder / "saved")


def dataset(tokenizer: Tokenizer) -> Any:
    return SimpleNamespace(name="more", tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["bert-untied", "albert", "gpt2", "t5"])
@pytest.mark.parametrize("rows", [63, 64, 80])
def test_old_rows_stay_and_new_ones_are_the_mean(
    name: str, rows: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Of 64 stored rows 4 are padding; 3 new tokens take 3 of them, or the table grows."""
    stored = saved(CONFIGS[name], tokenizer, tmp_path)
    larger = tokenizer.with_tokens(["fox##trot", "<place>", "dogs"])
    config: Any = replace(CONFIGS[name], vocab_size=rows)  # type: ignore[type-var]
    model = config.build()
    if rows < 64:
        with pytest.raises(CheckpointError, match=r"set model\.vocab_size=64 as it was there"):
            stored_values(stored, model, dataset(larger), seed=0)
        return
    values = stored_values(stored, model, dataset(larger), seed=0)
    growing = with_row_per_token(config)
    for each, parameter in model.named_parameters():
        count, old = parameter.numel(), stored.tensors[each]
        found = values(each, 0, count).view_as(parameter)
        if each not in growing:
            assert torch.equal(found, old)
            continue
        assert torch.equal(found[:60], old[:60])
        mean = old[:60].double().mean(0).float().expand_as(found[60:])
        torch.testing.assert_close(found[60:], mean, rtol=1e-6, atol=1e-7)
        # Whatever partition a process holds, it has the same values.
        for parts in (3, 7):
            edges = [count * part // parts for part in range(parts + 1)]
            pieces = [values(each, a, b) for a, b in itertools.pairwise(edges)]
            assert torch.equal(torch.cat(pieces), found.flatten())


def test_logits_of_old_tokens_stay_and_the_loss_is_bounded(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    stored = saved(CONFIGS["bert-untied"], tokenizer, tmp_path)
    before = stored.model(frozenset({"tokens"}))
    larger = tokenizer.with_tokens(["fox##trot", "<place>", "dogs"])
    after = replace(CONFIGS["bert-untied"], vocab_size=72).build().eval()  # type: ignore[type-var]
    values = stored_values(stored, after, dataset(larger), seed=0)
    for name, parameter in after.named_parameters():
        parameter.data = values(name, 0, parameter.numel()).view_as(parameter)
    tokens = torch.arange(5, 15)[None]
    inputs = Inputs(
        tokens=tokens,
        segments=torch.ones_like(tokens),
        positions=torch.arange(10)[None],
        predicted=torch.arange(10)[None],
    )
    old, new = (model(inputs, frozenset({"tokens"}))["tokens"] for model in (before, after))
    torch.testing.assert_close(new[..., :60], old[..., :60], rtol=1e-5, atol=1e-6)
    mean = old[..., :60].mean(-1, keepdim=True).expand(-1, -1, 12)
    torch.testing.assert_close(new[..., 60:], mean, rtol=1e-4, atol=1e-5)
    rise = new.logsumexp(-1) - old[..., :60].logsumexp(-1)
    assert rise.max() <= math.log(72 / 60) + 1e-5


def test_a_larger_table_for_the_same_tokenizer_keeps_all_rows(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    stored = saved(CONFIGS["gpt2"], tokenizer, tmp_path)
    model = replace(CONFIGS["gpt2"], vocab_size=72).build()  # type: ignore[type-var]
    found = stored_values(stored, model, dataset(tokenizer), seed=0)(
        "embeddings.tokens.weight", 0, 72 * 8
    )
    assert torch.equal(found[: 64 * 8], stored.tensors["embeddings.tokens.weight"].flatten())


def test_other_tokenizers_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = saved(CONFIGS["gpt2"], tokenizer, tmp_path)
    larger = replace(CONFIGS["gpt2"], vocab_size=72).build()  # type: ignore[type-var]
    extended = tokenizer.with_tokens(["one", "two"])
    other = TokenizerConfig("", vocab_size=60).train(["and the dog of a fox jumps"] * 9)
    for wrong in (other, other.with_tokens(["one"])):
        with pytest.raises(ConfigError, match="trained with another tokenizer"):
            stored_values(stored, larger, dataset(wrong), seed=0)
    # Fewer tokens than the model has, and other ones at the same ids.
    (tmp_path / "more").mkdir()
    more = saved(CONFIGS["gpt2"], extended, tmp_path / "more")
    for wrong in (tokenizer, tokenizer.with_tokens(["two", "one", "three"])):
        with pytest.raises(ConfigError, match="trained with another tokenizer"):
            stored_values(more, larger, dataset(wrong), seed=0)
    # Only at the start of a run: an evaluation has to be of the very model.
    own = CONFIGS["gpt2"].build()
    with pytest.raises(ConfigError, match="trained with another tokenizer"):
        stored_values(stored, own, dataset(extended))


def test_frozen_tables_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = saved(CONFIGS["gpt2"], tokenizer, tmp_path)
    config: Any = replace(CONFIGS["gpt2"], vocab_size=72, peft=lora.Config(rank=2))  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"embeddings\.tokens\.weight is frozen, and the rows"):
        stored_values(stored, config.build(), dataset(tokenizer.with_tokens(["dogs"])), seed=0)


def test_weights_are_read_in_parts_of_a_shard(tokenizer: Tokenizer) -> None:
    """The mean of a table that is larger than a block is that of all rows."""
    from trainer.training.weights import added_tokens

    table = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    rows = added_tokens.ExtendedRows(StoredTensors.of({"t": table}), "t", 40, 40, 8)
    whole = rows(40 * 8, 41 * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(added_tokens, "_BLOCK", 24)
        rows = added_tokens.ExtendedRows(StoredTensors.of({"t": table}), "t", 40, 40, 8)
        torch.testing.assert_close(rows(40 * 8, 41 * 8), whole, rtol=0, atol=1e-7)
    assert rows(16, 16).numel() == 0

"""ELECTRA against `ElectraForPreTraining` and `ElectraForMaskedLM`, and its loss step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

from samestep.errors import ConfigError
from tests.outputs import fill, outputs, parameters
from tests.parity.pairs import assert_gradients_are_equal, exported, load
from tests.unit.objectives.test_mlm_sbo import VOCABULARY, examples
from trainer.models import Stored
from trainer.models.codecs import codec_of
from trainer.models.families import electra
from trainer.models.sampling import sample
from trainer.objectives.kinds import replaced_mlm, replaced_tokens

SHAPE = {
    "vocab_size": 100,
    "embedding_size": 20,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
CONFIG = electra.Config(
    vocab_size=100,
    embedding_width=20,
    layers=2,
    width=48,
    heads=4,
    ffn_width=96,
    max_positions=64,
    generator_divisor=2,
)


def randomized(model: torch.nn.Module, std: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + std * noise if parameter.ndim == 1 else 4 * std * noise)


def rows() -> tuple[replaced_tokens.ReplacedTokens, dict[str, Any], dict[str, torch.Tensor]]:
    objective = replaced_tokens.Config().build(VOCABULARY)
    assert isinstance(objective, replaced_tokens.ReplacedTokens)
    arrays = objective.collate(examples(6), 64)
    return objective, arrays, {n: torch.from_numpy(np.asarray(a)) for n, a in arrays.items()}


def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("tokens", "segments", "positions")}


@pytest.mark.parametrize("embedding", [20, 48])
@pytest.mark.parametrize("kind", [ElectraForPreTraining, ElectraForMaskedLM])
def test_logits_loss_and_gradients_are_equal(kind: Any, embedding: int, tmp_path: Path) -> None:
    theirs = kind(ElectraConfig(**{**SHAPE, "embedding_size": embedding})).eval()
    randomized(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    config, model = load(electra.Config, tmp_path / "theirs")
    generates = kind is ElectraForMaskedLM
    assert (config.masked_lm, config.generator_divisor) == (generates, 0)
    tokens = torch.randint(4, 100, (3, 30), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([30, 11, 1])
    real = torch.arange(30) < lengths[:, None]
    labels = torch.where(real, tokens if generates else (tokens % 3 == 0).long(), -100)
    found = theirs(input_ids=tokens, attention_mask=real.int(), labels=labels)
    (logits,) = outputs(
        model,
        config.predicts,
        tokens=tokens,
        segments=real.int(),
        positions=torch.arange(30).expand(3, -1),
    )
    torch.testing.assert_close(logits[real], found.logits[real], rtol=1e-5, atol=1e-5)
    if generates:
        loss = F.cross_entropy(logits[real], labels[real])
    else:
        loss = F.binary_cross_entropy_with_logits(logits[real], labels[real].float())
    torch.testing.assert_close(loss, found.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    found.loss.backward()
    assert_gradients_are_equal(config, theirs, model)

    folder = tmp_path / "ours"
    auto = AutoModelForMaskedLM if generates else AutoModelForPreTraining
    again = exported(auto, config, model, folder)
    assert type(again) is kind
    assert load(electra.Config, folder)[0] == config


@pytest.mark.parametrize("share", [True, False])
def test_the_loss_is_that_of_the_paper(share: bool) -> None:
    """Generator, samples and discriminator by two models of transformers."""
    ours = replace(CONFIG, share_embeddings=share).build().eval()
    randomized(ours)
    objective, arrays, batch = rows()
    totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
    loss = objective.loss(ours, batch, totals)

    own = parameters(ours)
    small = ours.config.generator
    theirs = {}
    for name, config, kind in (
        ("generator", small, ElectraForMaskedLM),
        ("discriminator", CONFIG, ElectraForPreTraining),
    ):
        table = own
        if name == "generator":
            table = {n: own.get(f"generator.{n}", own.get(n)) for n in small.build().state_dict()}
        model = kind(ElectraConfig(**codec_of(config).to_huggingface())).eval()
        report = model.load_state_dict(codec_of(config).export_tensors(table), strict=False)
        assert not report.unexpected_keys
        theirs[name] = model
    theirs["generator"].tie_weights()
    mask = batch["segments"][:, None, :, None] == batch["segments"][:, None, None, :]
    common = {"attention_mask": mask, "position_ids": batch["positions"].long()}
    generated = theirs["generator"](input_ids=batch["tokens"], **common).logits
    used = batch["weights"] > 0
    row = used.nonzero()[:, 0]
    at = batch["predicted"][used]
    mlm = F.cross_entropy(generated[row, at], batch["labels"][used])
    drawn = sample(
        generated.gather(1, batch["predicted"][..., None].expand(-1, -1, 100)),
        batch["sample_key"],
        batch["predicted"],
    )
    tokens = batch["tokens"].clone()
    tokens[row, at] = drawn[used].to(tokens.dtype)
    original = batch["tokens"].clone()
    original[row, at] = batch["labels"][used].to(tokens.dtype)
    logits = theirs["discriminator"](input_ids=tokens, **common).logits
    real = batch["real_weights"] > 0
    rtd = F.binary_cross_entropy_with_logits(logits[real], (tokens != original).float()[real])
    torch.testing.assert_close(loss.total, mlm + 50 * rtd, rtol=1e-5, atol=1e-4)
    means = {name: (total / count).item() for name, (total, count) in loss.metrics.items()}
    assert means["loss"] == pytest.approx(loss.total.item(), rel=1e-6)
    assert means["replaced"] == pytest.approx(
        ((drawn != batch["labels"])[used]).float().mean().item()
    )
    assert 0.5 < means["replaced"] <= 1
    agree = ((logits > 0) == (tokens != original))[real]
    assert means["rtd_accuracy"] == pytest.approx(agree.float().mean().item(), abs=1e-6)
    loss.total.backward()
    assert all(p.grad is not None for p in ours.parameters())


@pytest.mark.parametrize("masked_only", [True, False])
def test_the_losses_of_the_paper_s_other_variants(masked_only: bool) -> None:
    """Replace MLM and All-Tokens MLM, position by position from the probabilities."""
    head: electra.MainHead = "tokens" if masked_only else "tokens_or_copy"
    model: Any = replace(CONFIG, main_head=head).build().eval()
    randomized(model)
    objective = replaced_mlm.Config(masked_only=masked_only).build(VOCABULARY)
    arrays = objective.collate(examples(6), 64)
    batch = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
    loss = objective.loss(model, batch, totals)

    common = {name: batch[name] for name in ("segments", "positions")}
    (generated,) = outputs(model, "tokens", tokens=batch["tokens"], **common)
    drawn = sample(
        generated.gather(1, batch["predicted"][..., None].expand(-1, -1, 100)),
        batch["sample_key"],
        batch["predicted"],
    )
    read, original = batch["tokens"].clone(), batch["tokens"].clone()
    masked = torch.zeros_like(read, dtype=torch.bool)
    mlm = []
    for row, entry in (batch["weights"] > 0).nonzero().tolist():
        at, label = batch["predicted"][row, entry], batch["labels"][row, entry]
        read[row, at], original[row, at], masked[row, at] = drawn[row, entry], label, True
        mlm.append(-generated[row, at].log_softmax(-1)[label])
    names = ["original"] if masked_only else ["original", "copied"]
    found = outputs(model, *names, tokens=read, **common)
    probabilities = found[0].softmax(-1)
    main = []
    for row, at in (masked if masked_only else batch["real_weights"] > 0).nonzero().tolist():
        token = original[row, at]
        probability = probabilities[row, at, token]
        if not masked_only:
            copies = found[1][row, at].sigmoid()
            probability = copies * (read[row, at] == token) + (1 - copies) * probability
        main.append(-probability.log())
    expected = torch.stack(mlm).mean() + torch.stack(main).mean()
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_masked_tokens_alone_count_in_electra_15() -> None:
    """The loss of the discriminator is a mean over the masked positions."""
    model = CONFIG.build().eval()
    randomized(model)
    _, _, batch = rows()
    objective = replaced_tokens.Config(masked_only=True).build(VOCABULARY)
    arrays = objective.collate(examples(6), 64)
    assert objective.weights(arrays)["rtd"] == objective.weights(arrays)["mlm"]
    at = batch["predicted"].long()
    expected = torch.zeros_like(batch["real_weights"]).scatter(1, at, batch["weights"])
    np.testing.assert_array_equal(arrays["real_weights"], expected)


def test_two_stages_start_both_models_from_a_generator() -> None:
    """The discriminator's own head is new."""
    first = replace(CONFIG, generator_divisor=0, masked_lm=True)
    second = replace(CONFIG, generator_divisor=1, share_embeddings=False)
    shapes = {name: tuple(each.shape) for name, each in first.build().named_parameters()}
    model = second.build()
    start = model.start_from(Stored(first, shapes))
    for name, parameter in model.named_parameters():
        source = start.sources[name]
        if name.startswith("head."):
            assert source is None
        else:
            assert source == name.removeprefix("generator.")
            assert shapes[source] == parameter.shape
    assert start.unused >= {name for name in shapes if name.startswith("head.")} - set(
        start.sources.values()
    )


def test_the_discriminator_reads_tokens_as_they_are_without_the_generator() -> None:
    model = CONFIG.build().eval()
    randomized(model)
    _, _, batch = rows()
    (alone,) = outputs(model, "replaced", **inputs(batch))
    without = replace(CONFIG, generator_divisor=0).build().eval()
    fill(without, {n: v for n, v in parameters(model).items() if not n.startswith("generator.")})
    assert torch.equal(alone, outputs(without, "replaced", **inputs(batch))[0])


def test_samples_depend_on_key_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, 6, generator=generator)
    keys = torch.arange(4000, dtype=torch.int32)
    positions = torch.arange(10).expand(4000, -1)
    found = sample(logits.expand(4000, 10, 6), keys, positions)
    share = torch.bincount(found.flatten(), minlength=6) / found.numel()
    torch.testing.assert_close(share, logits[0, 0].softmax(-1), rtol=0, atol=0.01)
    part = sample(logits.expand(7, 3, 6), keys[5:12], positions[:7, 4:7])
    assert torch.equal(part, found[5:12, 4:7])
    # Neighboring keys and positions are independent.
    equal = (found[:, 1:] == found[:, :-1]).float().mean()
    assert equal == pytest.approx(float((share**2).sum()), abs=0.01)


@pytest.mark.parametrize("divisor", [0, 2])
def test_the_head_of_a_gated_model_has_no_gate(divisor: int) -> None:
    """As heads for tokens: dense, GELU, and one number for each position."""
    config = replace(CONFIG, activation="geglu", generator_divisor=divisor)
    model: Any = config.build().eval()
    randomized(model)
    given = {"tokens": torch.arange(5, 17)[None], "positions": torch.arange(12)[None]}
    hidden, logits = outputs(model, "hidden", "replaced", **given)
    expected = model.head.out(F.gelu(model.head.dense(hidden)))[..., 0]
    torch.testing.assert_close(logits, expected)


def test_released_sizes() -> None:
    """13.5M and 109.5M parameters, which the paper calls 14M and 110M (table 6)."""
    base = {"width": 768, "heads": 12, "ffn_width": 3072, "embedding_width": 768}
    for settings, count in (({}, 13_549_057), (base, 109_483_009)):
        with torch.device("meta"):
            model = electra.Config(**settings).build()
        assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generator_divisor": 3}, "generator_divisor 3 does not divide heads 4"),
        ({"generator_divisor": -1}, "generator_divisor is -1"),
        ({"generator_divisor": 4, "masked_lm": True}, "masked_lm makes this model a generator"),
        ({"embedding_width": 0}, "embedding_width is 0"),
        ({"nsp": True}, "nsp is set, but ELECTRA has no such head"),
        ({"also_causal": True}, "also_causal is set, but ELECTRA has no such head"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        electra.Config(**settings)

"""DeBERTa v3's pre-training, step by step from two models of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model

from samestep.errors import ConfigError
from tests.outputs import parameters
from tests.parity.pairs import exported
from tests.parity.test_electra import randomized
from tests.unit.objectives.test_mlm_sbo import VOCABULARY, examples
from trainer.models import Stored
from trainer.models.codecs import codec_of
from trainer.models.families import deberta_v2, deberta_v3
from trainer.models.inputs import Inputs
from trainer.models.sampling import sample
from trainer.objectives.kinds import replaced_tokens

CONFIG = deberta_v3.Config(
    vocab_size=100,
    layers=4,
    width=48,
    heads=4,
    ffn_width=96,
    max_positions=64,
    position_buckets=8,
    generator_layers=2,
)
TABLE = "embeddings.tokens.weight"


def whole_model() -> Any:
    model = CONFIG.build().eval()
    randomized(model)
    return model


def transformer_of(kind: Any, config: Any, values: dict[str, torch.Tensor]) -> Any:
    model = kind(DebertaV2Config(**codec_of(config).to_huggingface())).eval()
    tensors = codec_of(config).export_tensors(values)
    if kind is DebertaV2Model:
        tensors = {name.removeprefix("deberta."): each for name, each in tensors.items()}
    report = model.load_state_dict(tensors, strict=False)
    assert not report.unexpected_keys
    return model


def encoded(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The last hidden states. The model's own forward pass takes no mask of packed sequences."""
    return model.encoder(model.embeddings(input_ids=tokens), mask).last_hidden_state


def test_loss_and_gradients_are_those_of_the_paper() -> None:
    """The generator's table gets no gradient of the discriminator, whose own table gets it all."""
    ours = whole_model()
    objective = replaced_tokens.Config().build(VOCABULARY)
    arrays = objective.collate(examples(6), 64)
    batch = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
    loss = objective.loss(ours, batch, totals)
    loss.total.backward()

    own = parameters(ours)
    inner = {n.removeprefix("generator."): own[n] for n in own if n.startswith("generator.")}
    generator = transformer_of(DebertaV2ForMaskedLM, CONFIG.generator, inner)
    generator.tie_weights()
    discriminator = transformer_of(DebertaV2Model, CONFIG, own)
    mask = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    generated = generator.cls(encoded(generator.deberta, batch["tokens"], mask))
    used = batch["weights"] > 0
    row, at = used.nonzero()[:, 0], batch["predicted"][used]
    mlm = F.cross_entropy(generated[row, at], batch["labels"][used])
    scores = generated.gather(1, batch["predicted"][..., None].expand(-1, -1, 100))
    drawn = sample(scores, batch["sample_key"], batch["predicted"])
    tokens, original = batch["tokens"].clone(), batch["tokens"].clone()
    tokens[row, at] = drawn[used].to(tokens.dtype)
    original[row, at] = batch["labels"][used].to(tokens.dtype)
    hidden = encoded(discriminator, tokens, mask)
    names = [name for name in own if name.startswith("head.")]
    head = {name: own[name].detach().clone().requires_grad_() for name in names}
    logits = F.gelu(F.linear(hidden, head["head.dense.weight"], head["head.dense.bias"]))
    logits = F.linear(logits, head["head.out.weight"], head["head.out.bias"])[..., 0]
    real = batch["real_weights"] > 0
    rtd = F.binary_cross_entropy_with_logits(logits[real], (tokens != original).float()[real])
    torch.testing.assert_close(loss.total, mlm + 50 * rtd, rtol=1e-5, atol=1e-4)

    (mlm + 50 * rtd).backward()
    found = {name: each.grad for name, each in ours.named_parameters()}
    for model, config, prefix in (
        (generator, CONFIG.generator, "generator."),
        (discriminator, replace(CONFIG, generator_layers=0), ""),
    ):
        gradients = {name: each.grad for name, each in model.named_parameters()}
        if model is discriminator:
            gradients = {f"deberta.{name}": each for name, each in gradients.items()}
            gradients |= {f"mask_predictions.{name}": each.grad for name, each in head.items()}
        expected = codec_of(config).import_tensors(gradients)
        actual = {name: found[f"{prefix}{name}"] for name in expected}
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert all(each is not None for each in found.values())


def test_the_discriminator_begins_with_the_generator_s_embeddings() -> None:
    model = CONFIG.build()
    values = model.initial_values(TABLE, 0, 4800, seed=0)
    assert not values.any()
    assert model.initial_values(f"generator.{TABLE}", 0, 4800, seed=0).std() > 0.01


def test_exports_have_one_table(tmp_path: Path) -> None:
    model = whole_model()
    tokens = torch.randint(5, 100, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = model(Inputs(tokens), frozenset({"hidden"}))["hidden"]
    again = exported(AutoModel, CONFIG, model, tmp_path / "hf")
    found = again(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_task_starts_from_the_sum_of_both_tables() -> None:
    shapes = {name: tuple(each.shape) for name, each in CONFIG.build().named_parameters()}
    task = replace(CONFIG, head="classification", labels=("a", "b")).build()
    start = task.start_from(Stored(CONFIG, shapes))
    assert start.added == {TABLE: f"generator.{TABLE}"}
    assert f"generator.{TABLE}" in start.unused
    assert CONFIG.build().start_from(Stored(CONFIG, shapes)).added == {}


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"generator_layers": -1}, "generator_layers is -1. Use half of layers, as 2"),
        ({"generator_layers": 0, "mask_decoder": True}, "Set generator_layers to 2, or mask"),
        ({"generator_layers": 2, "nsp": True}, "DeBERTa has no such head"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        replace(CONFIG, **settings)


def test_the_generator_has_the_enhanced_mask_decoder() -> None:
    model: Any = replace(CONFIG, mask_decoder=True).build()
    assert model.generator.decoder_positions is not None
    assert model.decoder_positions is None
    assert isinstance(CONFIG.generator, deberta_v2.Config)

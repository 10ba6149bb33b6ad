"""ModernBERT against its classes in transformers, packed and long rows, and bad settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import ModernBertConfig

from samestep.errors import ConfigError
from tests.outputs import fill, predict
from tests.parity.heads import TASKS, names_of
from tests.parity.pairs import assert_gradients_are_equal, exported, load, padded_rows, saved
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import modernbert
from trainer.objectives.kinds import mlm

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
LENGTHS = (40, 23, 1)


def make(folder: Path, ending: str = "MaskedLM", **changes: Any) -> tuple[Any, Any, Any]:
    """A random model of transformers, saved in the folder, and ours imported from it."""
    auto = getattr(transformers, f"AutoModelFor{ending}")
    config = ModernBertConfig(**{**SHAPE, **changes})
    theirs = auto.from_config(config, attn_implementation="eager").eval()
    return saved(theirs, folder, 0.1), *load(modernbert.Config, folder)


def rows(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    return padded_rows(*lengths)


@pytest.mark.parametrize(("tied", "activation"), [(True, "gelu"), (False, "silu")])
def test_logits_loss_and_gradients_are_equal(tied: bool, activation: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": tied, "hidden_activation": activation}
    theirs, config, model = make(tmp_path, **changes)
    assert (config.local_window, config.global_every, config.tied) == (8, 3, tied)
    batch = rows()
    real = batch["segments"].bool()
    labels = torch.where(real, batch["tokens"], -100)
    found = theirs(input_ids=batch["tokens"], attention_mask=batch["segments"], labels=labels)
    logits = predict(model, **batch)
    torch.testing.assert_close(logits[real], found.logits[real], rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(logits[real], labels[real])
    torch.testing.assert_close(loss, found.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    found.loss.backward()
    assert_gradients_are_equal(config, theirs, model)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_export(tied: bool, tmp_path: Path) -> None:
    theirs, config, model = make(tmp_path / "theirs", tie_word_embeddings=tied)
    config = replace(config, global_theta=50_000.0)
    model = config.build().eval()
    fill(model, codec_of(config).import_tensors(dict(theirs.named_parameters())))
    again = exported(transformers.AutoModelForMaskedLM, config, model, tmp_path / "ours")
    batch = rows()
    real = batch["segments"].bool()
    found = again.eval()(input_ids=batch["tokens"], attention_mask=batch["segments"]).logits
    torch.testing.assert_close(predict(model, **batch)[real], found[real], rtol=1e-5, atol=1e-5)
    assert load(modernbert.Config, tmp_path / "ours")[0] == config


@pytest.mark.parametrize("task", TASKS)
def test_heads_of_tasks(task: str, tmp_path: Path) -> None:
    head, ending, labels = TASKS[task]
    theirs, config, model = make(tmp_path / "theirs", ending, **names_of(labels))
    assert (config.head, config.labels) == (head, labels)
    batch = rows((20, 20, 20, 20))
    shape = (2, 2, 20) if head == "multiple_choice" else (4, 20)
    found = theirs(
        input_ids=batch["tokens"].view(shape), attention_mask=batch["segments"].view(shape)
    )
    pooled = head in ("classification", "multiple_choice")
    first = torch.zeros(4, 1, dtype=torch.int64)
    logits = predict(model, **batch, predicted=first if pooled else None)
    if head == "question_answering":
        expected = torch.stack([found.start_logits, found.end_logits], -1)
    else:
        expected = found.logits
    logits = logits.view(expected.shape)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_gradients_are_equal(config, theirs, model)
    auto = getattr(transformers, f"AutoModelFor{ending}")
    again = exported(auto, config, model, tmp_path / "ours")
    assert type(again) is type(theirs)
    assert load(modernbert.Config, tmp_path / "ours")[0] == config


def test_packed_sequences_get_the_logits_they_get_alone(tmp_path: Path) -> None:
    """Positions count from 0 in each, and windows end at their borders."""
    _, _, model = make(tmp_path)
    tokens = rows((30,))["tokens"][0]
    packed = {
        "tokens": torch.cat([tokens[:18], tokens[18:], torch.zeros(4, dtype=torch.int64)])[None],
        "segments": torch.tensor([[1] * 18 + [2] * 12 + [0] * 4]),
        "positions": torch.cat([torch.arange(18), torch.arange(12), torch.zeros(4).long()])[None],
    }
    found = predict(model, **packed)[0]
    for part in (slice(0, 18), slice(18, 30)):
        alone = predict(model, tokens=tokens[part][None])[0]
        torch.testing.assert_close(found[part], alone, rtol=1e-5, atol=1e-5)


def test_local_layers_see_their_window(tmp_path: Path) -> None:
    """With local layers alone, a token reaches window / 2 positions per layer."""
    config = modernbert.Config(
        vocab_size=50,
        layers=3,
        width=16,
        heads=2,
        ffn_width=16,
        local_window=4,
        global_every=9,
    )
    model = config.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        # The first layer is global: without its values, it adds nothing from other positions.
        model.layers[0].attention.out.weight.zero_()
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 10] = 40
    difference = (predict(model, tokens=tokens) - predict(model, tokens=changed)).abs().sum(-1)[0]
    reached = difference.nonzero().flatten().tolist()
    assert reached == list(range(6, 15))


def test_the_released_size_and_groups_of_layers() -> None:
    """149M parameters (table 4)."""
    with torch.device("meta"):
        model = modernbert.Config().build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 149_655_232
    groups = [(group.start, group.stop) for group in model.scan_groups()]
    assert groups[:4] == [(0, 1), (1, 3), (3, 4), (4, 6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_window": 0}, "local_window is 0"),
        ({"global_every": 0}, "global_every is 0"),
        ({"type_vocab": 2}, "type_vocab is 2, but ModernBERT has none"),
        ({"norm": "post"}, "ModernBERT has norm pre and geglu"),
        ({"width": 36, "heads": 12}, "rotary positions need an even number"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        modernbert.Config(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias True"),
        (
            {
                "architectures": ["ModernBertForSequenceClassification"],
                "classifier_pooling": "mean",
            },
            "classifier_pooling 'mean', but a classification head needs 'cls'",
        ),
        ({"embedding_dropout": 0.1}, "embedding_dropout 0.1"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"]},
            None,
        ),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], message: str | None) -> None:
    tree = {**ModernBertConfig(**SHAPE).to_dict(), **change}
    with pytest.raises(ConfigError, match=message or "do not repeat"):
        read_config(modernbert.Config, tree)


def test_the_released_settings_are_accepted() -> None:
    """Pooling of a head that is not there; and no base of local layers: the global one."""
    released = {
        **ModernBertConfig(**SHAPE).to_dict(),
        "architectures": ["ModernBertForMaskedLM"],
        "classifier_pooling": "mean",
        "rope_parameters": None,
        "global_rope_theta": 80_000.0,
        "local_rope_theta": None,
    }
    config = read_config(modernbert.Config, released)
    assert (config.head, config.local_theta) == ("language_model", 80_000.0)


def test_objectives_accept_it() -> None:
    assert mlm.Config(mask_fraction=0.3).mask_fraction == 0.3

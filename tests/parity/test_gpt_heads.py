"""GPT-1 and GPT-2 as classifiers against `transformers`, in both directions, and beside that as
language models.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, OpenAIGPTConfig, PreTrainedModel

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import outputs, predict
from tests.parity.pairs import assert_gradients_are_equal, saved
from tests.unit.objectives.test_decoder_rows import GPT1, PAIRS
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import gpt2, openai_gpt
from trainer.models.transformer import Transformer
from trainer.objectives.kinds import classification
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import load_weights

SHAPE = {
    "vocab_size": 300,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, str]] = {
    "gpt2": (GPT2Config(**SHAPE, n_inner=80), "GPT2"),
    "openai-gpt": (OpenAIGPTConfig(**SHAPE), "OpenAIGPT"),
}
LABELS = {"classification": ("no", "maybe", "yes"), "regression": ("similarity",)}


@dataclass
class Pair:
    """A random model of `transformers`, and ours imported from the folder that it saved."""

    reference: PreTrainedModel
    config: gpt2.Config
    model: Transformer


def make(family: str, task: str, folder: Path) -> Pair:
    config, name = FAMILIES[family]
    labels = LABELS[task]
    config = type(config).from_dict(
        {
            **config.to_dict(),
            "id2label": dict(enumerate(labels)),
            "label2id": {n: i for i, n in enumerate(labels)},
        }
    )
    reference = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    saved(reference, folder)
    weights = load_weights(folder)
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    return Pair(reference, weights.config, model)


@pytest.fixture(params=[(family, task) for family in FAMILIES for task in LABELS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make(*request.param, tmp_path / "reference")


def rows(*lengths: int) -> dict[str, Tensor]:
    """Texts of these lengths, each with the token that ends it, padded to 24 positions.

    The last of them is read.
    """
    generator = torch.Generator().manual_seed(1)
    places, length = torch.arange(24).expand(len(lengths), -1), torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, 300, places.shape, generator=generator)
    tokens[places == length] = 2
    real = places <= length
    return {
        "tokens": tokens * real,
        "segments": real.int(),
        "positions": places * real,
        "predicted": length,
    }


def test_logits_loss_and_gradients_are_equal(pair: Pair):
    batch = rows(23, 1, 9, 17)
    inputs = {"input_ids": batch["tokens"], "attention_mask": batch["segments"]}
    ours = predict(pair.model, **batch)[:, 0]
    torch.testing.assert_close(ours, pair.reference(**inputs).logits, rtol=1e-5, atol=1e-5)
    if len(pair.config.labels) == 1:
        labels = torch.linspace(-1, 3, 4)
        loss = F.mse_loss(ours[:, 0], labels)
    else:
        labels = torch.tensor([0, 2, 1, 2])
        loss = F.cross_entropy(ours, labels)
    theirs = pair.reference(**inputs, labels=labels).loss
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-5)
    loss.backward()
    theirs.backward()
    assert_gradients_are_equal(pair.config, pair.reference, pair.model)


def test_transformers_loads_what_we_export(pair: Pair, tmp_path: Path):
    exported = codec_of(pair.config).export_tensors(pair.model.state_dict())
    save_folder(
        tmp_path / "ours", {**codec_of(pair.config).to_huggingface(), "pad_token_id": 0}, exported
    )
    auto = transformers.AutoModelForSequenceClassification
    theirs, report = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs) is type(pair.reference)
    assert tuple(theirs.config.id2label.values()) == pair.config.labels
    assert theirs.config.problem_type == ("regression" if len(pair.config.labels) == 1 else None)
    batch = rows(23, 1, 9, 17)
    logits = theirs.eval()(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(predict(pair.model, **batch)[:, 0], logits, rtol=1e-5, atol=1e-5)
    tree, tensors = load_folder(tmp_path / "ours")
    assert read_config(type(pair.config), tree, tensors) == pair.config
    without = [name for name in tensors if name != "score.weight"]
    with pytest.raises(CheckpointError, match="names a model with score, which the weights lack"):
        read_config(type(pair.config), tree, without)


SMALL = {
    "vocab_size": 100,
    "layers": 2,
    "width": 32,
    "heads": 4,
    "ffn_width": 48,
    "max_positions": 24,
}
each_family = pytest.mark.parametrize(
    "family", [gpt2.Config, openai_gpt.Config], ids=["gpt2", "openai_gpt"]
)


def built(config: gpt2.Config) -> Transformer:
    model = config.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_values(name, 0, parameter.numel(), 0).view_as(parameter))
    return model


@each_family
def test_the_language_model_beside_a_classifier_is_that_without(family: type[gpt2.Config]):
    """Without a parameter of its own, and with dropout as it would have been.

    So is the classifier.
    """
    before = family(**SMALL, dropout=0.3)
    model = built(replace(before, head="classification", labels=LABELS["classification"]))
    alone = built(before)
    assert {name for name, _ in model.named_parameters()} == {
        "head.classifier.weight",
        *(name for name, _ in alone.named_parameters()),
    }
    batch = rows(23, 1, 9, 17)
    batch = {
        **batch,
        "tokens": batch["tokens"] % 100,
        "dropout_key": torch.tensor([5, -6, 7, 8], dtype=torch.int32),
    }
    logits, tokens = outputs(model, "classification", "next_tokens", **batch)
    torch.testing.assert_close(logits, predict(model, **batch))
    torch.testing.assert_close(tokens, predict(alone, **{**batch, "predicted": None})[:, :-1])
    for row in range(4):
        own = {name: values[row : row + 1] for name, values in batch.items()}
        of_row = outputs(model, "classification", "next_tokens", **own)
        torch.testing.assert_close(
            of_row, (logits[row : row + 1], tokens[row : row + 1]), rtol=1e-5, atol=1e-6
        )
    assert (
        (predict(model, **{**batch, "dropout_key": batch["dropout_key"] + 1}) != logits)
        .any(-1)
        .all()
    )


@each_family
def test_the_auxiliary_loss_is_added(family: type[gpt2.Config]):
    """Radford et al. 2018, equation 5, each loss with its own denominator."""
    model = built(family(**SMALL, head="classification", labels=LABELS["classification"]))
    objective = classification.Config(lm_weight=0.5).build(GPT1)
    arrays = objective.collate(PAIRS, 8)
    batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    totals = {name: torch.tensor(weight) for name, weight in objective.weights(batch).items()}
    loss = objective.loss(model, batch, totals)
    places = {name: batch[name] for name in ("tokens", "segments", "positions")}
    of_classes = F.cross_entropy(
        predict(model, **places, predicted=batch["predicted"])[:, 0], batch["labels"]
    )
    alone = predict(built(family(**SMALL)), **places)[:, :-1]
    real = batch["segments"][:, 1:] > 0
    of_tokens = F.cross_entropy(alone[real], batch["tokens"][:, 1:][real].long())
    torch.testing.assert_close(loss.total, of_classes + 0.5 * of_tokens)
    for name, expected in {
        "loss": loss.total,
        "class_loss": of_classes,
        "lm_loss": of_tokens,
    }.items():
        total, weight = loss.metrics[name]
        torch.testing.assert_close(total / weight, expected.detach())
    assert loss.outputs is not None
    assert loss.outputs.shape == (3, 3)


def test_the_work_is_that_of_the_products():
    model = built(gpt2.Config(**SMALL, head="classification", labels=LABELS["classification"]))
    batch = rows(23, 23)
    with FlopCounterMode(display=False) as counter:
        predict(
            model,
            **{**batch, "tokens": batch["tokens"] % 100},
            dropout_key=torch.zeros(2, dtype=torch.int32),
        )
    assert 24 * model.flops_per_token(24, 1 / 24) == pytest.approx(
        3 * counter.get_total_flops() / 2
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"head": "tagging", "labels": ("O", "B")},
            "head is tagging, but this kind of model supports only class",
        ),
        (
            {"head": "classification"},
            "labels has 0 names, but a classification head needs at least 1",
        ),
        ({"labels": ("a",)}, "but a language_model head has none"),
    ],
)
def test_settings_that_do_not_go_with_the_head_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        openai_gpt.Config(**SMALL, **settings)


def test_what_transformers_lacks_is_not_exported():
    with pytest.raises(
        ConfigError, match="a multiple_choice head cannot be exported: transformers' gpt2 has none"
    ):
        codec_of(gpt2.Config(**SMALL, head="multiple_choice")).to_huggingface()


@each_family
def test_a_pretrained_model_gets_a_head(
    family: type[gpt2.Config], dataset_folder: Path, tmp_path: Path
):
    before = family(**{**SMALL, "vocab_size": 600, "ffn_width": 128})
    tensors = codec_of(before).export_tensors(built(before).state_dict())
    save_folder(
        tmp_path / "saved", codec_of(before).to_huggingface(), tensors, dataset_folder / "tokenizer"
    )
    weights, tokenizer = (
        load_weights(tmp_path / "saved"),
        Tokenizer.load(dataset_folder / "tokenizer"),
    )
    model = replace(before, head="classification", labels=LABELS["classification"]).build()
    given = stored_values(weights, model, SimpleNamespace(name="rows", tokenizer=tokenizer), seed=0)
    for name, parameter in model.named_parameters():
        drawn = name == "head.classifier.weight"
        expected = (
            model.initial_values(name, 0, 96, 0) if drawn else weights.tensors[name].flatten()
        )
        assert torch.equal(given(name, 0, parameter.numel()), expected)

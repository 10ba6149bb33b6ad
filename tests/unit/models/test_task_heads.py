"""Heads for tasks: their settings, dropout and work, and what they start from."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import predict
from trainer.checkpoint.huggingface import save_folder
from trainer.inference.fill import fill
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import bart, bert, gpt2, roberta, t5
from trainer.models.heads import TokenHead
from trainer.models.transformer import Transformer
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights, load_weights

Build = Callable[..., Transformer]
Batch = dict[str, Tensor]

CLASSES = ("no", "maybe", "yes")
HEADS = {
    "classification": {"head": "classification", "labels": CLASSES},
    "regression": {"head": "classification", "labels": ("similarity",)},
    "multiple_choice": {"head": "multiple_choice"},
    "tagging": {"head": "tagging", "labels": ("O", "B", "I")},
    "question_answering": {"head": "question_answering"},
}
FAMILIES = {"bert": bert.Config, "roberta": roberta.Config}


@pytest.mark.parametrize("schema", [bert.Config, gpt2.Config, bart.Config, t5.Config])
def test_classifiers_of_another_kind_are_not_imported(schema: Any) -> None:
    """Several labels for a text, or several numbers, would all become one softmax."""
    tree = codec_of(schema(head="classification", labels=CLASSES)).to_huggingface()
    assert read_config(schema, tree).labels == CLASSES
    single = {**tree, "problem_type": "single_label_classification"}
    assert read_config(schema, single).labels == CLASSES
    for kind, meaning in (
        ("multi_label_classification", "several labels for a text"),
        ("regression", "3 numbers for a text"),
    ):
        with pytest.raises(ConfigError, match=f"problem_type '{kind}', which is {meaning}"):
            read_config(schema, {**tree, "problem_type": kind})
    one = codec_of(schema(head="classification", labels=("similarity",))).to_huggingface()
    assert one["problem_type"] == "regression"
    assert read_config(schema, one).labels == ("similarity",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"head": "classification"},
            "labels has 0 names, but a classification head needs at least 1",
        ),
        (
            {"head": "tagging", "labels": ("O",)},
            "labels has 1 names, but a tagging head needs at least 2",
        ),
        (
            {"labels": ("a", "b")},
            r"labels is \['a', 'b'\], but a language_model head has none. Leave labels empty",
        ),
        ({"head": "multiple_choice", "labels": ("a",)}, "but a multiple_choice head has none"),
        (
            {"head": "question_answering", "labels": ("a",)},
            "but a question_answering head has none",
        ),
        (
            {"head": "classification", "labels": ("a", "b", "a")},
            "labels has 'a' 2 times",
        ),
        (
            {"head": "question_answering", "nsp": True},
            "nsp needs a language-model head, but head is question_answering. Set nsp to false",
        ),
        (
            {"head": "multiple_choice", "causal": True},
            "causal is true, but a multiple_choice head pools the first position, which sees no "
            "other. Set causal to false",
        ),
    ],
)
def test_settings_that_do_not_go_with_the_head_are_refused(
    config: bert.Config, change: dict, message: str
):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **change)


def positions(head: dict[str, object], batch: Batch) -> Tensor | None:
    """What the objectives of these heads read: the first position, or all."""
    return (
        None
        if head["head"] in ("tagging", "question_answering")
        else torch.zeros(len(batch["tokens"]), 1, dtype=torch.int64)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_row_is_scored_in_the_same_way_beside_any_others(
    config: bert.Config, build: Build, batch: Batch, family: str, head: dict[str, object]
):
    """In training mode, where dropout masks are those of the row's key."""
    changed = {**dataclasses.asdict(config), **head, "type_vocab": 2}
    model = build(FAMILIES[family](**changed))
    batch = {**batch, "predicted": positions(head, batch)}
    together = predict(model, **batch)
    classes = {"multiple_choice": 1, "question_answering": 2}.get(
        str(head["head"]), len(model.config.labels)
    )
    assert together.shape == (4, 20 if batch["predicted"] is None else 1, classes)
    for row in range(4):
        alone = {
            name: None if values is None else values[row : row + 1]
            for name, values in batch.items()
        }
        torch.testing.assert_close(
            predict(model, **alone), together[row : row + 1], rtol=1e-5, atol=1e-6
        )
    other = predict(model, **{**batch, "dropout_key": batch["dropout_key"] + 1})
    assert (other != together).any(-1).all()
    assert torch.equal(
        predict(model.eval(), **batch), predict(model, **{**batch, "dropout_key": None})
    )


@pytest.mark.parametrize(
    ("family", "name", "places"),
    [
        ("bert", "classification", (False, True)),
        ("roberta", "classification", (True, True)),
        ("roberta", "multiple_choice", (False, True)),
        ("bert", "tagging", (True,)),
        ("roberta", "question_answering", (False,)),
    ],
)
def test_dropout_is_where_transformers_has_it(
    config: bert.Config,
    build: Build,
    batch: Batch,
    family: str,
    name: str,
    places: tuple[bool, ...],
):
    """Before each linear layer of the head, or not.

    With masks of their own, and keys that no layer has.
    """
    head, seen, keys = HEADS[name], [], []
    model = build(FAMILIES[family](**{**dataclasses.asdict(config), **head, "dropout": 0.5}))
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: keys.append(inputs[3].keys.flatten()))
    model.head.register_forward_pre_hook(lambda _, inputs: keys.append(inputs[2]))
    for linear in model.head.children():
        linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] == 0))
    predict(model, **{**batch, "predicted": positions(head, batch)})
    assert [bool(0.4 < zeros.float().mean() < 0.6) for zeros in seen] == list(places)
    assert torch.cat(keys).unique().numel() == torch.cat(keys).numel() == 4 * (2 * 3 + 1)
    if len(seen) == 2:
        assert not torch.equal(*seen)
    assert isinstance(model.head, TokenHead) == (len(places) == 1)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_the_work_is_that_of_the_products(
    config: bert.Config, build: Build, batch: Batch, head: dict[str, object]
):
    model = build(dataclasses.replace(config, **head))  # its attention is written out, for dropout
    with FlopCounterMode(display=False) as counter:
        predict(model, **{**batch, "predicted": positions(head, batch)})
    read = 20 if head["head"] in ("tagging", "question_answering") else 1
    assert 20 * model.flops_per_token(20, read / 20) == pytest.approx(
        3 * counter.get_total_flops() / 4
    )
    weights = {
        name: value.numel()
        for name, value in model.head.named_parameters()
        if name.endswith("weight")
    }
    assert model.head_flops() == 6 * sum(weights.values()) < 6 * 97 * 32


@pytest.fixture(scope="module")
def dataset(dataset_folder: Path) -> AnyDataset:
    return DataConfig(str(dataset_folder), sequence_length=16).open()


Start = Callable[..., tuple[Weights, Transformer]]


@pytest.fixture
def start(config: bert.Config, build: Build, dataset_folder: Path, tmp_path: Path) -> Start:
    """Saves a model as weights, and makes another one, on the meta device, that may start from
    them.
    """

    def start(saved: dict[str, object], **wanted: object) -> tuple[Weights, Transformer]:
        known = dataclasses.replace(config, vocab_size=600)
        before, after = dataclasses.replace(known, **saved), dataclasses.replace(known, **wanted)
        model = build(before, seed=7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)  # biases are not zero
        tensors = codec_of(before).export_tensors(model.state_dict())
        save_folder(
            tmp_path / "saved",
            codec_of(before).to_huggingface(),
            tensors,
            dataset_folder / "tokenizer",
        )
        weights = load_weights(tmp_path / "saved")
        assert weights.config == before
        with torch.device("meta"):
            return weights, after.build()

    return start


def values(
    weights: Weights, model: Transformer, dataset: AnyDataset, seed: int = 0
) -> dict[str, Tensor]:
    given = stored_values(weights, model, dataset, seed)
    return {
        name: given(name, 0, value.numel()).view(value.shape)
        for name, value in model.named_parameters()
    }


def equal(
    found: dict[str, Tensor], weights: Weights, prefix: str = "", of: str | None = None
) -> bool:
    names = [name for name in found if name.startswith(prefix)]
    places = {name: name if of is None else of + name.removeprefix(prefix) for name in names}
    return all(
        place in weights.tensors and torch.equal(found[n], weights.tensors[place])
        for n, place in places.items()
    )


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_pretrained_encoder_gets_a_head_drawn_by_the_seed(
    start: Start, dataset: AnyDataset, head: dict[str, object], caplog: pytest.LogCaptureFixture
):
    weights, model = start({}, **head)
    with caplog.at_level(logging.INFO):
        found = values(weights, model, dataset)
    own = [name for name in found if name.startswith("head.")]
    assert equal({name: value for name, value in found.items() if name not in own}, weights)
    assert caplog.messages == [
        f"left out, because model.head is {head['head']}: "
        + ", ".join(name for name in weights.tensors if name.startswith("head.")),
        "initialized at random: " + ", ".join(own),
    ]
    again, other = values(weights, model, dataset), values(weights, model, dataset, seed=1)
    for name in own:
        assert torch.equal(again[name], found[name])
        if name.endswith("bias"):
            assert not found[name].any()
        else:
            assert 0.01 < found[name].std() < 0.03
            assert (other[name] != found[name]).all()
    given, whole = (
        stored_values(weights, model, dataset, 0),
        found["head.classifier.weight"].flatten(),
    )
    assert torch.equal(
        torch.cat([given("head.classifier.weight", *part) for part in ((0, 5), (5, len(whole)))]),
        whole,
    )


def test_the_pooler_of_next_sentences_is_taken(
    start: Start, dataset: AnyDataset, caplog: pytest.LogCaptureFixture
):
    weights, model = start({"nsp": True}, **HEADS["multiple_choice"])
    with caplog.at_level(logging.INFO):
        found = values(weights, model, dataset)
    assert equal(found, weights, "head.pooler.", "nsp_head.pooler.")
    assert not found["head.classifier.bias"].any()
    assert "taken for the head: nsp_head.pooler.weight, nsp_head.pooler.bias" in caplog.messages
    assert "initialized at random: head.classifier.weight, head.classifier.bias" in caplog.messages
    assert "nsp_head.pooler" not in caplog.messages[0]


def test_a_tagger_needs_no_pooler(
    start: Start, dataset: AnyDataset, caplog: pytest.LogCaptureFixture
):
    weights, model = start({"nsp": True}, **HEADS["tagging"])
    with caplog.at_level(logging.INFO):
        values(weights, model, dataset)
    assert "nsp_head.pooler.weight, nsp_head.pooler.bias" in caplog.messages[0]
    assert caplog.messages[1:] == [
        "initialized at random: head.classifier.weight, head.classifier.bias"
    ]


def test_the_same_head_goes_on(start: Start, dataset: AnyDataset, caplog: pytest.LogCaptureFixture):
    weights, model = start(HEADS["classification"], **HEADS["classification"])
    with caplog.at_level(logging.INFO):
        assert equal(values(weights, model, dataset), weights)
    assert caplog.messages == []
    own = stored_values(weights, model, dataset)
    assert torch.equal(
        own("head.classifier.weight", 0, 96), weights.tensors["head.classifier.weight"].flatten()
    )


@pytest.mark.parametrize("labels", [("no", "yes"), ("yes", "maybe", "never")])
def test_other_labels_get_a_classifier_of_their_own(
    start: Start, dataset: AnyDataset, labels: tuple[str, ...]
):
    weights, model = start(HEADS["classification"], head="classification", labels=labels)
    found = values(weights, model, dataset)
    assert equal(found, weights, "head.pooler.")
    assert found["head.classifier.weight"].shape == (len(labels), 32)
    assert not found["head.classifier.bias"].any()


def test_a_head_of_another_task_is_not_taken_for_its_shape(start: Start, dataset: AnyDataset):
    weights, model = start({"head": "tagging", "labels": ("O", "B")}, **HEADS["question_answering"])
    found = values(weights, model, dataset)
    assert not found["head.classifier.bias"].any()
    assert equal(found, weights, "layers.")


@pytest.mark.parametrize(
    ("saved", "wanted", "first"),
    [
        (
            {},
            {**HEADS["question_answering"], "layers": 3},
            "12 parameters are missing.* 0 are unknown, first layers.2.",
        ),
        (
            {},
            {**HEADS["question_answering"], "layers": 1},
            "0 parameters are missing.* 12 are unknown, first layers.1.",
        ),
        ({}, {**HEADS["question_answering"], "width": 16}, "first embeddings.tokens.weight"),
        ({"tied": False}, {}, "1 are unknown, first head.decoder.weight"),
    ],
)
def test_nothing_else_is_drawn(
    start: Start,
    dataset: AnyDataset,
    saved: dict[str, object],
    wanted: dict[str, object],
    first: str,
):
    """Not the encoder, nor a matrix that the model has lost."""
    weights, model = start(saved, **wanted)
    with pytest.raises(CheckpointError, match=first):
        stored_values(weights, model, dataset, seed=0)


@pytest.mark.parametrize(
    ("saved", "wanted", "change"),
    [
        ({}, {"nsp": True}, "model.nsp: False -> True"),
        ({}, HEADS["question_answering"], "model.head: language_model -> question_answering"),
        ({"nsp": True}, HEADS["classification"], "model.nsp: True -> False"),
        (HEADS["classification"], HEADS["regression"], "model.labels: .* -> .'similarity'."),
        (HEADS["question_answering"], {}, "model.head: question_answering -> language_model"),
    ],
)
def test_a_run_takes_back_its_own_model_only(
    start: Start,
    dataset: AnyDataset,
    saved: dict[str, object],
    wanted: dict[str, object],
    change: str,
):
    """Nothing is initialized, and nothing is left out."""
    weights, model = start(saved, **wanted)
    with pytest.raises(ConfigError, match=change):
        stored_values(weights, model, dataset)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_model_for_a_task_fills_no_masks(start: Start, head: dict[str, object]):
    weights, _ = start(head)
    with pytest.raises(
        ConfigError,
        match=f"saved has the head {head['head']}, which predicts no tokens",
    ):
        fill(str(weights.folder), ["the [MASK]"], 1)

"""Our T5 with the heads of tasks against `transformers`, with random small models, in both
directions.
"""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import predict
from tests.parity import heads
from tests.parity.heads import (
    LENGTH,
    DecoderPair,
    assert_logits_are_equal,
    assert_losses_and_gradients_are_equal,
    assert_transformers_loads_what_we_export,
    load,
    names_of,
    text_pairs,
)
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.config import Head
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.families import t5
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights, load_weights

# Heads do not fill the width, and the stacks differ in depth.
SHAPE = {
    "vocab_size": 300,
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VERSIONS = {"v1.0": {}, "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}
TASKS = {task: each for task, each in heads.TASKS.items() if task != "multiple_choice"}
END = 1
PADDED, FULL = [(9, 9), (1, 1), (15, 3), (5, 12)], [(9, 13), (20, 2), (2, 20), (3, 19)]


def rows(lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
    return text_pairs(lengths, end=END, pad=0)


def make(version: str, task: str, folder: Path) -> DecoderPair:
    _, name, labels = TASKS[task]
    config = T5Config(**SHAPE, **VERSIONS[version], **names_of(labels))
    reference = getattr(transformers, f"T5For{name}")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            scale = 0.5 if "bias" in key else 0.1
            parameter.copy_(
                ("norm" in key) + scale * torch.randn(parameter.shape, generator=generator)
            )
    reference.save_pretrained(folder)
    return DecoderPair(task, reference, *load(t5.Config, folder))


@pytest.fixture(params=[(version, task) for version in VERSIONS for task in TASKS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderPair:
    return make(*request.param, tmp_path / "reference")


def test_logits_of_padded_batches_are_equal(pair: DecoderPair):
    assert_logits_are_equal(pair, rows(PADDED))


def test_losses_and_gradients_are_equal(pair: DecoderPair):
    batch = rows(FULL)  # transformers lets an answer begin in padding
    assert_losses_and_gradients_are_equal(pair, batch, ([0, 5, 23, 7], [0, 6, 23, 19]))


def test_transformers_loads_what_we_export(pair: DecoderPair, tmp_path: Path):
    theirs = assert_transformers_loads_what_we_export(pair, rows(PADDED), tmp_path / "ours")
    assert theirs.config.classifier_dropout == pair.config.dropout


def test_older_checkpoints_are_understood(tmp_path: Path):
    """The token embeddings up to three times, and a table that nothing reads."""
    pair = make("v1.0", "classification", tmp_path)
    tree, tensors = load_folder(tmp_path)
    shared = tensors["transformer.shared.weight"]
    old = {name: tensors[name] for name in tensors}
    old |= {f"transformer.{stack}.embed_tokens.weight": shared for stack in ("encoder", "decoder")}
    unread = "transformer.decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    imported = codec_of(pair.config).import_tensors(old | {unread: torch.zeros(32, 4)})
    assert all(
        torch.equal(imported[name], value) for name, value in pair.model.state_dict().items()
    )
    without = [name for name in tensors if "out_proj" not in name]
    with pytest.raises(CheckpointError, match=r"a model with classification_head\.out_proj, which"):
        read_config(t5.Config, tree, without)
    assert read_config(t5.Config, {**tree, "architectures": []}, without).head == "language_model"
    with pytest.raises(ConfigError, match="decoder_start_token_id 2"):
        read_config(t5.Config, {**tree, "decoder_start_token_id": 2})


def small(head: Head, labels: tuple[str, ...] = (), **changes: Any) -> t5.Config:
    shape = {
        "vocab_size": 300,
        "layers": 2,
        "width": 32,
        "heads": 4,
        "head_width": 12,
        "ffn_width": 48,
    }
    return t5.Config(**{**shape, **changes}, head=head, labels=labels)


def built(config: t5.Config) -> EncoderDecoder:
    model = config.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_values(name, 0, parameter.numel(), 0).view_as(parameter))
    return model


HEADS = [
    ("classification", ("a", "b", "c")),
    ("multiple_choice", ()),
    ("tagging", ("O", "B")),
    ("question_answering", ()),
]
each_head = pytest.mark.parametrize(("head", "labels"), HEADS, ids=[head for head, _ in HEADS])


def read(batch: dict[str, Tensor], head: Head) -> dict[str, Tensor | None]:
    """The batch with the positions that objectives of these heads read: the last one, or all."""
    last = batch["segments"].sum(1, keepdim=True) - 1
    return {**batch, "predicted": None if head in ("tagging", "question_answering") else last}


@each_head
def test_a_row_is_scored_in_the_same_way_beside_any_others(head: Head, labels: tuple[str, ...]):
    """In training mode, where dropout masks are those of the row's key.

    Dropout is where transformers has it.
    """
    model = built(small(head, labels, dropout=0.3))
    key = torch.tensor([5, -6, 2**31 - 1, -(2**31)], dtype=torch.int32)
    batch = {**read(rows(PADDED), head), "dropout_key": key}
    seen: list[Tensor] = []
    for linear in model.head.children():
        linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] == 0))
    together = predict(model, **batch)
    twice = 1 - 0.7**2  # after the last norm, and before the head
    dropped = {"tagging": [twice], "question_answering": [0.3]}.get(head, [twice, 0.3])
    assert [zeros.float().mean().item() for zeros in seen] == pytest.approx(dropped, abs=0.08)
    for row in range(4):
        alone = {
            name: None if values is None else values[row : row + 1]
            for name, values in batch.items()
        }
        torch.testing.assert_close(
            predict(model, **alone), together[row : row + 1], rtol=1e-5, atol=1e-6
        )
    assert (predict(model, **{**batch, "dropout_key": key + 1}) != together).any(-1).all()
    assert torch.equal(
        predict(model.eval(), **batch), predict(model, **{**batch, "dropout_key": None})
    )
    some = torch.tensor([[0, 7, 2]] * 4)
    whole = predict(model, **{**batch, "predicted": None})
    torch.testing.assert_close(
        predict(model, **{**batch, "predicted": some}), whole.take_along_dim(some[..., None], dim=1)
    )


@each_head
def test_the_work_is_that_of_the_products(head: Head, labels: tuple[str, ...]):
    model = built(small(head, labels, decoder_layers=3))
    batch = read(rows(FULL), head)
    with FlopCounterMode(display=False) as counter:
        predict(
            model, **batch, dropout_key=torch.zeros(4, dtype=torch.int32)
        )  # its attention is written out, for dropout
    positions = LENGTH if batch["predicted"] is None else 1
    assert LENGTH * model.flops_per_token(LENGTH, positions / LENGTH) == pytest.approx(
        3 * counter.get_total_flops() / 4
    )


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (
            lambda: small("classification"),
            "labels has 0 names, but a classification head needs at least 1",
        ),
        (lambda: small("question_answering", ("a",)), "but a question_answering head has none"),
        (lambda: small("tagging", ("O", "O")), "Labels must differ"),
        (
            lambda: small("question_answering", architecture="prefix_lm"),
            "architecture prefix_lm is for language models, but head is",
        ),
        (
            lambda: codec_of(small("multiple_choice")).to_huggingface(),
            "a multiple_choice head cannot be exported",
        ),
    ],
)
def test_settings_that_do_not_go_with_the_head_are_refused(make_config: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config()


@pytest.fixture
def start(dataset_folder: Path, tmp_path: Path) -> tuple[Weights, Any]:
    """The weights of a T5 that predicts tokens, and a dataset that goes with them."""
    before = small("language_model", vocab_size=600, tied=False, activation="geglu_tanh")
    tensors = codec_of(before).export_tensors(built(before).state_dict())
    save_folder(
        tmp_path / "saved", codec_of(before).to_huggingface(), tensors, dataset_folder / "tokenizer"
    )
    tokenizer = Tokenizer.load(dataset_folder / "tokenizer")
    return load_weights(tmp_path / "saved"), SimpleNamespace(name="rows", tokenizer=tokenizer)


@each_head
def test_a_pretrained_model_gets_a_head(
    start: tuple[Weights, Any], head: Head, labels: tuple[str, ...]
):
    """Encoder and decoder are taken, its own head is left out; a tagger needs no decoder."""
    weights, dataset = start
    model = replace(weights.config, head=head, labels=labels).build()
    given = stored_values(weights, model, dataset, seed=0)
    for name, parameter in model.named_parameters():
        values = given(name, 0, parameter.numel())
        if name.startswith("head."):
            assert torch.equal(values, model.initial_values(name, 0, parameter.numel(), 0))
        else:
            assert torch.equal(values, weights.tensors[name].flatten())
    stacks = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert ("decoder" in stacks) == (head != "tagging")


def test_a_decoder_of_another_depth_is_not_taken(start: tuple[Weights, Any]):
    weights, dataset = start
    model = t5.Config(
        **{**asdict(weights.config), "decoder_layers": 1, "head": "question_answering"}
    ).build()
    with pytest.raises(CheckpointError, match=r"10 are unknown, first decoder\.1\."):
        stored_values(weights, model, dataset, seed=0)

"""Our BART against `transformers`, with random small models, in both directions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import fill, parameters, predict, published
from tests.parity import heads
from tests.parity.heads import (
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
from trainer.models.families import bart
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import load_weights

# The stacks differ in depth.
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 40,
}
VERSIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale_embedding": True, "activation_function": "relu"},
}
START = 2


def randomize(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "bias" in name else 0.1
            parameter.copy_(
                ("norm" in name and "weight" in name)
                + scale * torch.randn(parameter.shape, generator=generator)
            )


def make(version: str, folder: Path) -> BartForConditionalGeneration:
    reference = BartForConditionalGeneration(BartConfig(**SHAPE, **VERSIONS[version])).eval()
    randomize(reference)
    bias = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    reference.final_logits_bias.copy_(bias)
    reference.save_pretrained(folder)
    return reference


@pytest.fixture(params=VERSIONS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, bart.Config, Any]:
    """A random model of transformers, and ours imported from the folder it saved."""
    reference = make(request.param, tmp_path / "reference")
    weights = load_weights(tmp_path / "reference")
    model = weights.config.build().eval()
    fill(model, dict(weights.tensors))
    return reference, weights.config, model


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator) for length in lengths]


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """A row for each length, and where it is text."""
    rows = [F.pad(text, (0, max(lengths) - len(text)), value=1) for text in texts(*lengths)]
    return torch.stack(rows), (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()


def shift(labels: Tensor, start: int = START) -> Tensor:
    return F.pad(labels[:, :-1], (1, 0), value=start)


def test_logits_loss_and_gradients_are_equal(pair: tuple[Any, bart.Config, Any]) -> None:
    """Up to the last position; the batch begins targets with another token, as T5's padding."""
    reference, config, model = pair
    bias = reference.final_logits_bias.requires_grad_()
    tokens, segments = padded(40, 13, 1)
    labels, is_label = padded(40, 3, 9)
    theirs = reference(
        input_ids=tokens, attention_mask=segments, decoder_input_ids=shift(labels)
    ).logits
    ours = predict(
        model,
        tokens=tokens,
        segments=segments,
        target_tokens=shift(labels, start=0),
        target_segments=is_label,
    )
    used = is_label.bool()
    torch.testing.assert_close(ours[used], theirs[used], rtol=1e-5, atol=1e-5)
    losses = [F.cross_entropy(logits[used], labels[used]) for logits in (theirs, ours)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    of_parameters = {name: p.grad for name, p in reference.named_parameters()}
    expected = codec_of(config).import_tensors(of_parameters | {"final_logits_bias": bias.grad})
    actual = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_packed_pairs_get_the_logits_they_get_alone(pair: tuple[Any, bart.Config, Any]) -> None:
    reference, _, model = pair
    sources, targets = texts(9, 12), texts(5, 8)
    pad = torch.ones(2, dtype=torch.int64)
    positions = [torch.arange(length) for length in (9, 12, 5, 8)]
    ours = predict(
        model,
        tokens=torch.cat(sources)[None],
        segments=torch.tensor([[1] * 9 + [2] * 12]),
        positions=torch.cat(positions[:2])[None],
        target_tokens=torch.cat([*targets, pad])[None],
        target_segments=torch.tensor([[1] * 5 + [2] * 8 + [0] * 2]),
        target_positions=torch.cat([*positions[2:], torch.zeros_like(pad)])[None],
    )
    begun = [torch.cat([torch.tensor([START]), target[1:]]) for target in targets]
    alone = [
        reference(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, begun, strict=True)
    ]
    torch.testing.assert_close(ours[0, :13], torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert ours.isfinite().all()


def test_greedy_tokens_are_those_of_generate(pair: tuple[Any, bart.Config, Any]) -> None:
    """Beams: see test_generation.py."""
    reference, _, model = pair
    tokens, segments = padded(30, 11, 2)
    theirs = reference.generate(
        input_ids=tokens,
        attention_mask=segments,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        forced_eos_token_id=None,
        use_cache=False,  # its cache takes stacks of one depth only
    )
    begin = torch.zeros(3, 1, dtype=torch.int64)
    logits, cache = model.start(Inputs(tokens, segments, target_tokens=begin), capacity=20)
    ours = [torch.full((3,), START), logits.argmax(-1)]
    for _ in range(19):
        ours.append(model.step(ours[-1], cache).argmax(-1))
    assert torch.equal(torch.stack(ours, 1), theirs)


def test_transformers_loads_what_we_export(
    pair: tuple[Any, bart.Config, Any], tmp_path: Path
) -> None:
    _, config, model = pair
    with torch.no_grad():
        for parameter in model.parameters():  # weights that only we have
            parameter.mul_(1.1)
    save_folder(tmp_path / "ours", *published(config, parameters(model)))
    theirs, report = BartForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens, targets = padded(20, 20)[0], shift(padded(7, 7)[0])
    ours = predict(model, tokens=tokens, target_tokens=targets)
    logits = theirs.eval()(input_ids=tokens, decoder_input_ids=targets).logits
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    tree, tensors = load_folder(tmp_path / "ours")
    assert read_config(bart.Config, tree, tensors) == config
    again = codec_of(config).import_tensors(tensors)
    assert all(torch.equal(again[name], each) for name, each in parameters(model).items())


def test_older_checkpoints_are_understood(
    pair: tuple[Any, bart.Config, Any], tmp_path: Path
) -> None:
    """Of the bare model: no prefix, no bias, copies of the token embeddings, and versions."""
    _, tensors = load_folder(tmp_path / "reference")
    config, shared = pair[1], tensors["model.shared.weight"]
    old = {name.removeprefix("model."): tensors[name] for name in tensors}
    del old["final_logits_bias"]
    old |= {f"{stack}.embed_tokens.weight": shared for stack in ("encoder", "decoder")}
    old |= {f"{stack}.version": torch.tensor([3.0]) for stack in ("encoder", "decoder")}
    imported, expected = (
        codec_of(config).import_tensors(old),
        codec_of(config).import_tensors(tensors),
    )
    assert not imported.pop("head.bias").any()
    assert all(torch.equal(value, expected[name]) for name, value in imported.items())
    with pytest.raises(CheckpointError, match=r"model\.encoder\.embed_tokens\.weight differs"):
        codec_of(config).import_tensors(old | {"encoder.embed_tokens.weight": shared + 1})
    with pytest.raises(CheckpointError, match=r"decoder\.layernorm_embedding\.bias is missing"):
        codec_of(config).import_tensors(
            {name: old[name] for name in old if name != "decoder.layernorm_embedding.bias"}
        )


def test_configurations_of_published_models_are_understood() -> None:
    """Keys as in the config.json of facebook/bart-base and bart-large-cnn."""
    common = {
        "model_type": "bart",
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "init_std": 0.02,
        "max_position_embeddings": 1024,
        "normalize_before": False,
        "normalize_embedding": True,
        "scale_embedding": False,
        "encoder_layerdrop": 0.0,
    }
    sizes = {
        stack: {f"{stack}_layers": 6, f"{stack}_attention_heads": 12, f"{stack}_ffn_dim": 3072}
        for stack in ("encoder", "decoder")
    }
    base = {**common, **sizes["encoder"], **sizes["decoder"], "d_model": 768, "vocab_size": 50265}
    assert read_config(bart.Config, base) == bart.Config(ffn_dropout=0.1)
    large = {name: {6: 12, 12: 16, 3072: 4096}.get(value, value) for name, value in base.items()}
    large |= {"d_model": 1024, "vocab_size": 50264, "activation_dropout": 0.0}
    assert read_config(bart.Config, large) == bart.Config(
        vocab_size=50264, layers=12, width=1024, heads=16, ffn_width=4096
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mbart"}, "model_type 'mbart'"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False"),
        ({"activation_function": "swish"}, "activation_function 'swish'"),
        ({"encoder_ffn_dim": None}, "lacks encoder_ffn_dim"),
        ({"d_model": None}, "lacks d_model"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads 2"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop 0.1"),
        ({"normalize_before": True}, "normalize_before True"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, object], message: str) -> None:
    tree = {
        key: value
        for key, value in {**BartConfig(**SHAPE).to_dict(), **change}.items()
        if value is not None
    }
    with pytest.raises(ConfigError, match=message):
        read_config(bart.Config, tree)


def test_what_transformers_lacks_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="activation geglu cannot be exported"):
        codec_of(replace(bart.Config(), activation="geglu")).to_huggingface()


TASKS = ("classification", "regression", "question_answering")
PADDED, FULL = [(9, 9), (1, 1), (15, 3), (5, 12)], [(9, 13), (20, 2), (2, 20), (3, 19)]


def rows(lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
    return text_pairs(lengths, end=START, pad=1)


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderPair:
    _, name, labels = heads.TASKS[request.param]
    config = BartConfig(**SHAPE, **names_of(labels), classifier_dropout=0.2)
    reference = getattr(transformers, f"BartFor{name}")(config).eval()
    randomize(reference)
    reference.save_pretrained(tmp_path / "reference")
    return DecoderPair(request.param, reference, *load(bart.Config, tmp_path / "reference"))


def test_logits_of_heads_are_equal(task: DecoderPair) -> None:
    assert_logits_are_equal(task, rows(PADDED))


def test_losses_and_gradients_of_heads_are_equal(task: DecoderPair) -> None:
    batch = rows(FULL)  # transformers lets an answer begin in padding
    assert_losses_and_gradients_are_equal(task, batch, ([0, 5, 23, 7], [0, 6, 23, 19]))


def test_transformers_loads_heads_that_we_export(task: DecoderPair, tmp_path: Path) -> None:
    theirs = assert_transformers_loads_what_we_export(task, rows(PADDED), tmp_path / "ours")
    assert theirs.config.classifier_dropout == task.config.head_dropout == 0.2

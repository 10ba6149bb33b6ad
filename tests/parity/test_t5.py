"""Our T5, v1.0 and v1.1, against `transformers`, with random small models, in both directions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import predict, published
from tests.parity.pairs import assert_gradients_are_equal
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.families import t5
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import load_weights

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


def make(version: str, folder: Path) -> T5ForConditionalGeneration:
    reference = T5ForConditionalGeneration(T5Config(**SHAPE, **VERSIONS[version])).eval()
    if version == "v1.1":  # which transformers unties only when it loads
        reference.lm_head.weight = nn.Parameter(torch.empty(300, 48))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            scale = 0.5 if "bias" in name else 0.1
            parameter.copy_(
                ("norm" in name) + scale * torch.randn(parameter.shape, generator=generator)
            )
    reference.save_pretrained(folder)
    return reference


@pytest.fixture(params=VERSIONS)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[T5ForConditionalGeneration, t5.Config, EncoderDecoder]:
    """A random model of transformers, and ours imported from the folder it saved."""
    reference = make(request.param, tmp_path / "reference")
    weights = load_weights(tmp_path / "reference")
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    return reference, weights.config, model


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 300, (length,), generator=generator) for length in lengths]


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """A row for each length, and where it is text."""
    rows = [F.pad(text, (0, max(lengths) - len(text))) for text in texts(*lengths)]
    return torch.stack(rows), (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()


def shift(labels: Tensor) -> Tensor:
    return F.pad(labels[:, :-1], (1, 0))


def test_logits_loss_and_gradients_are_equal(pair):
    """At distances of all buckets, up to beyond the last."""
    reference, config, model = pair
    tokens, segments = padded(150, 13, 1)
    labels, is_label = padded(140, 3, 9)
    theirs = reference(
        input_ids=tokens, attention_mask=segments, decoder_input_ids=shift(labels)
    ).logits
    ours = predict(
        model,
        tokens=tokens,
        segments=segments,
        target_tokens=shift(labels),
        target_segments=is_label,
    )
    used = is_label.bool()
    torch.testing.assert_close(ours[used], theirs[used], rtol=1e-5, atol=1e-5)
    losses = [F.cross_entropy(logits[used], labels[used]) for logits in (theirs, ours)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(config, reference, model, atol=1e-6)


def test_packed_pairs_get_the_logits_they_get_alone(pair):
    reference, _, model = pair
    sources, targets = texts(9, 12), [shift(target[None])[0] for target in texts(5, 8)]
    pad = torch.zeros(2, dtype=torch.int64)
    ours = predict(
        model,
        tokens=torch.cat(sources)[None],
        segments=torch.tensor([[1] * 9 + [2] * 12]),
        target_tokens=torch.cat([*targets, pad])[None],
        target_segments=torch.tensor([[1] * 5 + [2] * 8 + [0] * 2]),
    )
    alone = [
        reference(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, targets, strict=True)
    ]
    torch.testing.assert_close(ours[0, :13], torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert ours.isfinite().all()


def test_greedy_tokens_are_those_of_generate(pair):
    reference, _, model = pair
    tokens, segments = padded(30, 11, 2)
    theirs = reference.generate(
        input_ids=tokens,
        attention_mask=segments,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        use_cache=False,  # its cache takes stacks of one depth only
    )
    begin = torch.zeros(3, 1, dtype=torch.int64)
    logits, cache = model.start(Inputs(tokens, segments, target_tokens=begin), capacity=20)
    ours = [torch.zeros(3, dtype=torch.int64), logits.argmax(-1)]
    for _ in range(19):
        ours.append(model.step(ours[-1], cache).argmax(-1))
    assert torch.equal(torch.stack(ours, 1), theirs)


def test_transformers_loads_what_we_export(pair, tmp_path: Path):
    _, config, model = pair
    with torch.no_grad():
        for parameter in model.parameters():  # weights that only we have
            parameter.mul_(1.1)
    save_folder(tmp_path / "ours", *published(config, model.state_dict()))
    theirs, report = T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens, targets = padded(20, 20)[0], shift(padded(7, 7)[0])
    ours = predict(model, tokens=tokens, target_tokens=targets)
    logits = theirs.eval()(input_ids=tokens, decoder_input_ids=targets).logits
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert read_config(t5.Config, load_folder(tmp_path / "ours")[0]) == config


def test_older_checkpoints_are_understood(pair, tmp_path: Path):
    """The token embeddings up to four times, and a table that nothing reads."""
    _, tensors = load_folder(tmp_path / "reference")
    config, shared = pair[1], tensors["shared.weight"]
    old = {name: tensors[name] for name in tensors}
    old |= {f"{stack}.embed_tokens.weight": shared for stack in ("encoder", "decoder")}
    old |= {"lm_head.weight": shared} if config.tied else {}
    old["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(
        32, 4
    )
    imported, expected = (
        codec_of(config).import_tensors(old),
        codec_of(config).import_tensors(tensors),
    )
    assert all(torch.equal(imported[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight differs from shared"):
        codec_of(config).import_tensors(old | {"encoder.embed_tokens.weight": shared + 1})
    with pytest.raises(CheckpointError, match=r"decoder\.final_layer_norm\.weight is missing"):
        codec_of(config).import_tensors(
            {name: old[name] for name in old if name != "decoder.final_layer_norm.weight"}
        )


def test_v1_1_saved_by_transformers_5_has_one_matrix(tmp_path: Path):
    theirs = T5ForConditionalGeneration(T5Config(**SHAPE, **VERSIONS["v1.1"])).eval()
    with torch.no_grad():
        theirs.shared.weight.mul_(0.1)  # else logits are about 30, and 1e-5 is their last bits
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_folder(tmp_path)[1]
    weights = load_weights(tmp_path)
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    tokens, targets = padded(20, 20)[0], shift(padded(7, 7)[0])
    logits = theirs(input_ids=tokens, decoder_input_ids=targets).logits
    ours = predict(model, tokens=tokens, target_tokens=targets)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def test_configurations_of_published_models_are_understood():
    """Keys as in the config.json of t5-small and t5-v1_1-small."""
    common = {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
    }
    small = read_config(t5.Config, {**common, "d_ff": 2048, "num_layers": 6, "num_heads": 8})
    assert small == t5.Config(layers=6, width=512, heads=8, ffn_width=2048)
    newer = {"d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
    newer |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    expected = replace(
        small,
        layers=8,
        decoder_layers=8,
        heads=6,
        ffn_width=1024,
        activation="geglu_tanh",
        tied=False,
    )
    assert read_config(t5.Config, {**common, **newer}) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "umt5"}, "model_type 'umt5'"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj 'gated-silu'"),
        ({"d_kv": None}, "lacks d_kv"),
        ({"relative_attention_num_buckets": 30}, "relative_buckets is 30"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, object], message: str):
    tree = {
        key: value
        for key, value in {**T5Config(**SHAPE).to_dict(), **change}.items()
        if value is not None
    }
    with pytest.raises(ConfigError, match=message):
        read_config(t5.Config, tree)


@pytest.mark.parametrize(
    "change", [{"architecture": "shared_encoder_decoder"}, {"activation": "geglu"}]
)
def test_what_transformers_lacks_is_not_exported(change: dict[str, object]):
    with pytest.raises(ConfigError, match="cannot be exported"):
        codec_of(replace(t5.Config(), **change)).to_huggingface()

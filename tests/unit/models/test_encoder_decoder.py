import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from samestep.errors import ConfigError
from tests.outputs import predict
from trainer.models import Model
from trainer.models.families import bart, gpt2, openai_gpt, t5

Build = Callable[..., Model]
Batch = dict[str, Tensor]
ARCHITECTURES = ["encoder_decoder", "shared_encoder_decoder"]


@pytest.fixture(params=[*ARCHITECTURES, "bart"])
def config(request: pytest.FixtureRequest) -> t5.Config | bart.Config:
    shape = {"vocab_size": 97, "layers": 2, "width": 32, "heads": 4, "ffn_width": 48}
    if request.param == "bart":
        return bart.Config(**shape, max_positions=20)
    return t5.Config(**shape, head_width=12, architecture=request.param)


def segments(width: int, *rows: tuple[int, ...]) -> Tensor:
    """Rows of numbered sequences of these lengths, padded with 0."""
    numbered = [[n for n, length in enumerate(row, 1) for _ in range(length)] for row in rows]
    return torch.tensor([row + [0] * (width - len(row)) for row in numbered], dtype=torch.int32)


@pytest.fixture
def batch() -> Batch:
    """Four rows of pairs: two in a row, one with padding, one without on either side, and padding
    only.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(0, 97, (4, 20), generator=generator, dtype=torch.int32),
        "segments": segments(20, (7, 9), (11,), (20,), ()),
        "target_tokens": torch.randint(0, 97, (4, 10), generator=generator, dtype=torch.int32),
        "target_segments": segments(10, (3, 5), (10,), (4,), ()),
        "dropout_key": torch.tensor([5, -6, 2**31 - 1, -(2**31)], dtype=torch.int32),
    }


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def count(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in config.build().parameters())


SIZES = {  # width, head width, heads, ffn width, layers
    "small": (512, 64, 8, 2048, 6),
    "base": (768, 64, 12, 3072, 12),
    "large": (1024, 64, 16, 4096, 24),
    "3B": (1024, 128, 32, 16384, 24),
    "11B": (1024, 128, 128, 65536, 24),
}
SIZES_1_1 = {
    "small": (512, 64, 6, 1024, 8),
    "base": (768, 64, 12, 2048, 12),
    "large": (1024, 64, 16, 2816, 24),
    "xl": (2048, 64, 32, 5120, 24),
    "xxl": (4096, 64, 64, 10240, 24),
}


LARGE_BART = bart.Config(layers=12, width=1024, heads=16, ffn_width=4096)


def sized(size: tuple[int, ...], **changes: Any) -> t5.Config:
    width, head_width, heads, ffn_width, layers = size
    return t5.Config(
        width=width,
        head_width=head_width,
        heads=heads,
        ffn_width=ffn_width,
        layers=layers,
        **changes,
    )


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Counts of the released checkpoints.
        (sized(SIZES["small"]), 60_506_624),
        (sized(SIZES["base"]), 222_903_552),
        (sized(SIZES["large"]), 737_668_096),
        (sized(SIZES["3B"]), 2_851_598_336),
        (sized(SIZES["11B"]), 11_307_321_344),
        *(
            (sized(SIZES_1_1[name], activation="geglu_tanh", tied=False), parameters)
            for name, parameters in {
                "small": 76_961_152,
                "base": 247_577_856,
                "large": 783_150_080,
                "xl": 2_849_757_184,
                "xxl": 11_135_332_352,
            }.items()
        ),
        # As transformers counts them, and the bias of the logits, which is a buffer there.
        (bart.Config(), 139_420_416 + 50_265),
        (LARGE_BART, 406_291_456 + 50_265),
        (gpt2.Config(), 124_439_808),
        (gpt2.Config(layers=48, width=1600, heads=25, ffn_width=6400), 1_557_611_200),
        (openai_gpt.Config(), 116_534_784),
    ],
)
def test_parameter_counts(config: Any, parameters: int):
    assert count(config) == parameters


def test_parameters_of_the_architectures():
    """Table 2 of the paper, whose P are the weights of layers; ours counts cross-attention, too."""
    base = sized(SIZES["base"], vocab_size=1)
    layer = 4 * 768 * 768 + 2 * 768 * 3072 + 2 * 768
    cross = 4 * 768 * 768 + 768
    table, norm = 32 * 12, 768
    assert count(base) == 2 * 12 * layer + 12 * cross + 2 * (table + norm) + 768
    shared = dataclasses.replace(base, architecture="shared_encoder_decoder")
    assert count(shared) == 12 * layer + 12 * cross + 2 * table + norm + 768
    half = dataclasses.replace(base, layers=6)
    assert count(half) == 12 * layer + 6 * cross + 2 * (table + norm) + 768
    for architecture in ("language_model", "prefix_lm"):
        assert (
            count(dataclasses.replace(base, architecture=architecture))
            == 12 * layer + table + norm + 768
        )


def test_flops_are_those_of_the_products():
    """Against the paper's tables' sizes, counted by hand: 512 positions in, 114 out."""
    with torch.device("meta"):
        model = sized(SIZES["base"]).build()
        shared = sized(SIZES["base"], architecture="shared_encoder_decoder").build()
    source, target, inner = 512, 114, 768
    encoder = 12 * (source * (4 * 768 * inner + 2 * 768 * 3072) + 2 * source * source * inner)
    cross = 12 * (2 * source * 768 * inner + 2 * target * 768 * inner + 2 * target * source * inner)
    decoder = 12 * (target * (4 * 768 * inner + 2 * 768 * 3072) + 2 * target * target * inner)
    expected = 6 * (encoder + cross + decoder + target * 768 * 32128)
    for each in (model, shared):
        assert source * each.flops_per_token(source, target / source) == pytest.approx(expected)


def test_flops_of_bart_are_those_of_the_products():
    with torch.device("meta"):
        model = bart.Config(decoder_layers=4).build()
    source, target, width = 512, 114, 768
    layer = 4 * width * width + 2 * width * 3072
    encoder = 6 * (source * layer + 2 * source * source * width)
    cross = 4 * (2 * (source + target) * width * width + 2 * target * source * width)
    decoder = 4 * (target * layer + 2 * target * target * width)
    expected = 6 * (encoder + cross + decoder + target * width * 50_265)
    assert source * model.flops_per_token(source, target / source) == pytest.approx(expected)


def test_packed_pairs_do_not_see_each_other(
    config: t5.Config | bart.Config, build: Build, batch: Batch
):
    model = build(config).eval()
    before = predict(model, **batch)
    for side, own in (("tokens", "segments"), ("target_tokens", "target_segments")):
        changed = {**batch, side: torch.where(batch[own] == 2, 1, batch[side])}
        differs = (predict(model, **changed) != before).any(-1)
        assert differs.any()
        assert not differs[batch["target_segments"] == 1].any()
    later = batch["target_tokens"].clone()
    later[:, 6:] = 1
    assert torch.equal(predict(model, **{**batch, "target_tokens": later})[:, :6], before[:, :6])


def test_rows_of_one_pair_need_no_segments(
    config: t5.Config | bart.Config, build: Build, batch: Batch
):
    model = build(config)
    ones = {name: torch.ones_like(batch[name]) for name in ("segments", "target_segments")}
    torch.testing.assert_close(
        predict(model, **(batch | dict.fromkeys(ones))), predict(model, **(batch | ones))
    )


def test_predicted_cells_alone_give_what_all_cells_give(
    config: t5.Config | bart.Config, build: Build, batch: Batch
):
    model = build(config)
    predicted = torch.tensor([[0, 7, 3]] * 4)
    some = predict(model, **batch, predicted=predicted)
    torch.testing.assert_close(
        some, predict(model, **batch).take_along_dim(predicted[..., None], dim=1)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_step_is_the_same_however_the_batch_is_split(
    config: t5.Config | bart.Config, build: Build, batch: Batch, checkpointing: bool
):
    """Dropout in all of its places included."""
    model = build(config)
    predict(model, **batch).square().sum().backward()
    whole = gradients(model)
    model.zero_grad()
    model.activation_checkpointing = checkpointing
    for part in (slice(0, 1), slice(1, 4)):
        predict(
            model, **{name: values[part] for name, values in batch.items()}
        ).square().sum().backward()
    torch.testing.assert_close(gradients(model), whole, rtol=1e-4, atol=1e-3)


def test_each_dropout_probability_acts_in_training_only(
    config: t5.Config | bart.Config, build: Build, batch: Batch
):
    no_dropout = dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
    reference = predict(build(no_dropout), **batch)
    for name in ("dropout", "attention_dropout"):
        model = build(dataclasses.replace(no_dropout, **{name: 0.1}))
        assert (predict(model, **batch) != reference).any()
        torch.testing.assert_close(predict(model, **{**batch, "dropout_key": None}), reference)
        torch.testing.assert_close(predict(model.eval(), **batch), reference)
    barely = build(
        dataclasses.replace(no_dropout, attention_dropout=1e-12)
    )  # the slow path, without dropping a position
    torch.testing.assert_close(predict(barely, **batch), reference, rtol=1e-4, atol=1e-4)


def test_learned_positions_and_start_tokens_act_on_each_target(build: Build, batch: Batch):
    """Wherever a sequence lies in a packed row, and whatever token the batch begins it with."""
    config = bart.Config(vocab_size=97, layers=1, width=32, heads=4, ffn_width=48, max_positions=20)
    model = build(config).eval()
    position = {
        "positions": torch.arange(20).expand(4, -1),
        "target_positions": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]] * 4),
    }
    before = predict(model, **batch, **position)
    begins = batch["target_tokens"].clone()
    begins[0, [0, 3]] = 7
    begun = predict(model, **(batch | {"target_tokens": begins}), **position)
    assert torch.equal(before, begun)
    begins[0, 4] = (begins[0, 4] + 1) % 97
    other = predict(model, **(batch | {"target_tokens": begins}), **position)
    changed = (other != before).any(-1)[0]
    assert changed.tolist() == [False] * 4 + [True] * 4 + [False] * 2
    moved = position["positions"] + 1
    moved[:, -1] = 0
    shifted = predict(model, **batch, **(position | {"positions": moved}))
    assert (shifted != before).any(-1)[0, :8].all()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "language_model", "prefix_lm"])
@pytest.mark.parametrize("version", [{}, {"activation": "geglu_tanh", "tied": False}])
def test_architectures_learn_and_reload(
    build: Build, batch: Batch, architecture: str, version: dict[str, Any]
):
    config = t5.Config(
        vocab_size=97,
        layers=2,
        width=32,
        heads=4,
        head_width=12,
        ffn_width=48,
        architecture=architecture,
        **version,
    )
    if config.causal:
        batch = {name: batch[name] for name in ("tokens", "segments", "dropout_key")} | {
            "positions": None
        }
    model = build(config)
    labels = torch.arange(40).view(4, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(predict(model, **batch)[:, :10].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(
            gradient is not None and gradient.any() for gradient in gradients(model).values()
        )
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    other = build(config, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(predict(model, **batch), predict(other, **batch))


def test_padding_and_bf16_give_no_nan(config: t5.Config | bart.Config, build: Build, batch: Batch):
    model = build(config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = predict(model, **batch)
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_initial_values_are_those_of_mesh_tensorflow(build: Build):
    config = t5.Config(
        vocab_size=500, layers=1, width=96, heads=3, head_width=40, ffn_width=256, tied=False
    )
    model = build(config)
    expected = {
        "embeddings.tokens": 1.0,
        "head.decoder": 96**-0.5,
        "encoder_bias": 96**-0.5,
        "decoder_bias": 96**-0.5,
    }
    for stack in ("encoder.0", "decoder.0"):
        expected |= {
            f"{stack}.attention.out": 120**-0.5,
            f"{stack}.ffn.up": 96**-0.5,
            f"{stack}.ffn.down": 256**-0.5,
        }
    expected |= {
        "decoder.0.cross_attention.query": (96 * 40) ** -0.5,
        "decoder.0.cross_attention.kv": 96**-0.5,
    }
    for name, std in expected.items():
        values = model.get_parameter(f"{name}.weight")
        assert values.std().item() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5), name
    query, key, value = model.get_parameter("encoder.0.attention.qkv.weight").chunk(3)
    assert query.std().item() == pytest.approx((96 * 40) ** -0.5, rel=0.05)
    assert torch.cat([key, value]).std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert torch.equal(model.get_parameter("decoder_norm.weight"), torch.ones(96))
    whole = model.initial_values("encoder.0.attention.qkv.weight", 0, 3 * 120 * 96, seed=0)
    parts = [
        model.initial_values("encoder.0.attention.qkv.weight", a, a + 8640, seed=0)
        for a in range(0, 34560, 8640)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "prefix_lm"])
def test_relative_biases_may_begin_larger(build: Build, architecture: t5.Architecture):
    config = t5.Config(
        vocab_size=40, layers=1, width=64, heads=512, head_width=2, ffn_width=8,
        architecture=architecture,
    )  # fmt: skip
    default, large = build(config), build(dataclasses.replace(config, relative_std=2.0))
    for name, weight in large.named_parameters():
        if name.endswith("_bias.weight"):
            assert abs(weight.std().item() / 2 - 1) < 0.02
        else:
            torch.testing.assert_close(weight, default.get_parameter(name), rtol=0, atol=0)


def test_gpt2_scales_what_goes_into_the_residual_stream(build: Build):
    model = build(
        gpt2.Config(vocab_size=50, layers=8, width=64, heads=2, ffn_width=256, max_positions=8)
    )
    assert model.get_parameter("layers.3.ffn.down.weight").std().item() == pytest.approx(
        0.02 / 4, rel=0.03
    )
    assert model.get_parameter("layers.3.ffn.up.weight").std().item() == pytest.approx(
        0.02, rel=0.03
    )


def test_stacked_matrices_are_named(config: t5.Config | bart.Config):
    with torch.device("meta"):
        stacked = dataclasses.replace(config, activation="geglu_tanh").build().stacked()
    assert {
        name.partition(".1.")[2]: parts
        for name, parts in stacked.items()
        if name.startswith("decoder.1.") and name.endswith("weight")
    } == {
        "attention.qkv.weight": 3,
        "cross_attention.kv.weight": 2,
        "ffn.up.weight": 2,
    }


@pytest.mark.long
def test_each_layer_compiles_to_one_graph(build: Build, batch: Batch):
    """As training.compile does it."""
    config = t5.Config(vocab_size=97, layers=1, width=32, heads=4, head_width=12, ffn_width=48)
    reference, model = build(config), build(config)
    for unit in model.sharding_units():
        unit.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(predict(model, **batch), predict(reference, **batch))
    torch._dynamo.reset()


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_by_its_units(
    config: t5.Config | bart.Config, build: Build, batch: Batch, checkpointing: bool
):
    reference, sharded = build(config), build(config)
    sharded.activation_checkpointing = checkpointing
    mesh = init_device_mesh("cpu", (1,))
    for unit in (*sharded.sharding_units(), sharded):
        fully_shard(unit, mesh=mesh)
    for model in (reference, sharded):
        predict(model, **batch).square().sum().backward()
    whole = {name: gradient.full_tensor() for name, gradient in gradients(sharded).items()}
    torch.testing.assert_close(whole, gradients(reference))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_width": 0}, "head_width is 0. Use 1 or more"),
        (
            {"architecture": "prefix_lm", "decoder_layers": 3},
            "decoder_layers is 3, but architecture prefix_lm has one",
        ),
        ({"relative_buckets": 6}, "relative_buckets is 6. Use a multiple of 4"),
        ({"relative_std": 0.0}, "relative_std is 0.0. Use a positive number, or null"),
        ({"max_distance": 16}, "32 buckets need more than 16"),
        ({"dropout": 1.0}, r"dropout is 1.0. Use a number in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        t5.Config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "width 768 is not a multiple of heads 7. Use heads=6"),
        ({"decoder_layers": 0}, "decoder_layers is 0. Use 1 or more"),
        ({"max_positions": 0}, "max_positions is 0. Use 1 or more"),
        ({"ffn_dropout": 1.0}, r"ffn_dropout is 1.0. Use a number in \[0, 1\)"),
        ({"head_dropout": -0.1}, r"head_dropout is -0.1. Use a number in \[0, 1\)"),
        ({"initializer_range": 0.0}, "initializer_range is 0.0. Use a number above 0"),
        ({"start_token": 50_265}, "start_token is 50265, and vocab_size 50265. Use the id"),
        ({"head": "tagging", "labels": ("O", "B")}, "supports only classification, question_answ"),
        ({"head": "classification"}, "labels has 0 names"),
    ],
)
def test_wrong_settings_of_bart_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        bart.Config(**change)

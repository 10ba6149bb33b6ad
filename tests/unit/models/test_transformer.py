import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from samestep.errors import ConfigError
from tests.outputs import outputs, predict
from trainer.models.families import bert, roberta
from trainer.models.transformer import Transformer

Build = Callable[..., Transformer]
Batch = dict[str, Tensor]


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def rows(batch: Batch, index: slice) -> Batch:
    return {name: values[index] for name, values in batch.items()}


def test_names_are_the_ones_in_checkpoints(config: bert.Config, build: Build):
    names = [
        name for name, _ in build(config).named_parameters() if not name.startswith("layers.1.")
    ]
    modules = ["attention.qkv", "attention.out", "attention_norm", "ffn.up", "ffn.down", "ffn_norm"]
    assert names == [
        *(f"embeddings.{name}" for name in ("tokens.weight", "positions.weight", "types.weight")),
        *(f"embeddings.norm.{kind}" for kind in ("weight", "bias")),
        *(f"layers.0.{module}.{kind}" for module in modules for kind in ("weight", "bias")),
        *(
            "head.bias",
            "head.dense.weight",
            "head.dense.bias",
            "head.norm.weight",
            "head.norm.bias",
        ),
    ]
    assert [*build(config).state_dict()] == [name for name, _ in build(config).named_parameters()]


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (bert.Config(), 109.514298),
        (bert.Config(layers=24, width=1024, heads=16, ffn_width=4096), 335.174458),
        (roberta.Config(), 124.697433),
    ],
)
def test_parameter_counts(config: bert.Config, millions: float):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in config.build().parameters()) == round(
            millions * 1e6
        )


@pytest.mark.parametrize(("length", "predicted", "teraflops"), [(128, 20, 0.234), (512, 80, 0.996)])
def test_flops_of_bert_large(length: int, predicted: int, teraflops: float):
    with torch.device("meta"):
        model = bert.Config(layers=24, width=1024, heads=16, ffn_width=4096).build()
    flops = length * model.flops_per_token(length, predicted / length)
    assert flops == pytest.approx(teraflops * 1e12, rel=0.005)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("next_sentence", [False, True])
def test_predicted_cells_alone_give_what_all_cells_give(
    config: bert.Config, build: Build, batch: Batch, norm: str, next_sentence: bool
):
    model = build(dataclasses.replace(config, norm=norm, nsp=next_sentence))

    def run(predicted: Tensor | None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        model.zero_grad()
        names = ("tokens", "next_sentence") if next_sentence else ("tokens",)
        logits, *rest = outputs(model, *names, **{**batch, "predicted": predicted})
        if predicted is None:
            assert logits.shape == (4, 20, 97)
            logits = logits.take_along_dim(batch["predicted"][..., None], dim=1)
        assert logits.shape == (4, 5, 97)
        sum(values.square().sum() for values in (logits, *rest)).backward()
        return (logits, *rest), gradients(model)

    torch.testing.assert_close(run(batch["predicted"]), run(None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_rows_of_one_sequence_need_no_segments(
    config: bert.Config, build: Build, batch: Batch, causal: bool, attention_dropout: float
):
    model = build(dataclasses.replace(config, causal=causal, attention_dropout=attention_dropout))
    ones = torch.ones_like(batch["segments"])
    torch.testing.assert_close(
        predict(model, **{**batch, "segments": None}), predict(model, **{**batch, "segments": ones})
    )


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_sequences_packed_in_a_row_do_not_see_each_other(
    config: bert.Config, build: Build, batch: Batch, attention_dropout: float
):
    model = build(dataclasses.replace(config, dropout=0.0, attention_dropout=attention_dropout))
    batch = {**batch, "predicted": torch.arange(20).expand(4, 20)}
    before = predict(model, **batch)
    batch["tokens"] = torch.where(batch["segments"] == 2, 1, batch["tokens"])
    after = predict(model, **batch)
    changed = (before != after).any(-1)
    assert torch.equal(changed, batch["segments"] == 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_step_is_the_same_however_the_batch_is_split(
    config: bert.Config, build: Build, batch: Batch, checkpointing: bool
):
    model = build(config)
    predict(model, **batch).square().sum().backward()
    whole = gradients(model)
    model.zero_grad()
    model.activation_checkpointing = checkpointing
    for part in (slice(0, 1), slice(1, 4)):
        predict(model, **rows(batch, part)).square().sum().backward()
    for name, gradient in gradients(model).items():
        largest = float(whole[name].abs().max())
        torch.testing.assert_close(gradient, whole[name], rtol=0, atol=5e-6 * largest, msg=name)


def test_each_dropout_probability_acts_in_training_only(
    config: bert.Config, build: Build, batch: Batch
):
    no_dropout = dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
    reference = predict(build(no_dropout), **batch)
    for name in ("dropout", "attention_dropout"):
        model = build(dataclasses.replace(no_dropout, **{name: 0.1}))
        assert (predict(model, **batch) != reference).any()
        assert torch.equal(predict(model, **{**batch, "dropout_key": None}), reference)
        assert torch.equal(predict(model.eval(), **batch), reference)


def test_dropout_differs_between_layers_and_rows(config: bert.Config, build: Build, batch: Batch):
    model = build(config)
    alike = {name: values[:1].expand(2, -1) for name, values in batch.items() if values.ndim == 2}
    masks = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: masks.append(inputs[3].keys))
    out = predict(model, **alike, dropout_key=batch["dropout_key"][:2])
    assert (out[0] != out[1]).any()
    keys = torch.cat(masks).flatten()
    assert keys.unique().numel() == keys.numel() == 2 * 3 * 2


def test_eager_attention_computes_what_the_fused_kernel_does(
    config: bert.Config, build: Build, batch: Batch
):
    fused = build(dataclasses.replace(config, dropout=0.0, attention_dropout=0.0))
    eager = build(
        dataclasses.replace(config, dropout=0.0, attention_dropout=1e-12)
    )  # rounds to no position at all
    torch.testing.assert_close(
        predict(eager, **batch), predict(fused, **batch), rtol=1e-5, atol=1e-6
    )


def test_token_types_default_to_0(config: bert.Config, build: Build, batch: Batch):
    model = build(config)
    zeros = torch.zeros_like(batch["tokens"])
    torch.testing.assert_close(predict(model, **batch), predict(model, **batch, token_types=zeros))
    assert (predict(model, **batch) != predict(model, **batch, token_types=zeros + 1)).any()


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_padding_and_bf16_give_no_nan(
    config: bert.Config, build: Build, batch: Batch, attention_dropout: float
):
    model = build(dataclasses.replace(config, attention_dropout=attention_dropout))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = predict(model, **batch)
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "pre"},
        {"norm": "pre", "activation": "geglu", "tied": False},
        {"activation": "gelu_tanh"},
        {"activation": "relu", "type_vocab": 1},
        {"layers": 1, "heads": 1, "attention_dropout": 0.0},
    ],
)
def test_variants_learn_and_reload(
    config: bert.Config, build: Build, batch: Batch, change: dict[str, object]
):
    config = dataclasses.replace(config, **change)
    model = build(config)
    labels = torch.arange(20).view(4, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(predict(model, **batch).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(gradient is not None for gradient in gradients(model).values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    other = build(config, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(predict(model, **batch), predict(other, **batch))


@pytest.mark.long
def test_compiles_to_one_graph_once(config: bert.Config, build: Build, batch: Batch):
    model = build(config)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):  # another step: other tokens, other keys
            torch.testing.assert_close(predict(compiled, **batch), predict(model, **batch))
            batch = {name: values.flip(0) for name, values in batch.items()}
    torch._dynamo.reset()


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_by_its_units(
    config: bert.Config, build: Build, batch: Batch, tied: bool, checkpointing: bool
):
    config = dataclasses.replace(config, tied=tied)
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
        ({"heads": 5}, "width 32 is not a multiple of heads 5. Use heads=4"),
        ({"layers": 0}, "layers is 0. Use 1 or more"),
        ({"dropout": 1.0}, r"dropout is 1.0. Use a number in \[0, 1\)"),
        ({"attention_dropout": float("nan")}, "attention_dropout is nan"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0. Use a number above 0"),
    ],
)
def test_wrong_settings_are_refused(config: bert.Config, change: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **change)

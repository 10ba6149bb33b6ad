"""Predicted throughput: rooflines by hand, communication, published figures, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.throughput import ANCHORS
from samestep.config import load
from samestep.errors import ConfigError
from tests.integration.commands import Samestep
from trainer.inspect.plan.datasheets import DEVICES
from trainer.inspect.plan.fusion import COMPILED, EAGER, FUSED, Kernel
from trainer.inspect.plan.host import HostRates
from trainer.inspect.plan.roofline import ENQUEUE, GAP, INTEGER, SheetRates, estimate
from trainer.inspect.plan.throughput import Prediction, Predictor, implementations
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment

_H100 = SheetRates(DEVICES["h100"])


def _predict(
    file: str, device: str, devices: int, strategy: str, *overrides: str
) -> dict[str, Prediction]:
    experiment = load(Experiment, file, ["training.precision=bf16", *overrides])
    predictor = Predictor(experiment, Step(experiment, on_cpu=False), devices, strategy)
    ((_, found),) = predictor.predictions(experiment.resolved_phases(), [device])
    return {each.implementation: each for each in found}


def test_a_kernel_takes_the_larger_of_arithmetic_and_traffic() -> None:
    product = Kernel("products", False, flops=989e12 * 0.62, nbytes=1)
    assert _H100.seconds(product, "bf16", EAGER) == pytest.approx(1 + GAP)
    in_fp8 = replace(FUSED, speedup=2)
    assert _H100.seconds(product, "bf16", in_fp8) == pytest.approx(0.5 + 2 * GAP)
    converted = replace(product, reads=2.0e12)  # read in 16 bits, written in 8
    assert _H100.seconds(converted, "bf16", in_fp8) == pytest.approx(0.5 + 1.0 + 2 * GAP)
    assert _H100.seconds(product, "fp32", EAGER) == pytest.approx(989 / 67 + GAP)
    moved = Kernel("elementwise", False, flops=0, nbytes=3.0e12, launches=2)
    assert _H100.seconds(moved, "bf16", COMPILED) == pytest.approx(1 + 2 * GAP)
    hashes = 16.7e12 * INTEGER
    attention = Kernel("attention", True, flops=184e12, nbytes=1, attends=True, hashes=hashes)
    assert _H100.seconds(attention, "bf16", FUSED) == pytest.approx(1 + 1 + GAP)


def test_the_host_may_be_slower_than_the_device() -> None:
    small = [Kernel("elementwise", False, flops=0, nbytes=1)] * 1000
    found = estimate(small, _H100, "bf16", EAGER)
    assert found.total == pytest.approx(1000 * ENQUEUE)
    assert found.waiting == pytest.approx(1000 * (ENQUEUE - GAP), rel=1e-3)
    twice = found * 2 + found
    assert (twice.launches, twice.total) == (3000, pytest.approx(3 * found.total))
    # Programs that are compiled as a whole are not launched kernel by kernel.
    assert estimate(small, SheetRates(DEVICES["v5e"]), "bf16", COMPILED).total < 1e-6


def test_the_cpu_computes_copies_and_asks_for_memory() -> None:
    rates = HostRates(1e9, 1e8, 1e10, 1e9, 1e9, {"gelu": 1e6}, dispatch=0.0)

    def seconds(kernel: Kernel, name: str) -> float:
        return rates.seconds(replace(kernel, operators=(name,)), "fp32", EAGER)

    assert seconds(Kernel("products", False, 1e9, 8), "mm") == 1
    assert seconds(Kernel("attention", False, 1e9, 8), "bmm") == 10
    small = Kernel("elementwise", False, 0, 8e6, largest=4e6)
    assert seconds(small, "add") == pytest.approx(8e6 / 1e10)  # in the cache
    assert seconds(small, "gelu") == pytest.approx(1)
    large = Kernel("elementwise", False, 0, 8e8, largest=4e8)
    assert seconds(large, "add_") == pytest.approx(0.8)
    assert seconds(large, "add") == pytest.approx(0.8 + 0.4)  # its result is new memory


def test_implementations_of_devices() -> None:
    assert list(implementations("h100")) == ["eager", "compiled", "fused"]
    assert list(implementations("v6e")) == ["compiled", "fused"]
    assert all(how.whole for how in implementations("v6e").values())
    assert list(implementations("cpu")) == ["eager"]


@pytest.mark.long
def test_a_step_is_its_micro_batches_and_its_update(experiment_file: str) -> None:
    one, two = (
        _predict(
            experiment_file,
            "a100",
            1,
            "single",
            "training.global_batch_size=16",
            f"training.micro_batch_size={size}",
        )["compiled"]
        for size in (16, 8)
    )
    assert [(each.micro_batch, each.micro_batches) for each in (one, two)] == [(16, 1), (8, 2)]
    assert one.sequences == pytest.approx(16 / one.seconds)
    assert one.tokens == pytest.approx(32 * one.sequences)
    assert two.step.launches > 1.8 * one.step.launches
    assert two.step.seconds["optimizer"] == one.step.seconds["optimizer"]
    # Only later micro-batches add to gradients.
    assert two.step.seconds["other"] > 2 * one.step.seconds["other"]
    assert one.hours == pytest.approx(
        one.seconds * load(Experiment, experiment_file).training.steps / 3600
    )
    assert one.communication == 0


@pytest.mark.long
def test_gradients_are_sent_beside_the_backward_pass(experiment_file: str) -> None:
    batch = ("training.global_batch_size=4096", "training.micro_batch_size=256")
    near = _predict(experiment_file, "h100", 8, "ddp", *batch)["compiled"]
    elements = sum(
        each.elements
        for each in Step(load(Experiment, experiment_file), on_cpu=True).parameters.values()
    )
    sent = 2 * 4 * elements * 7 / 8
    assert near.communication == pytest.approx(sent / (450e9 * 0.8))
    assert 0 <= near.exposed < near.communication
    # Rings of 16 devices leave a node by its eight cards, and HSDP's reductions by one each.
    far = _predict(experiment_file, "h100", 16, "ddp", *batch)["compiled"]
    sent = 2 * 4 * elements * 15 / 16
    assert far.communication == pytest.approx(sent / (min(450, 8 * 50) * 1e9 * 0.8))
    copies = _predict(experiment_file, "h100", 16, "hsdp", *batch)["compiled"]
    assert copies.communication > 0
    # Each device updates its part.
    whole, part = near.step.seconds["optimizer"], copies.step.seconds["optimizer"]
    assert part < whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "overrides", "grows"),
    [
        ("h100", [], True),
        ("h100", ["accelerator={kind: cuda, fused_attention: false}"], False),
        ("h100", ["model.heads=4"], False),  # no block sizes for heads of 16
        ("v5e", [], False),
    ],
    ids=["GPU", "off", "width", "TPU"],
)
def test_fused_attention_leaves_memory_for_larger_micro_batches(
    experiment_file: str,
    device: str,
    overrides: list[str],
    grows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(DEVICES, device, replace(DEVICES[device], gibibytes=0.5))
    model = "{kind: bert, vocab_size: 600, layers: 2, width: 64, heads: 2, ffn_width: 128, "
    settings = [
        "accelerator=null",
        f"model={model} max_positions: 512, attention_dropout: 0.1}}",
        "data.sequence_length=512",
        "training.global_batch_size=512",
        "training.micro_batch_size=auto",
    ]
    found = _predict(experiment_file, device, 1, "single", *settings, *overrides)
    assert all(each.micro_batch < 512 for each in found.values())
    larger = found["fused"].micro_batch > 2 * found["compiled"].micro_batch
    assert larger == grows
    assert grows or found["fused"].micro_batch == found["compiled"].micro_batch


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if "MLPerf" in name else pytest.mark.exhaustive)
        for name in ANCHORS
    ],
)
def test_published_throughput_is_predicted_within_a_quarter(name: str) -> None:
    anchor = ANCHORS[name]
    assert anchor.predict() == pytest.approx(anchor.published, rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        "bert",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in (
                *("deberta", "deberta_v3", "albert", "electra", "gpt1", "gpt2", "modernbert"),
                *("roberta", "spanbert", "t5", "xlnet"),
            )
        ),
    ],
)
def test_every_family_is_predicted(family: str) -> None:
    names = {"gpt1": "gpt1", "gpt2": "gpt2_small"}
    file = f"configs/pretrain/{names.get(family, family + '_base')}.yaml"
    experiment = load(Experiment, file, ["model.layers=2", "training.micro_batch_size=2"])
    predictor = Predictor(experiment, Step(experiment, on_cpu=False), 8, "fsdp")
    for _, found in predictor.predictions(experiment.resolved_phases(), ["h100"]):
        eager, compiled, fused = found
        assert 0 < eager.sequences <= compiled.sequences
        assert eager.sequences < fused.sequences
        assert 0 < eager.mfu < fused.mfu < 0.62


@pytest.mark.long
def test_the_command_prints_tables_and_json(experiment_file: str, samestep: Samestep) -> None:
    plan = ("plan", experiment_file, "--devices", "2", "training.precision=bf16")
    shown = samestep(*plan, "--throughput", "h100", "--price", "2.5", "--strategy", "ddp").out
    assert "Predicted throughput, length 32, bf16, ddp on 2" in shown
    assert shown.count("H100 SXM") == 3 * 3  # rows of two tables, and lines about the run
    assert "…" not in shown  # the tables fit a terminal of 80 columns
    assert "for 2 at 2.5 an hour each" in " ".join(shown.split())
    tree = json.loads(samestep(*plan, "--throughput", "--json").out)
    (phase,) = tree["phases"]
    assert tree["strategy"] == load(Experiment, experiment_file).strategy.plan
    assert len(phase["predictions"]) == len(tree["run"]) == 4 * 3 + 3 * 2
    for each in phase["predictions"]:
        parts = each["step"]["seconds"].values()
        exposed = each["step"]["waiting"] + each["exposed"]
        assert each["seconds"] == pytest.approx(sum(parts) + exposed)
    several = json.loads(samestep(*plan[:3], "1,2", *plan[4:], "--throughput", "--json").out)
    assert [each["devices"] for each in several] == [1, 2]
    assert several[1] == tree
    # A setting after the option is no device.
    both = json.loads(
        samestep(
            "plan",
            experiment_file,
            "--devices",
            "2",
            "--json",
            "--throughput",
            "training.precision=bf16",
        ).out
    )
    assert both["run"] == tree["run"]


@pytest.mark.long
def test_the_cpu_is_measured(experiment_file: str, samestep: Samestep) -> None:
    plan = ("plan", experiment_file, "--throughput", "cpu", "--json", "--devices")
    tree = json.loads(samestep(*plan, "1").out)
    (found,) = tree["phases"][0]["predictions"]
    assert (found["device"], found["implementation"]) == ("CPU", "eager")
    assert found["sequences"] > 0
    assert "Use --devices 1" in samestep(*plan, "2").message


def test_mistakes_are_named(experiment_file: str, samestep: Samestep) -> None:
    plan = ("plan", experiment_file, "--devices", "2")
    message = samestep(*plan, "--throughput", "h101").message
    assert message.startswith("--throughput h101 is unknown. Use a100, h100, h200, b200, v4, v5e, ")
    assert "cpu" in message
    assert "--price is -1.0" in samestep(*plan, "--throughput", "h100", "--price", "-1").message
    assert "Add --throughput" in samestep(*plan, "--price", "2").message


def test_a_model_that_is_too_large_is_marked(experiment_file: str) -> None:
    experiment = load(
        Experiment, experiment_file, ["training.precision=bf16", "training.micro_batch_size=auto"]
    )
    predictor = Predictor(experiment, Step(experiment, on_cpu=False), 1, "single")
    tiny = replace(DEVICES["v5e"], gibibytes=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "v5e", tiny)
        ((_, found),) = predictor.predictions(experiment.resolved_phases(), ["v5e"])
    assert not any(each.fits for each in found)


def test_unknown_devices_are_refused_before_anything_is_traced() -> None:
    from trainer.inspect.plan.throughput import check_device

    check_device("cpu")
    with pytest.raises(ConfigError, match="Use a100, h100"):
        check_device("a10")

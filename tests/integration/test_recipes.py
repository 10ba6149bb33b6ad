"""What each recipe under configs/pretrain promises, stated independently of the code that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.config import load
from trainer.examples import Examples, Vocabulary
from trainer.experiment import Experiment
from trainer.phases import phase_of

FOLDER = Path("configs/pretrain")
Rate = Callable[[int], float]


def decay(
    peak: float,
    warmup: int,
    steps: int,
    power: float = 1.0,
    last: float = 0.0,
    first: int = 0,
    begin: int | None = None,
) -> Rate:
    """Linear warm-up to `peak`, then down to `last` of it by a power of the share of steps left since `begin`."""
    begin = warmup if begin is None else begin

    def rate(step: int) -> float:
        if (step := step - first) < warmup:
            return peak * step / warmup
        return peak * (last + (1 - last) * ((steps - step) / (steps - begin)) ** power)

    return rate


def bert(peak: float = 1e-4) -> Rate:
    return decay(peak, 10_000, 1_000_000, begin=0)


def in_turn(border: int, before: Rate, after: Rate) -> Rate:
    return lambda step: before(step) if step < border else after(step)


BERT_ADAM = {"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": False}
ADAM = {"kind": "adamw", "betas": (0.9, 0.98), "eps": 1e-6, "bias_correction": True}
LAMB = {"kind": "lamb", "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": True, "max_trust_ratio": None}


@dataclass(frozen=True)
class Promise:
    """What a recipe says of itself.

    Attributes:
        parameters: of the model, as transformers counts them where it has such a model.
        batches: (steps, examples of a step, cells of an example) of each phase.
        rate: the learning rate of a step.
        masked: share of the tokens that are predicted.
        decay: of the weights.
        clip: the norm that gradients are clipped to.
        optimizer: its kind and settings.
    """

    parameters: int
    batches: tuple[tuple[int, int, int], ...]
    rate: Rate
    masked: float = 0.15
    decay: float = 0.01
    clip: float | None = 1.0
    optimizer: Mapping[str, object] = field(default_factory=lambda: BERT_ADAM)


SEQUENCES = ((900_000, 256, 128), (100_000, 256, 512))
TOKENS = ((900_000, 1024, 128), (100_000, 256, 512))
LARGE = 336_226_108


def ladder(batch: int, steps: int, peak: float, warmup: int) -> Promise:
    phases = ((steps * 9 // 10, batch, 128), (steps - steps * 9 // 10, batch, 512))
    return Promise(LARGE, phases, decay(peak, warmup, steps, begin=0), optimizer={**LAMB, "variant": "paper"})


PROMISES = {
    "bert_tiny": Promise(4_433_468, SEQUENCES, bert()),
    "bert_mini": Promise(11_267_900, SEQUENCES, bert()),
    "bert_small": Promise(29_058_876, SEQUENCES, bert()),
    "bert_medium": Promise(41_668_412, SEQUENCES, bert()),
    "bert_base": Promise(110_106_428, SEQUENCES, bert()),
    "bert_large": Promise(LARGE, SEQUENCES, bert()),
    "bert_base_131k": Promise(110_106_428, TOKENS, bert()),
    "bert_large_131k": Promise(LARGE, TOKENS, bert()),
    "bert_large_lamb": Promise(
        LARGE,
        ((7038, 65_536, 128), (1563, 32_768, 512)),
        in_turn(7038, decay(6e-3, 2001, 7038, 0.5, begin=0), decay(4e-3, 200, 1563, 0.5, first=7038, begin=0)),
        optimizer={**LAMB, "variant": "nvidia"},
    ),
    "bert_large_lamb_512": ladder(512, 1_000_000, 5e-3 / 2**3.0, 3125),
    "bert_large_lamb_1k": ladder(1024, 500_000, 5e-3 / 2**2.5, 3125),
    "bert_large_lamb_2k": ladder(2048, 250_000, 5e-3 / 2**2.0, 3125),
    "bert_large_lamb_4k": ladder(4096, 125_000, 5e-3 / 2**1.5, 3125),
    "bert_large_lamb_8k": ladder(8192, 62_500, 5e-3 / 2**1.0, 3125),
    "bert_large_lamb_16k": ladder(16_384, 31_250, 5e-3 / 2**0.5, 3125),
    "bert_large_lamb_32k": ladder(32_768, 15_625, 5e-3, 3125),
    "bert_base_no_nsp": Promise(109_514_298, SEQUENCES, bert()),
    "bert_base_ltr": Promise(109_514_298, SEQUENCES, bert(), masked=1.0),
    "bert_l3_a12": Promise(46_315_580, SEQUENCES, bert()),
    "bert_l6_a12": Promise(67_579_196, SEQUENCES, bert()),
    "bert_l6_a3": Promise(67_579_196, SEQUENCES, bert()),
    "bert_base_fast": Promise(
        109_532_736,
        ((70_000, 4096, 128),),
        decay(5e-4, 4200, 70_000, last=0.02),
        masked=0.3,
        decay=0.02,
        clip=None,
        optimizer=ADAM,
    ),
    "bert_base_24h_24gb": Promise(
        111_255_296,
        ((2000, 1536, 128), (2000, 3072, 128), (2000, 4608, 128), (4000, 8192, 128)),
        decay(1e-3, 5000, 10_000),
        masked=0.25,
        clip=0.5,
        optimizer={**ADAM, "eps": 1e-12},
    ),
    "roberta_base": Promise(
        124_697_433, ((500_000, 8192, 512),), decay(6e-4, 24_000, 500_000), clip=None, optimizer=ADAM
    ),
    "roberta_base_2k": Promise(
        124_697_433, ((125_000, 2048, 512),), decay(5e-4, 10_000, 125_000), clip=None, optimizer=ADAM
    ),
    "roberta_large": Promise(
        355_412_057, ((500_000, 8192, 512),), decay(4e-4, 30_000, 500_000), clip=None, optimizer=ADAM
    ),
}

recipes = pytest.mark.parametrize("name", sorted(PROMISES))


@cache
def recipe(name: str) -> Experiment:
    return load(Experiment, FOLDER / f"{name}.yaml")


def test_every_recipe_has_a_promise() -> None:
    assert sorted(PROMISES) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@recipes
def test_parameters_and_what_decays(name: str) -> None:
    """The count of parameters, and matrices decay while biases and norms do not, all of them in one of two groups."""
    experiment, promise = recipe(name), PROMISES[name]
    with torch.device("meta"):
        model = experiment.model.build()
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == promise.parameters

    groups = experiment.optimizer.build(parameters.items()).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    expected = {
        id(parameter): 0.0 if name.endswith("bias") or "norm" in name else promise.decay
        for name, parameter in parameters.items()
    }
    assert decays == expected


@recipes
def test_batches_optimizer_and_clipping(name: str) -> None:
    experiment, promise = recipe(name), PROMISES[name]
    found = [(p.end - p.first_step, p.global_batch_size, p.sequence_length) for p in experiment.resolved_phases()]
    assert tuple(found) == promise.batches
    assert experiment.training.max_grad_norm == promise.clip
    kind = type(experiment.optimizer).__module__.rpartition(".")[2]
    settings = {"kind": kind, **vars(experiment.optimizer)}
    assert {name: settings[name] for name in promise.optimizer} == promise.optimizer


@recipes
def test_learning_rate_at_ten_steps(name: str) -> None:
    experiment, promise = recipe(name), PROMISES[name]
    phases, steps = experiment.resolved_phases(), experiment.training.steps
    edges = {p.first_step for p in phases} | {p.end - 1 for p in phases}
    for step in sorted(edges | {steps * i // 8 for i in range(1, 8)} | {1, 100}):
        phase = phase_of(phases, step)
        peak = experiment.optimizer.lr if phase.lr is None else phase.lr
        assert peak * phase.lr_fraction(step) == pytest.approx(promise.rate(step), rel=1e-5), step


@recipes
def test_share_of_tokens_that_is_predicted(name: str) -> None:
    experiment, promise = recipe(name), PROMISES[name]
    size = experiment.model.vocab_size
    vocabulary = Vocabulary(size=size, pad=0, cls=1, sep=2, mask=3, special=(0, 1, 2, 3))
    objective = experiment.objective.build(vocabulary)
    for phase in experiment.resolved_phases():
        batch = objective.collate(_examples(phase.sequence_length), phase.sequence_length)
        tokens = 8 * (phase.sequence_length - 3)
        assert batch["weights"].sum() / tokens == pytest.approx(promise.masked, abs=0.02)


def _examples(length: int) -> Examples:
    """Eight rows of two pieces, A and B, with no cell to spare."""
    room = length - 3
    pieces = np.tile([room // 2, room - room // 2], 8)
    return Examples(
        tokens=np.random.default_rng(0).integers(4, 30_000, size=8 * room, dtype=np.int32),
        row=np.repeat(np.arange(8), 2),
        column=np.tile([1, 2 + room // 2], 8),
        length=pieces,
        key=np.arange(8, dtype=np.uint64),
        weight=np.ones(8, dtype=np.float32),
        isolated=False,
        random=np.arange(8) % 2 == 0,
    )

"""The properties of each recipe under configs/pretrain, stated independently of the code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.config import kind_name, load
from samestep.examples import Examples, PackSpec, Vocabulary
from trainer.optim import Structure
from trainer.training.experiment import Experiment
from trainer.training.phases import phase_of
from trainer.training.run import train

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
    """Linear warm-up to `peak`, then down to `last` of it by a power of the share of steps left
    since `begin`.
    """
    begin = warmup if begin is None else begin

    def rate(step: int) -> float:
        if (step := step - first) < warmup:
            return peak * step / warmup
        return peak * (last + (1 - last) * ((steps - step) / (steps - begin)) ** power)

    return rate


def bert(peak: float = 1e-4) -> Rate:
    return decay(peak, 10_000, 1_000_000, begin=0)


def inverse_sqrt(step: int) -> float:
    """T5's, in mesh-tensorflow and t5x."""
    return 1 / math.sqrt(max(step, 10_000))


def cosine(peak: float, last: float, warmup: int, steps: int, first: float = 0.0) -> Rate:
    """Linear warm-up from a share of `peak`, then half a cosine to `last`."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (first + (1 - first) * step / warmup)
        return (
            last + (peak - last) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        )

    return rate


def slanted(peak: float, steps: int, cut: float = 0.1, ratio: float = 32) -> Rate:
    """Slanted triangular rates (Howard & Ruder 2018, equation 3)."""

    def rate(step: int) -> float:
        top = steps * cut
        p = step / top if step < top else 1 - (step - top) / (top * (1 / cut - 1))
        return peak * (1 + p * (ratio - 1)) / ratio

    return rate


def in_turn(border: int, before: Rate, after: Rate) -> Rate:
    return lambda step: before(step) if step < border else after(step)


BERT_ADAM = {"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": False}
ADAM = {"kind": "adamw", "betas": (0.9, 0.98), "eps": 1e-6, "bias_correction": True}
ADAFACTOR = {
    "kind": "adafactor",
    "scale_by_rms": True,
    "clip_threshold": 1.0,
    "decay_rate": 0.8,
    "beta1": 0.0,
    "eps": 1e-30,
}
LAMB = {
    "kind": "lamb",
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "bias_correction": True,
    "max_trust_ratio": None,
}


@dataclass(frozen=True)
class Promise:
    """What a recipe says of itself.

    Attributes:
        parameters: of the model, as transformers counts them where it has such a model.
        batches: (steps, examples of a step, positions of an example) of each phase.
        rate: the learning rate of a step.
        masked: share of the tokens that are predicted.
        sides: positions of sources and of targets in an example that has both; none of them is
            padding unless `padded`.
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
    sides: tuple[int, int] | None = None
    padded: bool = False


SEQUENCES = ((900_000, 256, 128), (100_000, 256, 512))
TOKENS = ((900_000, 1024, 128), (100_000, 256, 512))
LARGE = 336_226_108


def ladder(batch: int, steps: int, peak: float, warmup: int) -> Promise:
    phases = ((steps * 9 // 10, batch, 128), (steps - steps * 9 // 10, batch, 512))
    return Promise(
        LARGE, phases, decay(peak, warmup, steps, begin=0), optimizer={**LAMB, "variant": "paper"}
    )


def t5(parameters: int, steps: int = 1_000_000, batch: int = 2048) -> Promise:
    return Promise(
        parameters,
        ((steps, batch, 512),),
        inverse_sqrt,
        decay=0.0,
        clip=None,
        optimizer=ADAFACTOR,
        sides=(512, 114),
    )


def albert(parameters: int) -> Promise:
    optimizer = {**LAMB, "variant": "nvidia", "bias_correction": False}
    rate = decay(1.76e-3, 3125, 125_000, begin=0)
    return Promise(parameters, ((125_000, 4096, 512),), rate, optimizer=optimizer)


def electra(
    parameters: int, steps: int, batch: int, length: int, peak: float, masked: float = 0.15
) -> Promise:
    """With the generator; `tests/parity/test_electra.py` counts the discriminators."""
    rate = decay(peak, 10_000, steps, begin=0)
    return Promise(parameters, ((steps, batch, length),), rate, masked=masked)


def spanbert(parameters: int) -> Promise:
    """With the parameters of the span-boundary head, which the paper does not count."""
    optimizer = {"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
    return Promise(
        parameters,
        ((2_400_000, 256, 512),),
        decay(1e-4, 10_000, 2_400_000),
        decay=0.1,
        optimizer=optimizer,
    )


def deberta(parameters: int) -> Promise:
    """With the positions of the enhanced mask decoder, which transformers does not have."""
    return Promise(
        parameters,
        ((1_000_000, 2048, 512),),
        decay(2e-4, 10_000, 1_000_000),
        optimizer={**BERT_ADAM, "bias_correction": True},
    )


def deberta_v3(parameters: int, peak: float) -> Promise:
    """With the generator, which has half of the layers."""
    rate = decay(peak, 10_000, 500_000)
    optimizer = {**BERT_ADAM, "betas": (0.9, 0.98), "bias_correction": True}
    return Promise(parameters, ((500_000, 8192, 512),), rate, optimizer=optimizer)


def bart(parameters: int, peak: float, warmup: int) -> Promise:
    """With a bias of the logits, which transformers does not count."""
    return Promise(
        parameters + 50_265,
        ((500_000, 8000, 512),),
        decay(peak, warmup, 500_000),
        masked=1.0,
        padded=True,
        clip=None,
        optimizer=ADAM,
        sides=(512, 512),
    )


ELMO_FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))

PROMISES = {
    "bert_tiny": Promise(4_433_468, TOKENS, bert()),
    "bert_mini": Promise(11_267_900, TOKENS, bert()),
    "bert_small": Promise(29_058_876, TOKENS, bert()),
    "bert_medium": Promise(41_668_412, TOKENS, bert()),
    "bert_base": Promise(110_106_428, TOKENS, bert()),
    "bert_large": Promise(LARGE, TOKENS, bert()),
    "bert_base_256": Promise(110_106_428, SEQUENCES, bert()),
    "bert_large_256": Promise(LARGE, SEQUENCES, bert()),
    "bert_large_lamb": Promise(
        LARGE,
        ((7038, 65_536, 128), (1563, 32_768, 512)),
        in_turn(
            7038,
            decay(6e-3, 2001, 7038, 0.5, begin=0),
            decay(4e-3, 200, 1563, 0.5, first=7038, begin=0),
        ),
        optimizer={**LAMB, "variant": "nvidia"},
    ),
    "bert_large_lamb_512": ladder(512, 1_000_000, 5e-3 / 2**3.0, 3125),
    "bert_large_lamb_1k": ladder(1024, 500_000, 5e-3 / 2**2.5, 3125),
    "bert_large_lamb_2k": ladder(2048, 250_000, 5e-3 / 2**2.0, 3125),
    "bert_large_lamb_4k": ladder(4096, 125_000, 5e-3 / 2**1.5, 3125),
    "bert_large_lamb_8k": ladder(8192, 62_500, 5e-3 / 2**1.0, 3125),
    "bert_large_lamb_16k": ladder(16_384, 31_250, 5e-3 / 2**0.5, 3125),
    "bert_large_lamb_32k": ladder(32_768, 15_625, 5e-3, 3125),
    "bert_base_no_nsp": Promise(109_514_298, TOKENS, bert()),
    "bert_base_ltr": Promise(109_514_298, TOKENS, bert(), masked=1.0),
    "bert_l3_a12": Promise(46_315_580, TOKENS, bert()),
    "bert_l6_a12": Promise(67_579_196, TOKENS, bert()),
    "bert_l6_a3": Promise(67_579_196, TOKENS, bert()),
    "bert_l12_1024": Promise(185_071_420, TOKENS, bert()),
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
        124_697_433,
        ((500_000, 8192, 512),),
        decay(6e-4, 24_000, 500_000),
        clip=None,
        optimizer=ADAM,
    ),
    "roberta_base_mixture": Promise(
        124_697_433,
        ((500_000, 8192, 512),),
        decay(6e-4, 24_000, 500_000),
        clip=None,
        optimizer=ADAM,
    ),
    "roberta_base_2k": Promise(
        124_697_433,
        ((125_000, 2048, 512),),
        decay(5e-4, 10_000, 125_000),
        clip=None,
        optimizer=ADAM,
    ),
    "roberta_large": Promise(
        355_412_057,
        ((500_000, 8192, 512),),
        decay(4e-4, 30_000, 500_000),
        clip=None,
        optimizer=ADAM,
    ),
    "albert_base": albert(11_813_810),
    "albert_large": albert(17_847_474),
    "albert_xlarge": albert(59_021_490),
    "albert_xxlarge": albert(223_158_450),
    "electra_small": electra(14_196_219, 1_000_000, 128, 128, 5e-4),
    "electra_base": electra(119_386_427, 766_000, 256, 512, 2e-4),
    "electra_large": electra(354_655_291, 1_750_000, 2048, 512, 2e-4, masked=0.25),
    "spanbert_base": spanbert(110_272_484),
    "spanbert_large": spanbert(336_970_980),
    "xlnet_base": Promise(
        116_750_336, ((1_000_000, 256, 512),), decay(1e-4, 10_000, 1_000_000), masked=1 / 6
    ),
    "xlnet_large": Promise(
        360_300_800, ((500_000, 8192, 512),), decay(4e-4, 40_000, 500_000), masked=1 / 6
    ),
    "deberta_base": deberta(139_637_337),
    "deberta_large": deberta(406_789_209),
    "deberta_v3_base": deberta_v3(326_447_461, 6e-4),
    "deberta_v3_large": deberta_v3(719_100_005, 3e-4),
    "modernbert_base": Promise(
        149_655_232,
        (
            *((12_716, 768, 1024), (6358, 1536, 1024), (4239, 2304, 1024), (3179, 3072, 1024)),
            *((2543, 3840, 1024), (353_707, 4608, 1024)),
        ),
        lambda step: 8e-4 * min(1.0, step / 3815),
        masked=0.3,
        decay=0.0125,
        clip=None,
        optimizer={**ADAM, "kind": "stable_adamw"},
    ),
    "modernbert_base_8k": Promise(
        149_655_232,
        ((423_855, 72, 8192), (84_771, 72, 8192)),
        lambda step: 3e-4 * (1 - math.sqrt(max(0, step - 423_855) / 84_771)),
        masked=0.3,
        decay=0.0333,
        clip=None,
        optimizer={**ADAM, "kind": "stable_adamw"},
    ),
    "neobert_base": Promise(
        245_136_954,
        ((900_000, 2048, 1024), (100_000, 2048, 1024)),
        in_turn(900_000, cosine(6e-4, 6e-5, 2000, 900_000), lambda step: 6e-5),
        masked=0.2,
        decay=0.1,
        optimizer={"kind": "adamw", "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True},
    ),
    "neobert_base_4k": Promise(
        245_136_954,
        ((50_000, 512, 4096),),
        lambda step: 6e-5,
        masked=0.2,
        decay=0.1,
        optimizer={"kind": "adamw", "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True},
    ),
    "bart_base": bart(139_420_416, 6e-4, 24_000),
    "bart_large": bart(406_291_456, 4e-4, 30_000),
    "t5_small": t5(60_506_624),
    "t5_base": t5(222_903_552),
    "t5_base_multi_task": replace(t5(222_903_552, 524_288, 128), sides=(512, 512), padded=True),
    "t5_large": t5(737_668_096),
    "t5_3b": t5(2_851_598_336),
    "t5_11b": t5(11_307_321_344),
    "t5_v1_1_small": t5(76_961_152),
    "t5_v1_1_base": t5(247_577_856),
    "t5_v1_1_large": t5(783_150_080),
    "t5_v1_1_xl": t5(2_849_757_184),
    "t5_v1_1_xxl": t5(11_135_332_352),
    # The mean density of UL2's seven denoisers: three of 15 %, three of 50 %, one of 25 %.
    "ul2_base": replace(
        t5(247_577_856, 500_000, 128), sides=(512, 341), masked=(0.45 + 1.5 + 0.25) / 7, padded=True
    ),
    "nanot5": Promise(
        247_577_856,
        ((65_536, 128, 512),),
        cosine(2e-2, 1e-5, 10_000, 65_536, first=0.5),
        decay=0.0,
        optimizer={
            "kind": "adamw_scale",
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "bias_correction": True,
        },
        sides=(512, 114),
    ),
    "gpt1": Promise(
        116_534_784,
        ((3_000_000, 64, 512),),
        cosine(2.5e-4, 0.0, 2000, 3_000_000),
        masked=1.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    ),
    "lstm_lm": Promise(
        # Both matrices of tokens, the output's bias; the gates, their bias and the projection.
        2 * 30_522 * 512 + 30_522 + 4 * 2048 * (512 + 512 + 1) + 2048 * 512,
        ((1_500_000, 24, 128),),
        decay(1e-3, 2000, 1_500_000),
        masked=1.0,
        decay=0.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    ),
    "awd_lstm": Promise(
        # One matrix of tokens, and the output's bias; the gates of three layers.
        30_522 * 401
        + 4 * (1150 * (400 + 1150 + 1) + 1150 * (1150 + 1150 + 1) + 400 * (1150 + 401)),
        ((160_000, 64, 128),),
        slanted(4e-3, 160_000),
        masked=1.0,
        decay=0.0,
        clip=0.25,
        optimizer={"kind": "adamw", "betas": (0.7, 0.99), "eps": 1e-8, "bias_correction": True},
    ),
    "elmo": Promise(
        793_472 * 513  # the output matrix
        + 4 * (4 * 4096 * (512 + 512 + 1) + 4096 * 512)
        + 259 * 16
        + sum((16 * w + 1) * n for w, n in ELMO_FILTERS)
        + 2 * 2 * (2048 + 1) * 2048
        + (2048 + 1) * 512,
        ((1_000_000, 60, 128),),
        decay(1e-3, 2000, 1_000_000),
        masked=1.0,
        decay=0.0,
        clip=10.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    ),
    "smollm_135m": Promise(
        134_515_008,
        ((572_204, 512, 2048),),
        lambda step: min(decay(3e-3, 2000, 572_204, begin=457_763)(step), 3e-3),
        masked=1.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True},
    ),
    "gpt2_small": Promise(
        124_439_808,
        ((600_000, 480, 1024),),
        cosine(6e-4, 6e-5, 2000, 600_000),
        masked=1.0,
        decay=0.1,
        optimizer={"kind": "adamw", "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True},
    ),
}

recipes = pytest.mark.parametrize("name", sorted(PROMISES))


@cache
def recipe(name: str) -> Experiment:
    return load(Experiment, FOLDER / f"{name}.yaml")


def test_the_recipes_of_roberta_have_fairseqs_initial_weights() -> None:
    """init_bert_params of fairseq: normal_(mean=0, std=0.02), and zeros for the padding token."""
    names = [name for name in PROMISES if name.startswith("roberta")]
    assert len(names) == 4
    for name in names:
        config = recipe(name).model
        with torch.device("meta"):
            model = config.build()
        table = model.initial_values("embeddings.tokens.weight", 0, 1000 * config.width, 0)
        table = table.view(1000, config.width)
        assert not table[1].any()
        others = torch.cat([table[:1], table[2:]])
        assert others.std() == pytest.approx(0.02, rel=0.01)
        assert others.abs().max() > 0.06
        layer = model.initial_values("layers.0.ffn.up.weight", 0, 100_000, 0)
        assert layer.abs().max() > 0.06


def test_every_recipe_has_a_promise() -> None:
    assert sorted(PROMISES) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@recipes
def test_parameters_and_what_decays(name: str) -> None:
    """The count of parameters, and matrices decay while vectors do not, all of them in one
    of two groups.
    """
    experiment, promise = recipe(name), PROMISES[name]
    with torch.device("meta"):
        model = experiment.model.build()
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == promise.parameters

    groups = experiment.optimizer.build(parameters.items()).param_groups
    decays = {
        id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]
    }
    expected = {
        id(parameter): 0.0 if parameter.ndim == 1 else promise.decay
        for parameter in parameters.values()
    }
    assert decays == expected


@recipes
def test_batches_optimizer_and_clipping(name: str) -> None:
    experiment, promise = recipe(name), PROMISES[name]
    found = [
        (p.end - p.first_step, p.global_batch_size, p.sequence_length)
        for p in experiment.resolved_phases()
    ]
    assert tuple(found) == promise.batches
    assert experiment.training.max_grad_norm == promise.clip
    kind = kind_name(experiment.optimizer)
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
    vocabulary = vocabulary_of(experiment.model.vocab_size)
    objective = experiment.objective.build(vocabulary)
    for phase in experiment.resolved_phases():
        spec = objective.pack_spec(phase.sequence_length)
        assert (spec.sides and spec.sides.size) == promise.sides
        rows = 2000 if promise.padded else 8  # its rows differ in what they predict
        batch = objective.collate(_examples(spec, rows), spec.sequence_length)
        predicted, room = (
            batch["labels"][batch["weights"] > 0],
            spec.sequence_length - 3 * spec.prefix,
        )
        if promise.sides is not None:
            if not promise.padded:
                assert predicted.size == rows * promise.sides[1]
                assert (batch["segments"] == 1).all()
            predicted = predicted[~np.isin(predicted, vocabulary.special)]
        assert predicted.size / (rows * room) == pytest.approx(promise.masked, abs=0.02)


def vocabulary_of(size: int) -> Vocabulary:
    """All special tokens that any objective needs."""
    sentinels = tuple(range(size - 1, size - 101, -1))
    return Vocabulary(
        size,
        *(0, 1, 2, 3),
        special=(0, 1, 2, 3, *sentinels),
        continuing=(),
        eos=2,
        sentinels=sentinels,
        full_stops=(4,),
    )


def _examples(spec: PackSpec, rows: int) -> Examples:
    """Rows of two pieces, A and B, with no position to spare."""
    room = spec.sequence_length - 3 * spec.prefix
    pieces = np.tile([room // 2, room - room // 2], rows)
    return Examples(
        tokens=np.random.default_rng(0).integers(4, 28_000, size=rows * room, dtype=np.int32),
        row=np.repeat(np.arange(rows), 2),
        column=np.tile([spec.prefix, 2 * spec.prefix + room // 2], rows),
        length=pieces,
        key=np.arange(rows, dtype=np.uint64),
        weight=np.ones(rows, dtype=np.float32),
        isolated=False,
        random=np.arange(rows) % 2 == 0,
    )


ARCHITECTURES = Path("configs/t5_architectures")
LAYER, CROSS, OTHER = (
    4 * 768**2 + 2 * 768 * 3072 + 2 * 768,
    4 * 768**2 + 768,
    32_128 * 768 + 32 * 12 + 768,
)
PARAMETERS = {
    "encoder_decoder": 24 * LAYER + 12 * CROSS + OTHER + 32 * 12 + 768,
    "shared": 12 * LAYER + 12 * CROSS + OTHER + 32 * 12,
    "half_layers": 12 * LAYER + 6 * CROSS + OTHER + 32 * 12 + 768,
    "language_model": 12 * LAYER + OTHER,
    "prefix_lm": 12 * LAYER + OTHER,
}


def test_there_is_a_file_for_each_architecture_and_objective() -> None:
    names = {
        f"{architecture}_{objective}"
        for architecture in PARAMETERS
        for objective in ("denoising", "lm")
    }
    assert names == {path.stem for path in ARCHITECTURES.glob("*.yaml")}


@pytest.mark.parametrize("objective", ["denoising", "lm"])
@pytest.mark.parametrize("architecture", PARAMETERS)
def test_architectures_of_t5_train(
    architecture: str, objective: str, t5_experiment: str, tmp_path: Path
) -> None:
    """Table 2 of Raffel et al. 2020: so many parameters, 128 texts of about 512 tokens a step.

    A small one trains.
    """
    file = str(ARCHITECTURES / f"{architecture}_{objective}.yaml")
    experiment = load(Experiment, file)
    with torch.device("meta"):
        model = experiment.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[architecture]
    assert experiment.objective.z_loss == 1e-4

    text = (
        experiment.objective.build(vocabulary_of(32_128))
        .pack_spec(experiment.data.sequence_length)
        .sequence_length
    )
    texts = 568 if objective == "denoising" else 512
    assert text * experiment.training.global_batch_size == pytest.approx(128 * texts, rel=0.01)

    small = [
        f"data.path={load(Experiment, t5_experiment).data.path}",
        "data.sequence_length=64",
        "data.lanes=16",
        "model={layers: 1, width: 16, heads: 2, head_width: 8, ffn_width: 32, vocab_size: 700}",
        "training={steps: 2, global_batch_size: 4, precision: fp32, evaluate_every: null, "
        "log_every: 1}",
        "strategy=single",
        "tracking.wandb=null",
    ]
    train(load(Experiment, file, [f"output={tmp_path}", *small]))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(6 < row["train/loss"] < 8 for row in rows)  # about log(700)
    assert [row["step"] for row in rows] == [1, 2]


EMBEDDINGS = {
    "minilm": Promise(
        # Tokens, positions, types and their norm; attention, FFN and both norms of 6 layers.
        (30_522 + 512 + 2 + 2) * 384
        + 6 * (4 * 384 * (384 + 1) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384),
        ((100_000, 1024, 2 * 128),),
        decay(2e-5, 500, 100_000),
        decay=0.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": True},
    ),
    "gte_modernbert": Promise(
        149_014_272,  # ModernBertModel
        ((50_000, 16_384, 2 * 128),),
        decay(2e-4, 2500, 50_000),
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    ),
    "ettin_reranker_150m": Promise(
        149_014_272 + 768 * 768 + 768 + 768 + 1,
        ((math.ceil(143_393_475 / 192), 192, 512),),
        decay(1.5e-5, math.ceil(0.03 * 746_842), 746_842),
        decay=0.0,
        optimizer={"kind": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    ),
}


@pytest.mark.long
def test_recipes_of_embeddings_are_as_published() -> None:
    folder = FOLDER.parent / "embeddings"
    assert sorted(EMBEDDINGS) == sorted(path.stem for path in folder.glob("*.yaml"))
    for name, promise in EMBEDDINGS.items():
        experiment = load(Experiment, folder / f"{name}.yaml")
        with torch.device("meta"):
            model = experiment.model.build()
        assert sum(each.numel() for each in model.parameters()) == promise.parameters
        (phase,) = experiment.resolved_phases()
        found = (phase.end, phase.global_batch_size, phase.sequence_length)
        assert (found,) == promise.batches
        lr = experiment.optimizer.lr
        for step in (1, 100, found[0] // 20, found[0] // 2, found[0] - 1):
            assert lr * phase.lr_fraction(step) == pytest.approx(promise.rate(step), rel=1e-5)
        settings = {"kind": kind_name(experiment.optimizer), **vars(experiment.optimizer)}
        expected = {**promise.optimizer, "weight_decay": promise.decay}
        assert {key: settings[key] for key in expected} == expected
        assert experiment.training.max_grad_norm == promise.clip == 1.0
    minilm, gte = (
        vars(load(Experiment, folder / f"{name}.yaml").objective)
        for name in ("minilm", "gte_modernbert")
    )
    assert 1 / minilm["temperature"] == pytest.approx(20)  # scale=20 of its train_script.py
    assert (minilm["symmetric"], minilm["pool"], minilm["normalize"]) == (True, "mean", True)
    assert (gte["temperature"], gte["pool"], gte["max_length"]) == (0.01, "first", 8192)
    for settings in (minilm, gte):
        assert settings["query_length"] == settings["passage_length"] == 128


FINE_TUNING = FOLDER.parent / "finetune"


@pytest.mark.parametrize(("name", "classes", "rows"), [("imdb", 2, 25_000), ("trec6", 6, 5_452)])
def test_ulmfits_stages(name: str, classes: int, rows: int) -> None:
    """Howard & Ruder 2018, section 4.1: model, rates, unfreezing and epochs of the classifier."""
    texts, task = (
        load(Experiment, FINE_TUNING / f"ulmfit_{stage}.yaml") for stage in (f"{name}_lm", name)
    )
    assert (texts.init_from, task.init_from) == ("runs/awd_lstm", texts.output)
    assert texts.model == recipe("awd_lstm").model
    assert replace(task.model, head="language_model", labels=()) == texts.model
    with torch.device("meta"):
        model = task.model.build()
    assert model.get_parameter("head.dense.weight").shape == (50, 3 * 400)
    assert len(model.get_parameter("head.classifier.weight")) == classes
    epoch = -(-rows // 64)
    assert (task.training.steps, task.training.global_batch_size) == (50 * epoch, 64)
    for experiment, lr in ((texts, 4e-3), (task, 1e-2)):
        steps = experiment.training.steps
        (phase,) = experiment.resolved_phases()
        settings = vars(experiment.optimizer)
        assert (settings["lr"], settings["betas"]) == (lr, (0.7, 0.99))
        assert settings["layer_decay"] == pytest.approx(1 / 2.6, rel=1e-3)
        for step in range(0, steps, steps // 9):
            expected = slanted(lr, steps, cut=experiment.schedule.warmup_steps / steps)(step)
            assert lr * phase.lr_fraction(step) == pytest.approx(expected, rel=1e-5)
        assert experiment.schedule.warmup_steps == int(0.1 * steps)
    structure = Structure.of(model)
    begins = {
        group["begins"]
        for group in task.optimizer.build(model.named_parameters(), structure).param_groups
    }
    assert begins == {0, epoch, 2 * epoch, 3 * epoch, 4 * epoch}

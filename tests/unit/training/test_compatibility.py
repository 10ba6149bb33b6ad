"""Messages about an incompatible model and objective: what is missing, and a setting that helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from trainer.models.families import bart, bert, gpt2, roberta, t5
from trainer.objectives.kinds import (
    causal_lm,
    classification,
    contrastive,
    denoising,
    distillation,
    mlm,
    mlm_nsp,
    prefix_lm,
    seq2seq,
    span_corruption,
    tagging,
)
from trainer.optim.kinds import adamw
from trainer.training.compatibility import (
    check_accelerator,
    check_best,
    check_needs,
    check_precision,
)
from trainer.training.experiment import Experiment
from trainer.training.observers.settings import Best
from trainer.training.settings import Config as TrainingConfig

VOCABULARY = Vocabulary(100, 0, 2, 1, 3, (0, 1, 2, 3), eos=1, sentinels=(98, 99), full_stops=(4,))
SHAPE: dict[str, Any] = {"vocab_size": 100, "layers": 1, "width": 8, "heads": 1, "ffn_width": 8}
CLASSES: dict[str, Any] = {**SHAPE, "head": "classification", "labels": ("a", "b")}
TAGS: dict[str, Any] = {**SHAPE, "head": "tagging", "labels": ("O", "B")}
LEFT_TO_RIGHT = {**SHAPE, "architecture": "language_model"}


def check(model: Any, objective: Any) -> None:
    data = DataConfig("rows", sequence_length=8)
    training = TrainingConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    experiment = Experiment("run", model, objective, data, training, adamw.Config())
    with torch.device("meta"):
        check_needs(experiment, objective.build(VOCABULARY), experiment.build_model())


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (bert.Config(**SHAPE), mlm.Config()),
        (bert.Config(**SHAPE, causal=True), causal_lm.Config()),
        (bert.Config(**SHAPE, also_causal=True), causal_lm.Config()),
        (bert.Config(**SHAPE, also_causal=True), mlm.Config()),
        (bert.Config(**SHAPE, causal=True), span_corruption.Config(layout="language_model")),
        (bert.Config(**SHAPE, causal=True), denoising.Config("bart", layout="language_model")),
        (bert.Config(**SHAPE, nsp=True), mlm_nsp.Config()),
        (t5.Config(**SHAPE, architecture="shared_encoder_decoder"), seq2seq.Config()),
        (t5.Config(**CLASSES), classification.Config(reads="last")),
        (bart.Config(**SHAPE), seq2seq.Config()),
        (bart.Config(**CLASSES), classification.Config(reads="last")),
        (gpt2.Config(**CLASSES), classification.Config(lm_weight=0.5)),
        (
            gpt2.Config(**CLASSES),
            distillation.Config("a", classification.Config(reads="last"), cosine=1.0),
        ),
    ],
)
def test_compatible_parts(model: Any, objective: Any) -> None:
    check(model, objective)


OF_WEIGHTS = (
    ", or with init_from leave model.kind out, which gives the model of the weights that head"
)


@pytest.mark.parametrize(
    ("model", "objective", "message"),
    [
        (
            bert.Config(**SHAPE, causal=True),
            mlm.Config(),
            "bert, offers hidden, next_tokens; set model.causal=false",
        ),
        (
            bert.Config(**SHAPE, causal=True),
            mlm_nsp.Config(),
            "needs tokens, .* set model.causal=false, or choose",
        ),
        (
            roberta.Config(**SHAPE),
            causal_lm.Config(),
            "needs next_tokens, .* set model.causal=true, or choose",
        ),
        (
            bert.Config(**SHAPE),
            mlm_nsp.Config(),
            "needs next_sentence, .* set model.nsp=true, or choose",
        ),
        (
            roberta.Config(**SHAPE),
            mlm_nsp.Config(),
            "offers hidden, tokens; choose another model or objective",
        ),
        (
            bert.Config(**SHAPE),
            prefix_lm.Config(layout="prefix_lm"),
            "offers hidden, tokens; choose another model",
        ),
        (
            bert.Config(**CLASSES),
            mlm.Config(),
            f"set model.head=language_model{OF_WEIGHTS}, or choose",
        ),
        (
            t5.Config(**TAGS),
            seq2seq.Config(),
            f"set model.head=language_model{OF_WEIGHTS}, or choose",
        ),
        (
            bert.Config(**CLASSES),
            tagging.Config(),
            f"set model.head=tagging{OF_WEIGHTS}, or choose",
        ),
        (
            gpt2.Config(**CLASSES),
            tagging.Config(),
            "last_position, next_tokens; choose another model or objective",
        ),
        (
            bert.Config(**SHAPE),
            classification.Config(reads="last"),
            "needs classification, and .*, offers hidden, tokens; "
            f"set model.head=classification{OF_WEIGHTS}",
        ),
        (
            bart.Config(**CLASSES),
            prefix_lm.Config(),
            f"set model.head=language_model{OF_WEIGHTS}, or choose",
        ),
        (
            t5.Config(**LEFT_TO_RIGHT),
            span_corruption.Config(),
            "set model.architecture=encoder_decoder or objective.layout=language_model, or choose",
        ),
        (
            t5.Config(**LEFT_TO_RIGHT),
            distillation.Config("a", seq2seq.Config()),
            "the objective, seq2seq, .* set model.architecture=encoder_decoder or "
            "objective.of.layout=language_model",
        ),
        (
            t5.Config(**LEFT_TO_RIGHT),
            prefix_lm.Config(),
            "set model.architecture=encoder_decoder, or choose",
        ),
        (
            bert.Config(**CLASSES),
            distillation.Config("a", classification.Config(reads="last")),
            "needs last_position, .* set objective.of.reads=first, or choose",
        ),
        (
            bert.Config(**SHAPE, nsp=True),
            mlm.Config(),
            "bert, has parameters for next_sentence, which the objective, mlm, does not train; "
            "set model.nsp=false, or",
        ),
        (
            gpt2.Config(**CLASSES),
            causal_lm.Config(),
            "parameters for classification, which the objective, causal_lm, .*; "
            "set model.head=language_model, or",
        ),
    ],
)
def test_incompatible_parts(model: Any, objective: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(model, objective)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (tagging.Config(metrics=()), "loss, accuracy"),
        (contrastive.Config(), "loss, accuracy"),
        (classification.Config(lm_weight=0.5), "loss, accuracy, class_loss, lm_loss"),
    ],
)
def test_the_best_is_by_a_metric_that_evaluations_have(objective: Any, names: str) -> None:
    def check(metric: str) -> None:
        data = DataConfig("rows", sequence_length=8)
        training = TrainingConfig(steps=1, global_batch_size=1, evaluate_every=1, best=Best(metric))
        model = bert.Config(**TAGS)
        experiment = Experiment("run", model, objective, data, training, adamw.Config())
        check_best(experiment, [objective.build(VOCABULARY)])

    for name in names.split(", "):
        check(name)
    with pytest.raises(ConfigError, match=f"evaluations give {names}; name"):
        check("f1")


def test_hardware_that_compiles_cannot_train_every_run_but_can_evaluate_it() -> None:
    accelerator: Any = SimpleNamespace(description="XLA", compiles=True, has_fp8=False)
    for training, data, message in (
        ({"digest_every": 10}, {}, "training.digest_every is set, and XLA compiles"),
        ({}, {"group_by_length": 4}, "data.group_by_length gives many"),
    ):
        experiment = Experiment(
            "run",
            bert.Config(),
            mlm.Config(),
            DataConfig(path="data", sequence_length=32, packing="padded", **data),
            TrainingConfig(steps=1, **training),
            adamw.Config(lr=1e-3),
        )
        check_precision(experiment, accelerator)  # which is all that an evaluation asks
        with pytest.raises(ConfigError, match=message):
            check_accelerator(experiment, accelerator)

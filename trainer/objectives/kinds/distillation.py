"""Knowledge distillation (Hinton et al. 2015): a student learns the predictions of a teacher.

It wraps the student's own objective, which makes the batches and computes the scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.config import Kinds, kind_name
from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.metrics.per_class import ClassReport
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives import (
    Loss,
    Objective,
    ObjectiveConfig,
    Predictions,
    Task,
    Taught,
    Tensors,
    adapted_inside,
)
from trainer.objectives.class_weights import ClassLossConfig
from trainer.objectives.kinds import classification, tagging
from trainer.objectives.rows import Float32, Int64
from trainer.objectives.task_rows import PairConfig

# Objectives that score each prediction by itself, so that two models' can be compared.
_KINDS = (
    "causal_lm",
    "classification",
    "mlm",
    "prefix_lm",
    "regression",
    "seq2seq",
    "span_corruption",
    "tagging",
)
_ENCODERS = ("classification", "mlm", "regression", "tagging")
_OUTPUTS = {"hidden": "compared.", "attention": "attention."}
_COUNTS = {"hidden": "token_weights", "attention": "pair_count"}


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Distillation of a trained model, the teacher. The loss is a weighted sum of terms.

    Attributes:
        teacher: path of the teacher, as for `init_from`; it has the same task and tokenizer and is
            not trained. Each device holds all of it.
        of: the student's own objective: causal_lm, classification, mlm, prefix_lm, regression,
            seq2seq, span_corruption or tagging.
        temperature: T, which divides the logits in `soft`.
        soft: weight of the Kullback-Leibler divergence of the student's softened predictions from
            the teacher's, times T^2 (Hinton et al. 2015, section 2). 0 for regression.
        hard: weight of the student's own objective, with the labels of the dataset.
        mse: weight of the squared distance of both models' logits, summed over classes (Ba &
            Caruana 2014).
        cosine: weight of 1 - the cosine of both models' last hidden states at all positions that
            hold a token (Sanh et al. 2019); for models of equal width.
        hidden: weight of the squared distance of hidden states, from the embeddings to the last
            layer, after a projection to the teacher's width if there is one, `model.teacher_width`
            (Jiao et al. 2020, equations 8 and 9).
        attention: weight of the squared distance of attention scores before the softmax, in each
            layer; for models with as many heads (Jiao et al. 2020, equation 7).
        layer_map: for `hidden` and `attention`, the teacher's layer for the embeddings and each
            layer of the student: [0, 3, 6, 9, 12] for 4 layers and a teacher of 12.
        positions: where `soft` and `mse` compare: at `predicted` positions, or with mlm at `all`
            that hold a token, which takes as many logits (the released code of DistilBERT).
    """

    teacher: str
    of: Annotated[Any, Kinds("trainer.objectives.kinds")]
    temperature: float = 2.0
    soft: float = 1.0
    hard: float = 0.0
    mse: float = 0.0
    cosine: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    layer_map: tuple[int, ...] = ()
    positions: Literal["predicted", "all"] = "predicted"

    def __post_init__(self) -> None:
        kind = kind_name(self.of)
        if kind not in _KINDS:
            raise ConfigError(
                f"of is {kind}, whose predictions cannot be compared. "
                f"Use one of {', '.join(_KINDS)}."
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}. "
                "Use a number above 0; 1 leaves logits as they are."
            )
        for name in ("soft", "hard", "mse", "cosine", "hidden", "attention"):
            weight = getattr(self, name)
            if weight < 0:
                raise ConfigError(f"{name} is {weight}. Use a weight above 0, or 0 to disable it.")
        if kind == "regression" and self.soft:
            raise ConfigError(
                f"soft is {self.soft:g}, and a regression predicts one number. "
                "Set soft to 0, and mse to 1."
            )
        if not (self.soft or self.mse or self.hidden or self.attention):
            raise ConfigError(
                "soft, mse, hidden and attention are 0, so nothing is learned from the teacher. "
                "Set soft to 1."
            )
        self._check_layers(kind)
        if isinstance(self.of, classification.Config) and self.of.lm_weight:
            raise ConfigError(
                f"of.lm_weight is {self.of.lm_weight}, and tokens are not distilled beside "
                "classes. Set it to 0."
            )
        if isinstance(self.of, ClassLossConfig) and self.of.class_weights is not None:
            raise ConfigError(
                "of.class_weights is set, and a teacher's predictions are compared on all rows "
                "alike. Leave it out."
            )
        if isinstance(self.of, tagging.Config) and self.of.crf:
            raise ConfigError(
                "of.crf is true, and students are taught one tag at a time. Set it to false."
            )
        if isinstance(self.of, PairConfig) and self.of.both_orders:
            raise ConfigError(
                "of.both_orders is true, and students are taught on one sequence a row. Set it to "
                "false."
            )
        if self.positions == "all" and kind != "mlm":
            raise ConfigError(
                f"positions is all, which is for mlm, and of is {kind}. Set positions to predicted."
            )

    def _check_layers(self, kind: str) -> None:
        """Rejects a layer map that does not fit the terms, and terms that do not fit the task."""
        compares = self.hidden > 0 or self.attention > 0
        if compares and kind not in _ENCODERS:
            raise ConfigError(
                f"hidden and attention compare encoders, but of is {kind}. Set them to 0, or use "
                f"one of {', '.join(_ENCODERS)}."
            )
        if compares and (len(self.layer_map) < 2 or self.layer_map[0] != 0):
            raise ConfigError(
                f"layer_map is {list(self.layer_map)}, but hidden and attention need the teacher's "
                "layer for the embeddings, 0, and for each layer of the student. For 4 layers and "
                "a teacher of 12 use [0, 3, 6, 9, 12]."
            )
        if self.layer_map and not compares:
            raise ConfigError(
                "layer_map is set, but hidden and attention are 0. Set them to 1, or leave "
                "layer_map out."
            )
        if any(later <= earlier for earlier, later in itertools.pairwise(self.layer_map)):
            raise ConfigError(
                f"layer_map is {list(self.layer_map)}. Use layers of the teacher in ascending "
                "order, as [0, 3, 6, 9, 12]."
            )

    @property
    def teacher_path(self) -> str | None:
        return self.teacher

    @property
    def task(self) -> ObjectiveConfig:
        own: ObjectiveConfig = self.of
        return own

    @property
    def compares_hidden(self) -> bool:
        return self.cosine > 0

    @property
    def layer_pairs(self) -> dict[str, str]:
        """The student's outputs `compared.N` and `attention.N` -> the teacher's."""
        layers = list(enumerate(self.layer_map))
        hidden = {f"compared.{own}": f"compared.{theirs}" for own, theirs in layers if self.hidden}
        scores = {f"attention.{own}": f"attention.{theirs}" for own, theirs in layers[1:]}
        return {**hidden, **(scores if self.attention else {})}

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        own = ("objective.cosine=0",) if "hidden" in missing else ()
        return (*own, *adapted_inside(self.task, missing, offers))

    def build(self, vocabulary: Vocabulary) -> Objective:
        objective: Objective = self.of.build(vocabulary)
        if isinstance(objective, Task):
            return TaskDistillation(self, objective)
        return Distillation(self, objective)


class Distillation(Taught):
    """The distillation objective; see `trainer.objectives.Taught`.

    To the batch of the student's own objective it adds, if a term needs it:
        token_weights: float32 [B, S], 1 at a position that holds a token, in an example of weight
            1, else 0; for the layers below the head, so an encoder-decoder's target positions.
        pair_count: float32 [B], number of pairs of tokens in the same segment, in an example of
            weight 1, else 0.
    """

    def __init__(self, config: Config, of: Objective) -> None:
        self.config, self.of = config, of
        self.predicts = of.predicts
        self._pairs = config.layer_pairs
        own = {of.predicts, *(["hidden"] if config.cosine else [])}
        self._outputs = frozenset(own | self._pairs.keys())
        self._taught = frozenset(own | set(self._pairs.values()))
        self.needs = of.needs | self._outputs
        self.columns = of.columns
        self._all = config.positions == "all"
        self._teacher: nn.Module | None = None

    def attach(self, teacher: nn.Module) -> None:
        self._teacher = teacher

    def pack_spec(self, sequence_length: int) -> PackSpec:
        return self.of.pack_spec(sequence_length)

    def predictions(self, sequence_length: int) -> int:
        return sequence_length if self._all else self.of.predictions(sequence_length)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.of.collate(examples, sequence_length)
        if self._all or self.config.cosine or self._pairs:
            segments = batch.get("target_segments", batch["segments"])
            batch["token_weights"] = ((segments != 0) * examples.weight[:, None]).astype(np.float32)
        if self.config.attention:
            batch["pair_count"] = (_pair_counts(segments) * examples.weight).astype(np.float32)
        return batch

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The student's own, which come first; then the numbers of tokens and of pairs."""
        weights = self.of.weights(batch)
        if "token_weights" in batch:
            weights["token_weights"] = float(batch["token_weights"].sum())
        if "pair_count" in batch:
            weights["pair_count"] = float(batch["pair_count"].sum())
        return weights

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The weighted sum of the terms in float32, each divided by its number in the step:

            soft    T^2 * sum_c p_c * (log p_c - log q_c), with p, q = softmax(logits / T) of the
                    teacher and the student
            mse     sum_c (student's logit_c - teacher's logit_c)^2
            cosine  1 - cos(student's hidden state, teacher's hidden state)
            hidden     the mean over elements of (student's - teacher's hidden state)^2, summed over
                       layers, for each token
            attention  the mean over heads of (student's - teacher's score)^2, summed over layers,
                       for each pair of tokens that attend to each other
            hard    the student's own objective

        The metric "loss" is this sum; "hard_loss" is the loss of the student's own objective,
        whatever its weight; "agreement" is the fraction of predictions for which both models give
        the highest score to the same class.
        """
        assert self._teacher is not None, "a distillation has no loss without a teacher"
        config, own_total = self.config, next(iter(totals.values()))
        with torch.no_grad():
            their = self._run(self._teacher, batch, self._taught)
        own = self._run(model, batch, self._outputs)
        logits, taught = own[self.predicts], their[self.predicts]
        weights, count = batch["weights"].view(len(logits), -1), own_total
        if self._all:
            weights, count = batch["token_weights"], totals["token_weights"]

        # For each term: its coefficient, values, weights, and sum of weights in the step.
        terms: dict[str, tuple[float, Tensor, Tensor, Tensor]] = {}
        if config.soft:
            divergence = soft_loss(logits, taught, config.temperature)
            terms["soft_loss"] = config.soft, divergence, weights, count
        if config.mse:
            distance = (logits.float() - taught.float()).square().sum(-1)
            terms["mse"] = config.mse, distance, weights, count
        if config.cosine:
            angle = 1 - F.cosine_similarity(own["hidden"].float(), their["hidden"].float(), dim=-1)
            of_tokens = batch["token_weights"], totals["token_weights"]
            terms["cosine_loss"] = config.cosine, angle, *of_tokens
        for name, coefficient in (("hidden", config.hidden), ("attention", config.attention)):
            if coefficient:
                of_layers = self._of_layers(name, own, their, batch)
                terms[f"{name}_loss"] = coefficient, *of_layers, totals[_COUNTS[name]]
        total, metrics = torch.zeros((), device=logits.device), {}
        if not (config.soft or config.mse or config.hard):
            # So that the head has gradients, of 0: strategies wait for all parameters.
            total = 0.0 * logits.float().sum()
        for name, (coefficient, values, term_weights, term_count) in terms.items():
            term = (values * term_weights).sum()
            metrics[name] = (term.detach(), term_weights.sum())
            total = total + coefficient * term / term_count
        if logits.shape[-1] > 1:
            same = (logits.detach().argmax(-1) == taught.argmax(-1)) * weights
            metrics["agreement"] = (same.sum(), weights.sum())

        # The own objective comes last, as its cross-entropy may overwrite the logits.
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.hard > 0):
            predicted = _select(logits, batch["predicted"]) if self._all else logits
            hard = self.of.loss(_FixedOutputs({self.predicts: predicted}), batch, totals)
        if config.hard:
            total = total + config.hard * hard.total
        # The terms have different denominators. Weighted by the own one, the micro-batches of a
        # step add up to the step's loss.
        loss = {"loss": (total.detach() * own_total, hard.metrics["loss"][1])}
        own_metrics = {
            "hard_loss" if name == "loss" else name: metric for name, metric in hard.metrics.items()
        }
        return Loss(total, loss | metrics | own_metrics, hard.outputs)

    def terms(self) -> Mapping[str, float]:
        config = self.config
        return {
            "soft_loss": config.soft,
            "mse": config.mse,
            "cosine_loss": config.cosine,
            "hidden_loss": config.hidden,
            "attention_loss": config.attention,
            "hard_loss": config.hard,
            "z_loss": config.hard,  # which the loss of `of` includes, but not its metric
        }

    def _of_layers(
        self, name: str, own: Tensors, their: Tensors, batch: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Squared distances, summed over layers, of tokens or pairs of tokens, and their weights.

        Both are [B, S] for `hidden`, [B, S, S] for `attention`.
        """
        weights, kind = batch["token_weights"], _OUTPUTS[name]
        pairs = [pair for pair in self._pairs.items() if pair[0].startswith(kind)]
        if name == "attention":
            weights = weights[:, :, None].expand(-1, -1, weights.shape[1])
            if (segments := batch.get("segments")) is not None:  # else a row is one sequence
                weights = weights * (segments[:, :, None] == segments[:, None, :])
        distance = torch.zeros_like(weights)
        for mine, theirs in pairs:
            change = own[mine].float() - their[theirs].float()
            if name == "attention":
                # Scores of pairs that do not attend to each other are minus infinity.
                change = torch.where(change.isfinite(), change, 0.0)
            distance = distance + change.square().mean(1 if name == "attention" else -1)
        return distance, weights

    def _run(self, model: nn.Module, batch: Tensors, outputs: Outputs) -> dict[str, Tensor]:
        """Outputs of a model; logits are [B, P, C], or [B, S, C] of all positions."""
        inputs = Inputs.of(batch)
        if self._all:
            inputs = replace(inputs, predicted=None)
        found: dict[str, Tensor] = model(inputs, outputs)
        return found


class TaskDistillation(Distillation, Task):
    """Distillation for a `trainer.objectives.Task`, with its scores."""

    of: Task

    def __init__(self, config: Config, of: Task) -> None:
        super().__init__(config, of)
        self.score_names, self.mean_names = of.score_names, of.mean_names

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return self.of.scores(predictions)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        return self.of.row_predictions(predictions)

    def class_report(self, predictions: Predictions) -> ClassReport | None:
        return self.of.class_report(predictions)

    def combined(self, outputs: Sequence[Float32]) -> Float32:
        return self.of.combined(outputs)


class _FixedOutputs(nn.Module):
    """Stands in for a model whose outputs are known."""

    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, _inputs: Inputs, _outputs: Outputs) -> dict[str, Tensor]:
        return self._outputs


def soft_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 times the KL divergence of softened predictions: [B, P, C] -> [B, P]."""
    # Hinton et al. use the cross-entropy, which differs by the teacher's entropy, a constant: the
    # gradients are equal, and the divergence is 0 where both models agree. T^2 makes up for
    # gradients that shrink as 1 / T^2, so the temperature does not change the balance with `hard`.
    log_probabilities = F.log_softmax(logits.float() / temperature, dim=-1)
    log_taught = F.log_softmax(taught.float() / temperature, dim=-1)
    divergence = F.kl_div(log_probabilities, log_taught, reduction="none", log_target=True)
    return divergence.sum(-1) * temperature**2


def _pair_counts(segments: npt.NDArray[Any]) -> Int64:
    """Number of pairs of tokens in the same segment of each row: int [B, S] -> [B]."""
    # n tokens have n^2 pairs: the row 1 1 2 0 has 4 + 1. An array of all pairs would be [B, S, S].
    rows, numbers = len(segments), int(segments.max(initial=0)) + 1
    # Counted in one pass: segment 2 of row 3 has the number 3 * numbers + 2.
    first = np.arange(rows)[:, None] * numbers
    sizes = np.bincount((first + segments).ravel(), minlength=rows * numbers)
    counts: Int64 = np.square(sizes.reshape(rows, numbers)[:, 1:]).sum(1)
    return counts


def _select(logits: Tensor, positions: Tensor) -> Tensor:
    """The logits at int64 [B, P] positions: [B, S, V] -> [B, P, V]."""
    # Position 3 of row 2 is row 2 S + 3 of the flat logits.
    first = torch.arange(len(positions), device=positions.device)[:, None] * logits.shape[1]
    chosen = logits.flatten(0, 1).index_select(0, (first + positions).flatten())
    return chosen.view(*positions.shape, -1)

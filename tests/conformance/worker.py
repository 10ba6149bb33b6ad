"""What a rank of the same-step matrix runs.

The real loader and the real Trainer, and a record of what they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from torch import Tensor

from data_pipeline.reading.loader import StreamingLoader
from samestep.config import load
from samestep.hashing import combine
from trainer.accelerators.detect import detect
from trainer.models import generator
from trainer.models.sampling import gumbel
from trainer.monitoring import Tracker
from trainer.strategies.world import World
from trainer.training.compose import build_trainer, open_checkpointer
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer
from trainer.training.recorder import Destinations

TASKS = {
    "mlm": [],
    "mlm_lamb": ["optimizer={kind: lamb, lr: 1e-2}"],
    "mlm_nsp": ["objective.kind=mlm_nsp", "model.nsp=true"],
    "albert": [
        "objective={kind: mlm_sop, ngrams: 3, whole_words: true}",
        "model={kind: albert, vocab_size: 600, layers: 4, groups: 2, width: 32, heads: 2, "
        "ffn_width: 64, embedding_width: 20, max_positions: 32, dropout: 0.1, nsp: true}",
        "optimizer={kind: lamb, lr: 1e-2}",
    ],
    "electra": [
        "objective={kind: replaced_tokens}",
        "model={kind: electra, vocab_size: 600, layers: 2, width: 32, heads: 4, ffn_width: 64, "
        "embedding_width: 20, max_positions: 32, attention_dropout: 0.0, generator_divisor: 2}",
    ],
    "electra_all_tokens": [
        "objective={kind: replaced_mlm}",
        "model={kind: electra, vocab_size: 600, layers: 2, width: 32, heads: 4, ffn_width: 64, "
        "embedding_width: 20, max_positions: 32, attention_dropout: 0.0, generator_divisor: 2, "
        "main_head: tokens_or_copy}",
    ],
    "modernbert": [
        "objective={kind: mlm, mask_fraction: 0.3}",
        "model={kind: modernbert, vocab_size: 600, layers: 4, width: 32, heads: 2, ffn_width: 48, "
        "max_positions: 32, local_window: 8, dropout: 0.1}",
    ],
    "mpnet": [
        "objective={kind: mlm}",
        "model={kind: mpnet, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 32, dropout: 0.1, attention_dropout: 0.1}",
    ],
    "neobert": [
        "objective={kind: mlm, mask_fraction: 0.2, replace_mask: 1.0, replace_random: 0.0}",
        "model={kind: neobert, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 48, "
        "max_positions: 32, dropout: 0.1, initializer_range: 0.03}",
    ],
    "llama": [
        "objective={kind: causal_lm}",
        "model={kind: llama, vocab_size: 600, layers: 2, width: 32, heads: 4, kv_heads: 2, "
        "head_width: 8, ffn_width: 48, max_positions: 32, window: 16, qk_norm: true, "
        "dropout: 0.1, attention_dropout: 0.1}",
    ],
    "olmo2": [
        "objective={kind: causal_lm}",
        "model={kind: llama, vocab_size: 600, layers: 2, width: 32, heads: 4, kv_heads: 2, "
        "head_width: 8, ffn_width: 48, max_positions: 32, joint_qk_norm: true, "
        "output_norm: true, dropout: 0.1, attention_dropout: 0.1}",
    ],
    "xlnet": [
        "objective={kind: permutation_lm, k: 4}",
        "model={kind: xlnet, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 32, attention_dropout: 0.1, dropout: 0.1}",
    ],
    "deberta": [
        "objective={kind: mlm}",
        "model={kind: deberta_v2, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 32, position_buckets: 8, conv_width: 3, attention_dropout: 0.1, "
        "dropout: 0.1, mask_decoder: true}",
    ],
    "deberta_v3": [
        "objective={kind: replaced_tokens}",
        "model={kind: deberta_v3, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 32, position_buckets: 8, attention_dropout: 0.1, dropout: 0.1, "
        "mask_decoder: true, generator_layers: 1}",
    ],
    "lstm": [
        "objective={kind: causal_lm}",
        "model={kind: lstm, vocab_size: 600, layers: 2, hidden_size: 32, embedding_width: 24, "
        "residual: true, norm: true, dropout: 0.1, variational: true, token_dropout: 0.1, "
        "weight_dropout: 0.3}",
    ],
    "bilm": [
        "objective={kind: bilm}",
        "model={kind: bilm, vocab_size: 600, layers: 2, hidden_size: 32, proj_size: 24, "
        "embedding_width: 24, dropout: 0.1}",
    ],
    "elmo": [
        "objective={kind: bilm}",
        "model={kind: bilm, vocab_size: 600, layers: 2, hidden_size: 32, proj_size: 24, "
        "embedding_width: 24, dropout: 0.1, tied: false, characters: {longest: 8, width: 6, "
        "filters: [[1, 8], [2, 8], [3, 16]], highways: 1}}",
    ],
    "muon": ["optimizer={kind: muon, lr: 3e-3}"],
    "spanbert": ["objective={kind: mlm_sbo, longest_span: 5}", "model.span_boundary=true"],
    "span_corruption": [],
    "llama_halves": [
        "model={kind: llama, vocab_size: 700, layers: 2, width: 32, heads: 4, kv_heads: 2, "
        "head_width: 8, ffn_width: 48, max_positions: 64, causal: false, decoder_layers: 2, "
        "start_token: 0, dropout: 0.1, attention_dropout: 0.1}",
    ],
    "ul2": ["objective={kind: denoising, scheme: ul2, z_loss: 1e-4}"],
    "causal_lm": [
        "objective=causal_lm",
        "model={kind: gpt2, vocab_size: 700, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 64,"
        " attention_dropout: 0.0}",
    ],
    "bart": [
        "objective={kind: denoising, scheme: bart}",
        "model={kind: bart, vocab_size: 700, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 64, dropout: 0.1, attention_dropout: 0.1, ffn_dropout: 0.1, "
        "start_token: 1}",
        "optimizer={kind: adamw, lr: 1e-3}",
    ],
}
"""Changes to the experiment file: a T5's for `TEXT_TASKS`, else a BERT's."""

TEXT_TASKS = ("span_corruption", "causal_lm", "llama_halves", "ul2", "bart")
"""Tasks with a SentencePiece tokenizer."""

FAMILIES = {
    "mlm_nsp": "pairs",
    "albert": "pairs",
    "electra": "concat",
    "electra_all_tokens": "concat",
    "modernbert": "best_fit",
    "mpnet": "best_fit",
    "neobert": "best_fit",
    "llama": "best_fit",
    "olmo2": "best_fit",
    "xlnet": "best_fit",
    "deberta": "best_fit",
    "deberta_v3": "best_fit",
    "lstm": "best_fit",
    "bilm": "best_fit",
    "elmo": "best_fit",
    "muon": "best_fit",
    "spanbert": "best_fit",
    "llama_halves": "best_fit",
    "ul2": "best_fit",
    "bart": "best_fit",
}
"""Tasks that are tested with one packing each."""

STRATEGIES = {
    "hsdp": "{kind: fsdp, replicas: 2}",
    **{f"zero-{stage}": f"{{kind: deepspeed, stage: {stage}}}" for stage in (1, 2, 3)},
}
"""Names for strategies that are more than a kind."""


@dataclass(frozen=True)
class Case:
    """One way of running the same run."""

    world_size: int
    strategy: str
    micro_batch_size: int
    threads: int
    packing: str
    task: str = "mlm"

    @property
    def overrides(self) -> list[str]:
        return [
            *TASKS[self.task],
            f"strategy={STRATEGIES.get(self.strategy, self.strategy)}",
            f"training.micro_batch_size={self.micro_batch_size}",
            f"data.threads={self.threads}",
            f"data.packing={self.packing}",
        ]


Samples: TypeAlias = dict[tuple[int, int], tuple[int, float]]
"""(key of an example, position) -> the token, and by how much it came before the next one."""


@dataclass(frozen=True)
class Record:
    """What one rank saw.

    Attributes:
        digests: of its rows of each global batch.
        losses: of each step.
        samples: the tokens that its generator has drawn, if there is one.
    """

    digests: np.ndarray
    losses: list[float]
    samples: Samples = field(default_factory=dict)


class Losses(Tracker):
    """A tracker that keeps losses, those of training or of any names."""

    def __init__(self, *names: str) -> None:
        self._names = names or ("train/loss",)
        self.values: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.values += [metrics[name] for name in self._names if name in metrics]

    def close(self) -> None: ...


def run_cases(file: str, cases: list[Case], steps: int, batches: int, output: str) -> list[Record]:
    """Runs cases of one world size after another in the same processes."""
    world = World.start(60)
    world.connect("gloo")
    records = []
    for i, case in enumerate(cases):
        overrides = [
            *case.overrides,
            f"training.steps={steps}",
            f"output={output}/{world.size}-{case.strategy}-{i}",
        ]
        digests = batch_digests(file, overrides, world, batches)
        with recorded() as samples:
            records.append(Record(digests, losses(file, overrides, world), samples))
    world.close()
    return records


@contextmanager
def recorded() -> Iterator[Samples]:
    """Keeps what generators draw in training."""
    found: Samples = {}
    draw = generator.sample

    def keep(logits: Tensor, key: Tensor, positions: Tensor) -> Tensor:
        tokens = draw(logits, key, positions)
        noisy = logits.detach().float() + gumbel(key, positions, logits.shape[-1])
        first, second = noisy.topk(2).values.unbind(-1)
        rows = zip(
            key.tolist(),
            positions.tolist(),
            tokens.tolist(),
            (first - second).tolist(),
            strict=True,
        )
        for row, *columns in rows:
            # Position 0, [CLS], stands for unused entries.
            found.update(
                {(row, at): (token, gap) for at, token, gap in zip(*columns, strict=True) if at}
            )
        return tokens

    generator.sample = keep
    try:
        yield found
    finally:
        generator.sample = draw


def batch_digests(file: str, overrides: list[str], world: World, batches: int) -> np.ndarray:
    """uint64 [batches]: sums over this rank's rows of a hash of all that the step depends on."""
    experiment = load(Experiment, file, overrides)
    trainer = make_trainer(experiment, world)
    assert isinstance(trainer.loader, StreamingLoader)
    digests = np.zeros(batches, dtype=np.uint64)
    for i, (micro_batches, _) in enumerate(zip(trainer.loader, range(batches), strict=False)):
        for batch in micro_batches:
            valid = batch["weights"].sum(1).numpy() > 0
            row = np.zeros(len(valid), dtype=np.uint64)
            for name in sorted(batch):
                values = batch[name].numpy().reshape(len(valid), -1)
                column = combine(len(name), np.arange(values.shape[1]))
                row = combine(
                    row, combine(column, values.astype(np.int64)).sum(axis=1, dtype=np.uint64)
                )
            digests[i : i + 1] += row[valid].sum(dtype=np.uint64)
    trainer.loader.close()
    return digests


def losses(
    file: str, overrides: list[str], world: World, *, resume: int | None = None
) -> list[float]:
    """The losses of each step of a run, from the start or from a checkpoint on."""
    experiment = load(Experiment, file, overrides)
    trainer = make_trainer(experiment, world)
    if resume is not None:
        trainer.restore(resume)
    tracker = Losses()
    trainer.fit(Destinations([tracker]))
    trainer.loader.close()
    return tracker.values


def run_once(file: str, overrides: list[str], resume: int | None = None) -> list[float]:
    """`losses` in a world of its own."""
    world = World.start(60)
    world.connect("gloo")
    values = losses(file, overrides, world, resume=resume)
    world.close()
    return values


def make_trainer(experiment: Experiment, world: World) -> Trainer:
    accelerator = experiment.accelerator.build() if experiment.accelerator else detect()
    strategy = experiment.strategy.build(accelerator, world, experiment.training.precision)
    dataset, checkpointer = experiment.data.open(), open_checkpointer(experiment, world)
    weights = experiment.init_from if experiment.freezes else None
    return build_trainer(experiment, dataset, strategy, checkpointer, weights)

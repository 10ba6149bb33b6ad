"""A custom training loop: own optimizer, own learning rate, own logging, exact resume.

    python examples/own_loop.py configs/debug/demo.yaml data.path=datasets/python_docs
    torchrun --nproc-per-node 2 examples/own_loop.py configs/debug/demo.yaml ...

Stop it at any moment and start it again: it continues from its newest checkpoint, on any number of
processes, with the losses that it would have had.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import samestep

WARMUP_STEPS = 4


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3, weight_decay=0.01)


def main(arguments: list[str] | None = None) -> int:
    file, *overrides = sys.argv[1:] if arguments is None else arguments
    experiment = samestep.load_experiment(file, overrides)
    with samestep.open_parts(experiment, build_optimizer) as parts:
        model, strategy, batches = parts.model, parts.strategy, parts.batches
        log = None
        if strategy.world.rank == 0:
            metrics_file = Path(experiment.output) / "metrics.jsonl"
            log = samestep.JsonlTracker(metrics_file, resume_step=batches.step)
        for micro_batches in batches:
            for group in parts.optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, batches.step / WARMUP_STEPS)
            # Gradients are of the mean over the global batch, over all ranks and micro-batches.
            metrics = samestep.accumulate_gradients(
                model, batches.objective, strategy, micro_batches
            )
            norm = strategy.clip_grad_norm(1.0)
            strategy.step(parts.optimizer, norm)
            parts.optimizer.zero_grad()

            # Every rank computes the means; it also waits for the device, so not at every step.
            if batches.step % experiment.training.log_every == 0:
                means = samestep.means(metrics, strategy)
                if log is not None:
                    log.log(batches.step, {f"train/{name}": mean for name, mean in means.items()})
            if batches.step % experiment.checkpoint.every == 0:
                parts.checkpoints.save()
        heldout = samestep.score(model, batches.objective, strategy, batches.heldout(), 2)
        parts.checkpoints.save()
        if log is not None:
            log.log(batches.step, {"heldout/loss": heldout.scores["loss"]})
            log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

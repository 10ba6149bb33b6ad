"""The `training` section of an experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from samestep.errors import ConfigError
from trainer.accelerators import Precision
from trainer.training.observers.settings import Best, Faults, Retrieval
from trainer.training.phases import MicroBatchSize, check_micro_batch_size
from trainer.training.preemption import Config as PreemptionConfig

Residual: TypeAlias = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Config:
    """The `training` section of an experiment.

    Attributes:
        steps: optimizer steps of the whole run.
        global_batch_size: examples of one step, over all devices.
        micro_batch_size: the most examples of one forward and backward pass on one device. A
            device's share of a step is split into equal micro-batches of at most this size. It
            changes memory and speed only, unless `exact` is bitwise. auto measures how many fit.
        exact: `tolerance` adds up gradients as the devices do, so losses of different world sizes
            and strategies agree within rounding. `bitwise` makes their weights the same bits, in
            fp32 and bf16, at some cost (see docs/exact.md): gradients are summed exactly over units
            of `micro_batch_size` examples, which becomes part of the run.
        precision: of matrix products; parameters and optimizer state stay in fp32. fp16, for GPUs
            without bf16, scales the loss.
        residual: of the hidden states between layers under precision bf16: the output of embeddings
            and norms. Norms compute in fp32 either way. bf16 halves the memory traffic of norms,
            dropout and residual sums, and changes the numbers like another precision.
        fp8: computes the matrix products in layers in 8-bit floating point, under precision bf16:
            faster on GPUs of compute capability 8.9 and above (Ada, Hopper, Blackwell), with other
            numbers. Use it with compile. Needs the extra fp8.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them as they are.
        activation_checkpointing: recomputes each layer in the backward pass: less memory, a third
            more work.
        compile: compiles each layer with torch.compile.
        dropout_version: of the masks of attention dropout; 2 is cheaper in fused kernels. Runs that
            began before there were two versions keep 1, unless this is set.
        log_every: steps between two rows of metrics.
        evaluate_every: steps between evaluations on the held-out documents (and one at the end);
            None never evaluates.
        evaluate_batches: global batches of an evaluation; None takes all held-out documents.
        best: by which score of these evaluations the best checkpoint is kept, and early stopping;
            None keeps no best checkpoint.
        retrieval: a folder of queries and documents that these evaluations score as well; None has
            none.
        collective_timeout: seconds that ranks wait for each other before they give up.
        hang_timeout: seconds without any progress after which the run ends, with a line about the
            rank to blame; None never ends it. The default is longer than the retries of an object
            store, and shorter than collective_timeout.
        verify_state_every: steps between checks of weights and moments for silent corruption; None
            never checks.
        digest_every: steps between rows of digests.jsonl: digests of the batch, the gradients, the
            weights and the optimizer state, which `samestep diff` compares. None writes none.
        faults: what to do about steps whose loss or gradient looks wrong.
        preemption: how the run stops on request.
    """

    steps: int
    global_batch_size: int = 256
    micro_batch_size: MicroBatchSize = "auto"
    exact: Literal["tolerance", "bitwise"] = "tolerance"
    precision: Precision = "fp32"
    residual: Residual = "fp32"
    fp8: bool = False
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    compile: bool = False
    dropout_version: Literal[1, 2] = 2
    log_every: int = 10
    evaluate_every: int | None = None
    evaluate_batches: int | None = None
    best: Best | None = None
    retrieval: Retrieval | None = None
    collective_timeout: float = 600.0
    hang_timeout: float | None = 480.0
    verify_state_every: int | None = 100
    digest_every: int | None = None
    faults: Faults = field(default_factory=Faults)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)

    def __post_init__(self) -> None:
        check_micro_batch_size(self.micro_batch_size)
        for name in ("steps", "global_batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("evaluate_every", "evaluate_batches", "verify_state_every", "digest_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be at least 1, or null for none, not {number}")
        if self.residual == "bf16" and self.precision != "bf16":
            raise ConfigError(
                f"residual is bf16 and precision is {self.precision}. Set precision to bf16, or "
                "residual to fp32."
            )
        if self.is_bitwise:
            self._check_bitwise()
        if self.fp8 and self.precision != "bf16":
            raise ConfigError(
                f"fp8 is true and precision is {self.precision}. Set precision to bf16, or fp8 to "
                "false."
            )
        for name in ("best", "retrieval"):
            if getattr(self, name) is not None and self.evaluate_every is None:
                raise ConfigError(
                    f"{name} needs evaluations, and evaluate_every is null. Set it to a number of "
                    f"steps, or {name} to null."
                )
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ConfigError(
                f"max_grad_norm must be above 0, or null for no clipping, not {self.max_grad_norm}"
            )
        for name in ("collective_timeout", "hang_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds, not {seconds}")

    @property
    def is_bitwise(self) -> bool:
        """Whether weights are the same bits at any world size."""
        return self.exact == "bitwise"

    def _check_bitwise(self) -> None:
        problems = {
            "precision=fp16": self.precision == "fp16",
            "fp8=true": self.fp8,
            "compile=true": self.compile,
        }
        for setting, is_set in problems.items():
            if is_set:
                raise ConfigError(
                    f"training.exact is bitwise, which training.{setting} does not allow. Use "
                    "precision fp32 or bf16 without compile and fp8, or exact=tolerance."
                )

"""The checks of `samestep doctor` on XLA's devices."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.findings import Finding, tried
from trainer.accelerators import DTYPES, Precision
from trainer.accelerators.kinds import xla
from trainer.accelerators.trial import REDUCE_BYTES, compared, exact
from trainer.strategies import Config
from trainer.strategies.kinds import xla_spmd
from trainer.strategies.xla import flash
from trainer.strategies.xla.trial import XlaTrial

_ATTENTION_ERROR = 0.02  # of numbers with 8 bits


def examine(
    config: xla.Config, strategy: Config | None, precision: Precision | None
) -> Iterator[Finding]:
    """Tries out the devices; all machines of a slice have to do so together.

    Args:
        config: the accelerator.
        strategy: the experiment's; None takes the default settings of `xla_spmd`.
        precision: the experiment's; None takes the fastest.
    """
    accelerator = config.build()
    trial = XlaTrial(accelerator)
    yield Finding("devices", "ok", accelerator.description)
    strategy = strategy or xla_spmd.Config()
    if not isinstance(strategy, xla_spmd.Config):
        yield Finding(
            "topology",
            "failed",
            f"{trial.topology}; the strategy is for other devices",
            "strategy=xla_spmd",
        )
    elif trial.devices % strategy.replicas:
        fix = f"use a divisor of {trial.devices}"
        yield Finding(
            "topology", "failed", f"strategy.replicas={strategy.replicas} on {trial.topology}", fix
        )
    else:
        mesh = f"{strategy.replicas} (replicate) x {trial.devices // strategy.replicas} (shard)"
        yield Finding("topology", "ok", f"{trial.topology}; mesh {mesh}")
    chosen: Precision = precision or ("bf16" if accelerator.peak_flops("bf16") else "fp32")
    peak = accelerator.peak_flops(chosen)
    yield from tried(
        "products", lambda: _products(trial, chosen, peak and peak / accelerator.devices)
    )
    if flash.usable(accelerator):
        yield from tried("attention", lambda: _attention(trial))
    if trial.devices > 1:
        yield from tried(
            "all-reduce", lambda: _sum(trial, 4 * REDUCE_BYTES if peak else REDUCE_BYTES // 16)
        )


def _products(trial: XlaTrial, precision: Precision, peak: float | None) -> Iterator[Finding]:
    left, expected = exact().to(DTYPES[precision]), exact() @ exact().T
    if wrong := ", ".join(trial.wrong(left, left.T.contiguous(), expected)):
        yield Finding("products", "failed", f"wrong on {wrong}", "take this machine out of use")
        return
    speed = trial.product_speed(8192 if peak else 512, precision, 1.0 if peak else 0.2)
    found = f"right results, {speed / 1e12:.3g} TFLOP/s in {precision} on each device"
    yield compared("products", found, speed, peak, "compare with another machine of its kind")


def _attention(trial: XlaTrial) -> Iterator[Finding]:
    error = trial.attention_error(640, 64)
    found = f"by JAX's kernel, gradients included: within {error:.1%} of fp32 on the host"
    if error < _ATTENTION_ERROR:
        yield Finding("attention", "ok", found)
    else:
        yield Finding(
            "attention",
            "failed",
            found,
            "strategy.flash_attention_from=null does without the kernel",
        )


def _sum(trial: XlaTrial, size: int) -> Iterator[Finding]:
    right, speed = trial.sum_speed(size)
    found = f"{trial.devices} devices by XLA: {speed / 1e9:.3g} GB/s"
    yield Finding(
        "all-reduce",
        "ok" if right else "failed",
        found if right else f"{found}, and a wrong result",
    )

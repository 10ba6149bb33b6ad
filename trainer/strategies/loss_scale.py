"""Dynamic loss scaling (Micikevicius et al. 2018): keeps small gradients in the range of fp16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.errors import ConfigError, SamestepError

_INITIAL, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000  # as torch.amp.GradScaler


class LossScale:
    """A factor of the loss, halved when gradients overflow, doubled after 2,000 steps without.

    All state is on the device, so a step waits for nothing. Gradients have overflowed if their
    global norm is not finite. All ranks have the same norm, so they skip the same steps.

    Attributes:
        factor: each replica's loss is multiplied by it, a scalar.
    """

    def __init__(self, device: torch.device, replicas: int = 1) -> None:
        self._replicas = replicas
        self.factor = torch.full((), _INITIAL, device=device)
        # Updates since the factor has changed.
        self._since = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), device=device)

    @property
    def of_gradients(self) -> Tensor:
        """By how much the gradients are too large: they are averages over replicas, not sums."""
        return self.factor / self._replicas

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Rejects an optimizer that would update with gradients that are too large, or not finite.

        Raises:
            ConfigError: it does not read `grad_scale` and `found_inf`.
        """
        # As torch.amp.GradScaler asks; samestep's own have an attribute.
        reads = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not reads and not hasattr(optimizer, "grad_scale"):
            raise ConfigError(
                f"training.precision is fp16, whose gradients are scaled, and "
                f"{type(optimizer).__name__} does not divide by the scale. Use an optimizer of "
                "torch with fused=True, or training.precision=bf16 or fp32."
            )

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        """Updates with gradients `of_gradients` times too large, unless their norm overflows.

        A skipped step leaves weights and moments as they are. It still counts as a step of the run:
        in the learning rate, in bias correction and in checkpoints.
        """
        overflow = (~grad_norm.isfinite()).float()
        # The host, if the optimizer is offloaded.
        device = optimizer.param_groups[0]["params"][0].device
        skipped = overflow.to(device)
        # torch's fused kernels divide by one and skip by the other, without a wait for the host.
        optimizer.grad_scale = self.of_gradients.to(device)  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
        # The kernel does not count a skipped step. Frozen parameters have no gradient, and none.
        states = [state for each, state in optimizer.state.items() if each.grad is not None]
        if counts := [state["step"] for state in states if "step" in state]:
            torch._foreach_add_(counts, skipped)
        self._skipped += overflow
        torch._amp_update_scale_(
            self.factor, self._since, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL
        )

    def metrics(self) -> dict[str, float]:
        """The factor and the number of skipped steps. Waits for the device.

        Raises:
            SamestepError: the factor is below 1, so no scale would prevent an overflow.
        """
        factor, skipped = float(self.factor), float(self._skipped)
        if factor < 1:
            raise SamestepError(
                f"the loss scale has come down to {factor:g}: gradients overflow fp16 at "
                "any scale, as in a run that diverges. Weights are those before the overflow. "
                "Continue from a checkpoint with training.precision=bf16 or fp32, or with a lower "
                "optimizer.lr."
            )
        return {"loss_scale": factor, "skipped_steps": skipped}

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint. Waits for the device."""
        return {
            "factor": float(self.factor),
            "since": int(self._since),
            "skipped": int(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the state of a checkpoint, which may be from another world size."""
        self.factor.fill_(state["factor"])
        self._since.fill_(state["since"])
        self._skipped.fill_(state["skipped"])

"""Dynamic loss scaling (Micikevicius et al.

2018): gradients that would vanish in fp16 are kept in its range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import SamestepError

_INITIAL, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000  # as torch.amp.GradScaler


class LossScale:
    """A factor of the loss: halved when gradients overflow, doubled after 2,000 updates without.

    All of it is on the device, so that no step waits. Whether gradients have overflowed is read off
    their global norm, which all ranks know and which is not finite if any gradient is not; so they
    take and skip the same steps.

    Attributes:
        factor: what the loss is multiplied by, a scalar.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), _INITIAL, device=device)
        self._since = torch.zeros(
            (), dtype=torch.int32, device=device
        )  # updates since the factor changed
        self._skipped = torch.zeros((), device=device)

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        """Makes an update with gradients that are `factor` times too large, unless their norm is
        not finite.

        A skipped step leaves weights and moments as they are. It counts as a step of the run all
        the same: in the learning rate, in bias correction and in checkpoints.
        """
        overflow = (~grad_norm.isfinite()).float()
        device = optimizer.param_groups[0]["params"][
            0
        ].device  # the host, where the optimizer is offloaded
        skipped = overflow.to(device)
        optimizer.grad_scale, optimizer.found_inf = self.factor.to(device), skipped  # type: ignore[attr-defined]
        optimizer.step()
        if counts := [state["step"] for state in optimizer.state.values() if "step" in state]:
            torch._foreach_add_(counts, skipped)  # the kernel has taken a skipped step back
        self._skipped += overflow
        torch._amp_update_scale_(
            self.factor, self._since, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL
        )

    def metrics(self) -> dict[str, float]:
        """The factor, and how many steps the run has skipped. Waits for the device.

        Raises:
            SamestepError: the factor is below 1, so that no scaling would help.
        """
        factor, skipped = float(self.factor), float(self._skipped)
        if factor < 1:
            raise SamestepError(
                f"the loss scale has come down to {factor:g}: gradients overflow fp16 at any "
                "scale, as they do when a "
                "run diverges; the weights are those before; go on from a checkpoint with "
                "training.precision=bf16 or "
                "fp32, or with a lower optimizer.lr"
            )
        return {"loss_scale": factor, "skipped_steps": skipped}

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps. Waits for the device."""
        return {
            "factor": float(self.factor),
            "since": int(self._since),
            "skipped": int(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on as the run did that wrote the checkpoint, of any world size."""
        self.factor.fill_(state["factor"])
        self._since.fill_(state["since"])
        self._skipped.fill_(state["skipped"])

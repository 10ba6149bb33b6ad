"""AdamW (Loshchilov & Hutter 2019), with Adam's bias correction or, as for BERT, without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from samestep.errors import ConfigError
from trainer.accelerators import kernels
from trainer.optim import Structure
from trainer.optim.groups import Group, parameter_groups


@dataclass(frozen=True)
class Config:
    """AdamW. Biases and norm weights do not decay.

    Attributes:
        lr: peak learning rate of the schedule.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the root of the mean square, which is 0 for weights that have had no gradient
            yet.
        weight_decay: decoupled; each update shrinks a weight by lr * weight_decay of its value.
        bias_correction: whether to correct the running means for starting at 0; BERT did not.
        layer_decay: for fine-tuning, the factor on the learning rate from each layer to the one
            below it (Clark et al. 2020: 0.8 to 0.95; Howard & Ruder 2018: 0.385); 1 gives all
            layers the same rate.
        unfreeze_every: for fine-tuning, gradual unfreezing (Howard & Ruder 2018, section 3.3): the
            number of steps after which one more layer is trained, from the last to the first, and
            then the embeddings; at first only the head is. null trains all from the first step.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    layer_decay: float = 1.0
    unfreeze_every: int | None = None

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas is {list(self.betas)}. Use two numbers from 0 to below 1, such as [0.9, "
                "0.999].",
            )
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}. Use a finite number of at least 0.")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"layer_decay is {self.layer_decay}. Use a factor as 0.9, or 1 for none."
            )
        if self.unfreeze_every is not None and self.unfreeze_every < 1:
            raise ConfigError(
                f"unfreeze_every is {self.unfreeze_every}. Use a number of steps, or null to train "
                "all layers from the first step."
            )
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps is {self.eps}. Use a finite number above 0, such as 1e-6.")

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Builds the optimizer of these named parameters, on the device they are on."""
        named = list(parameters)
        groups = self._groups(named, structure)
        return self._optimizer(groups, structure.blocks(named), structure.exact)

    def _groups(
        self, named: Iterable[tuple[str, nn.Parameter]], structure: Structure
    ) -> list[Group]:
        # Parameters that share decay and learning rate form a group, which one kernel call updates.
        return parameter_groups(
            named,
            self.weight_decay,
            self.layer_decay,
            structure.layers_above,
            self.unfreeze_every,
        )

    def _optimizer(
        self, groups: list[Group], blocks: Mapping[Tensor, int], exact: bool
    ) -> Optimizer:
        """Builds the optimizer of these groups; see `Blockwise` for `blocks` and `exact`."""
        if exact or not kernels.is_eager(groups[0]["params"][0].device):
            from trainer.optim.plain_adamw import PlainAdamW

            return PlainAdamW(groups, {}, self._settings, exact)
        fused = AdamW if self.bias_correction else UncorrectedAdamW
        return fused(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    @property
    def _settings(self) -> dict[str, object]:
        names = ("lr", "betas", "eps", "bias_correction")
        return {name: getattr(self, name) for name in names}


class UncorrectedAdamW(AdamW):
    r"""AdamW without bias correction, on torch's fused kernels.

    The update of BERT (`AdamWeightDecayOptimizer` of google-research/bert) is

        w -= lr * (m / (sqrt(v) + eps) + decay * w)

    With c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t), torch's update number t is

        w -= lr' * ((m / c1) / (sqrt(v) / c2 + eps') + decay' * w)

    They are equal with

        lr' = lr * c1 / c2,    eps' = eps / c2,    decay' = decay * c2 / c1

    because lr' * c2 / c1 = lr, eps' * c2 = eps and lr' * decay' = lr * decay.

    Each group counts its updates in "updates", on the host, so that no step waits for the device.
    """

    def __init__(
        self,
        groups: list[Group],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        counted = [{**group, "updates": -group["begins"]} for group in groups]
        super().__init__(counted, lr=lr, betas=betas, eps=eps, fused=fused)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Makes one update; before and after it the groups hold the settings of BERT's formula."""
        settings = [
            {key: group[key] for key in ("lr", "eps", "weight_decay")}
            for group in self.param_groups
        ]
        for group in self.param_groups:
            group["updates"] += 1
            if group["updates"] < 1:  # frozen
                continue
            beta1, beta2 = group["betas"]
            c1, c2 = 1 - beta1 ** group["updates"], math.sqrt(1 - beta2 ** group["updates"])
            group["lr"] *= c1 / c2
            group["eps"] /= c2
            group["weight_decay"] *= c2 / c1
        # The groups are checkpointed, and the schedule writes "lr" into them, so they must hold the
        # settings of the formula above again, also after an error.
        try:
            loss: float | None = super().step(closure)
        finally:
            for group, setting in zip(self.param_groups, settings, strict=True):
                group.update(setting)
        return loss

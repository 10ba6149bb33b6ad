"""Parameter groups, and access to an optimizer's state by parameter name.

Checkpoints hold the state under the parameters' names, whatever groups they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import ConfigError
from trainer.partition import layer_shape, state_like

Group: TypeAlias = dict[str, Any]
"""A group of `torch.optim`: the parameters under "params", and their settings by name."""

_UNPARTITIONED = ("exp_avg_sq_row", "exp_avg_sq_col")
"""Adafactor's means over rows and columns, which every process holds whole."""


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    layer_decay: float = 1.0,
    layers_above: Mapping[str, int] = MappingProxyType({}),
    unfreeze_every: int | None = None,
) -> list[Group]:
    """Splits the trainable parameters: matrices decay; biases and norm weights do not.

    Args:
        named_parameters: by name.
        weight_decay: of matrices; parameters with one dimension do not decay.
        layer_decay: factor on the learning rate for each layer between a parameter and the heads,
            its own layer included (Howard & Ruder 2018; Clark et al. 2020, appendix B).
        layers_above: number of these layers by name; 0 for names that are not in it.
        unfreeze_every: number of updates after which the next lower layer begins; see `freeze`.

    Returns:
        Groups for `torch.optim`, each with its `lr_scale` and with `begins`, the number of updates
        before its first one; none of them is empty.
    """
    matrices: dict[tuple[float, int], list[nn.Parameter]] = {}
    vectors: dict[tuple[float, int], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups = matrices if len(layer_shape(parameter)) > 1 else vectors
            above = layers_above.get(name, 0)
            settings = (layer_decay**above, above * (unfreeze_every or 0))
            groups.setdefault(settings, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale, "begins": begins}
        for groups, decay in ((matrices, weight_decay), (vectors, 0.0))
        for (scale, begins), parameters in groups.items()
    ]


def check_begins(optimizer: Optimizer, steps: int) -> None:
    """Rejects layers that would still be frozen at the end of a run, or all of them at its start.

    Raises:
        ConfigError: names the setting.
    """
    begins = sorted({group.get("begins", 0) for group in optimizer.param_groups})
    if begins[0] > 0:
        raise ConfigError(
            "optimizer.unfreeze_every trains what is above the layers first, and this model trains "
            "nothing there. Set it to null, or train a head."
        )
    if begins[-1] < steps or len(begins) == 1:
        return
    every = begins[1] - begins[0]
    raise ConfigError(
        f"optimizer.unfreeze_every is {every}, so the lowest layer would begin after "
        f"{begins[-1]} steps, and the run has {steps}. Use a smaller number, such as "
        f"{max(1, (steps - 1) * every // begins[-1])}, or more steps."
    )


def freeze(optimizer: Optimizer, step: int) -> None:
    """Drops the gradients of the groups that are still frozen at `step`, counted from 0.

    Gradual unfreezing (Howard & Ruder 2018, section 3.3): the head is trained first, and a layer
    more every `unfreeze_every` steps, from the last to the embeddings. A frozen parameter has no
    update, no moments, no weight decay and no part in the gradient norm, as if it required no
    gradient. But the backward pass computes its gradient, so that all processes exchange the same
    ones, whatever the strategy.
    """
    for group in optimizer.param_groups:
        if group.get("begins", 0) > step:
            for parameter in group["params"]:
                parameter.grad = None


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Gives every group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def prime(optimizer: Optimizer) -> None:
    """Creates the state that `torch.optim` creates at the first step, where there is none yet.

    It changes no parameter and no state that exists. A checkpoint can then be copied into the new
    state. Without one, it is the state of a new optimizer for all optimizers of this package, but
    not for some of torch's: the step sizes of Rprop, for example, are the first step's rate.
    """
    new = stateless(optimizer)
    if not new:
        return
    settings: list[Group] = [
        {name: group[name] for name in ("lr", "weight_decay", "updates") if name in group}
        for group in optimizer.param_groups
    ]
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        group.update({name: 0.0 for name in ("lr", "weight_decay") if name in group})
        if "updates" in group:  # below 0 while a group is frozen
            group["updates"] = 0
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    for parameter in new:
        _set_count(optimizer.state[parameter], 0)  # an empty state if there is none, as in SGD


def stateless(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters for which an optimizer has no state yet."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [each for each in parameters if each not in optimizer.state]


def set_step(optimizer: Optimizer, step: int) -> None:
    """Sets the number of steps taken so far; bias correction depends on a group's updates."""
    for group in optimizer.param_groups:
        updates = step - group.get("begins", 0)
        if "updates" in group:
            group["updates"] = updates
        for parameter in group["params"]:
            _set_count(optimizer.state.get(parameter, {}), max(0, updates))


def _set_count(state: dict[str, Any], count: int) -> None:
    """Sets the step count in the state of a parameter, if it has one."""
    # A tensor in optimizers of torch, a number in some others, such as transformers' Adafactor.
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(count)
    elif "step" in state:
        state["step"] = count


def state_tensors(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, Tensor]:
    """The state of a primed optimizer as "exp_avg/<parameter name>"; step counts are left out.

    The tensors share the optimizer's memory: fill them in place. They are partitioned like their
    parameters, except for scalars and Adafactor's means over rows and columns, which every process
    holds whole.
    """
    tensors = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            assert parameter in optimizer.state, f"{name} has no optimizer state; call prime first"
            for key, value in optimizer.state[parameter].items():
                if key != "step":
                    whole = key in _UNPARTITIONED or value.ndim == 0
                    tensors[f"{key}/{name}"] = state_like(value, parameter, whole)
    return tensors

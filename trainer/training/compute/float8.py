"""Matrix products of layers in 8-bit floating point, by torchao (opt-in: `training.fp8`).

Each product casts its two matrices when it is computed, with one scale for a whole matrix: inputs
and weights to e4m3, which has 3 bits of mantissa, gradients of outputs to e5m2, which has a wider
range (Micikevicius et al. 2022, arXiv 2209.05433). Results are in the precision of the inputs.
Parameters, their names and the precision of their gradients stay as they are.

The module is imported only where fp8 is used, as torchao is an extra.
"""

from __future__ import annotations

from torch import nn

from samestep.errors import ConfigError, MissingExtra
from trainer.models.layers import Projection, WrappedProjection

try:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
except ImportError as error:
    raise MissingExtra("torchao", "fp8", "training.fp8") from error

MULTIPLE = 16
"""Rows and columns of 8-bit matrices must be multiples of it."""

_emulate = False  # tests compute the same numbers in fp32, on devices without such products


class Float8Projection(Float8Linear, Projection):  # type: ignore[misc]
    """A projection whose three products, one forward and two backward, are in 8 bits."""


def use_float8(model: nn.Module) -> None:
    """Lets the projections in a model's layers multiply in 8 bits; heads and embeddings do not.

    Raises:
        ConfigError: a projection's size is no multiple of 16, or there are no projections, or
            `model.peft` has replaced some.
    """
    projections = {
        name: module for name, module in model.named_modules() if isinstance(module, Projection)
    }
    if not projections:
        raise ConfigError(
            "training.fp8 is true, and this model has no projections that it can convert. Set it "
            "to false."
        )
    for name, projection in projections.items():
        _check(name, projection)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in projections,
        # Rows of a batch and predicted positions are the inner dimension of a weight's gradient.
        # They are padded with zeros to a multiple of 16, as they may be any number.
        config=Float8LinearConfig(pad_inner_dim=True, emulate=_emulate),
    )
    for name, projection in projections.items():
        converted = model.get_submodule(name)
        # torchao's class has the same parameters, but not what optimizers and PEFT ask for.
        converted.__class__ = Float8Projection
        assert isinstance(converted, Projection)
        converted.parts, converted.into_residual = projection.parts, projection.into_residual


def _check(name: str, projection: Projection) -> None:
    if isinstance(projection, WrappedProjection):
        raise ConfigError(
            f"training.fp8 is true, and model.peft has replaced {name}. Set one of them to false "
            "or null."
        )
    shape = (projection.out_features, projection.in_features)
    if any(size % MULTIPLE for size in shape):
        raise ConfigError(
            f"training.fp8 is true, and {name} is {shape[0]} x {shape[1]}, but 8-bit products need "
            f"multiples of {MULTIPLE}. Change model.width, heads or ffn_width, or set training.fp8 "
            "to false."
        )

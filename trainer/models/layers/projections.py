"""Linear layers with names for the matrices fused in them."""

from __future__ import annotations

from torch import nn


class Projection(nn.Linear):
    """A projection in a Transformer layer; its rows may fuse several matrices.

    Attributes:
        parts: names of the equally sized matrices in its rows, such as ("query", "key", "value").
        into_residual: whether its output is added to the residual stream.
    """

    def __init__(
        self,
        width: int,
        out: int,
        parts: tuple[str, ...],
        *,
        bias: bool,
        into_residual: bool = False,
    ) -> None:
        super().__init__(width, out, bias=bias)
        self.parts = parts
        self.into_residual = into_residual


class WrappedProjection(Projection):
    """A projection that takes over the parameters of another one and replaces it."""

    def __init__(self, wrapped: Projection) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a matrix
        self.in_features, self.out_features = wrapped.in_features, wrapped.out_features
        self.weight, self.bias = wrapped.weight, wrapped.bias
        self.parts, self.into_residual = wrapped.parts, wrapped.into_residual


def put_in_place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module `name` of a model."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)

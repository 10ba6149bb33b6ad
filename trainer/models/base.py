"""What all Transformers of one or two stacks share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models import Model, Outputs, Role, Start, Stored
from trainer.models.config import TransformerConfig
from trainer.models.initialization import initial_values
from trainer.models.projections import Projection
from trainer.models.stack import LayerPlace, ScanGroup, Stack, place_in_stacks

POOLED = ("classification", "multiple_choice")
"""Heads that read one position of a sequence."""

_HEADS = ("head", "nsp_head", "lm_head")
_EMBEDDINGS = ("embeddings", "prompt")


class TransformerModel(Model):
    """A Transformer with a head.

    Attributes:
        config: what it was built from.
        prompt: puts learned embeddings before those of the text (`peft.prompt`).
        embeddings: of the tokens, in `embeddings.tokens`.
        head: turns hidden states, the token embeddings and a dropout key into logits.
    """

    config: TransformerConfig
    embeddings: nn.Module
    head: nn.Module

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.prompt: nn.Module | None = None
        self.reads = config.reads
        offers = {config.predicts, "hidden", *(f"layer.{n}" for n in range(config.layers + 1))}
        if config.head in POOLED:
            offers.add("last_position" if config.decoder else "first_position")
        self.offers: Outputs = frozenset(offers)
        is_task = config.head != "language_model"
        self.trains = {config.predicts: "model.head=language_model" if is_task else ""}

    @property
    def inserted(self) -> int:
        """Number of positions that the model puts before a text's."""
        return 0 if self.prompt is None else self.config.virtual_tokens

    def with_prompt(self, column: Tensor | None) -> Tensor | None:
        """A column of segments or prefixes for prompt and text: [B, S] -> [B, n + S]."""
        if column is None or self.prompt is None:
            return column
        return F.pad(column, (self.inserted, 0), value=1)

    def pooled(self, predicted: Tensor | None) -> Tensor | None:
        """The positions that the head reads, counted with a prompt's: int [B, P] -> [B, P].

        An encoder's head that reads the first position of a sequence reads the prompt's first.
        """
        first = self.config.head in POOLED and not self.config.decoder
        return predicted if predicted is None or first else predicted + self.inserted

    @property
    def token_embeddings(self) -> Tensor:
        return self.get_parameter("embeddings.tokens.weight")

    def stacks(self) -> dict[str, Stack]:
        """The stacks of layers, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Stack)}

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order; embeddings and head share a matrix and stay in the root unit."""
        return list(dict.fromkeys(layer for stack in self.stacks().values() for layer in stack))

    def scan_groups(self) -> list[ScanGroup]:
        return [group for name, stack in self.stacks().items() for group in stack.scan_groups(name)]

    def layer_of(self, name: str) -> LayerPlace | None:
        return place_in_stacks(self, name)

    def role(self, name: str) -> Role:
        first = name.partition(".")[0]
        owner, _, own = name.rpartition(".")
        kind = "bias" if own == "bias" else "weight"
        if self.config.peft is not None and self.config.peft.owns(name):
            kind = "adapter"
        elif isinstance(self.get_submodule(owner), nn.LayerNorm | nn.RMSNorm):
            kind = "norm"
        part = "head" if first in _HEADS else "embedding" if first in _EMBEDDINGS else "shared"
        return Role("layer" if self.layer_of(name) else part, kind)  # type: ignore[arg-type]

    def stacked(self) -> dict[str, int]:
        return {
            f"{name}.{own}": len(module.parts)
            for name, module in self.named_modules()
            if isinstance(module, Projection) and len(module.parts) > 1
            for own, _ in module.named_parameters(recurse=False)
        }

    def last_layers(self, count: int) -> frozenset[str]:
        """Also the pooler of a task's head, which pre-training may have made."""
        pooler = {name for name, _ in self.named_parameters() if name.startswith("head.pooler.")}
        return super().last_layers(count) | pooler

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        config, shape = self.config, self.get_parameter(name).shape
        added = None if config.peft is None else config.peft.initial_std(name, shape)
        stds = config.initial_std(name) if added is None else (added,)
        size = shape.numel() // len(stds)
        parts = []
        for part, std in enumerate(stds):
            # The elements of this part, [part * size, (part + 1) * size), among those asked for.
            bounds = (part * size, (part + 1) * size)
            first, last = (min(max(place, bounds[0]), bounds[1]) for place in (start, stop))
            bound = config.normal_bound
            parts.append(initial_values(name, first, last, seed=seed, std=std, bound=bound))
        return torch.cat(parts)

    def start_from(self, stored: Stored) -> Start:
        """Parameters start from the tensors of their names.

        A head that the weights do not have is initialized, as are parameters that `peft` adds. The
        weights of heads and decoders that this model does not have may be left out.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        sources: dict[str, str | None] = {name: name for name in shapes}
        sources |= self._new_head(stored, shapes)
        if (peft := self.config.peft) is not None:
            sources |= {
                name: None for name in shapes if name not in stored.shapes and peft.owns(name)
            }
        parts: tuple[str, ...] = ("nsp_head",)
        reason = "model.nsp is false"
        if self.config.head != "language_model":
            parts, reason = ("nsp_head", "head"), f"model.head is {self.config.head}"
            if not any(name.startswith("decoder") for name in shapes):  # T5's taggers
                parts += ("decoder", "decoder_norm", "decoder_bias")
        unused = {name for name in stored.shapes if name.partition(".")[0] in parts}
        return Start(sources, frozenset(unused), reason)

    def _new_head(
        self, stored: Stored, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, str | None]:
        """The sources of head parameters that are not the stored ones of the same name."""
        config, before = self.config, stored.config
        if config.head == "language_model":
            own = [name for name in shapes if name.startswith("nsp_head.")]
            return {name: None for name in own if name not in stored.shapes}
        if (config.head, config.labels) == (before.head, before.labels):
            return {}
        begin = "head." if config.head != before.head else "head.classifier."
        found: dict[str, str | None] = {}
        for name in shapes:
            if name.startswith(begin):
                # BERT's fine-tuning goes on with the pooler of next-sentence prediction (Devlin et
                # al. 2019, section 3.2).
                pooler = f"nsp_{name}" if name.startswith("head.pooler.") else ""
                found[name] = pooler if stored.shapes.get(pooler) == shapes[name] else None
        return found

    def embedding_flops(self) -> int:
        """FLOPs of the projections in the embeddings, for each position; look-ups cost none."""
        linear = (module for module in self.embeddings.modules() if isinstance(module, nn.Linear))
        return sum(_flops(module.weight) for module in linear)

    def head_flops(self) -> int:
        """`matrix_flops` of the head for each position that it reads."""
        own = matrix_flops(self.head)
        shares = self.config.head == "language_model" and self.config.tied
        return own + _flops(self.token_embeddings) if shares else own


def layer_numbers(outputs: Outputs) -> list[int]:
    """The layers N whose hidden states are asked for, as `layer.N`, in ascending order."""
    prefix = "layer."
    return sorted(int(name.removeprefix(prefix)) for name in outputs if name.startswith(prefix))


def matrix_flops(module: nn.Module, only: str = "", without: str | None = None) -> int:
    """FLOPs for each position in the matrices whose names contain `only` and not `without`.

    6 per weight: 2 in the forward pass, 2 each for the gradients of the input and of the weight;
    without the latter where the weight is frozen. (What comes before everything trained has no
    backward pass, and is counted as if it had.)
    """
    return sum(
        _flops(weight)
        for name, weight in module.named_parameters()
        if weight.ndim == 2
        and ".prefix." not in name
        and only in name
        and (without is None or without not in name)
    )


def _flops(weight: Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()

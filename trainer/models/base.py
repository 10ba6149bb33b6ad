"""The common base of Transformers with one or two stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models import Model, Outputs, Role, Start, Stored
from trainer.models.config import TransformerConfig
from trainer.models.extras import Extra
from trainer.models.fused import FusedAttention
from trainer.models.heads import answer
from trainer.models.initialization import initial_values
from trainer.models.inputs import Inputs
from trainer.models.layers import Projection
from trainer.models.layers.attention import Attention, is_fusible
from trainer.models.stack import LayerPlace, ScanGroup, Stack, place_in_stacks

POOLED = ("classification", "multiple_choice")
"""Heads that pool one position of a sequence."""

_EMBEDDINGS = ("embeddings", "encoder_positions", "decoder_positions", "prompt")


class TransformerModel(Model):
    """A Transformer with a head.

    Attributes:
        prompt: inserts learned embeddings before the text's (`peft.prompt`).
        embeddings: token embeddings are its parameter `tokens.weight`.
        head: called as head(hidden, token_embeddings, dropout_key); returns logits.
        extras: optional parts.
        head_parts: modules that are a head, besides the extras.
    """

    head_parts: ClassVar[tuple[str, ...]] = ("head",)

    config: TransformerConfig
    embeddings: nn.Module
    head: nn.Module

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.prompt: nn.Module | None = None
        self.extras: tuple[Extra, ...] = ()
        self.reads = config.reads
        # What an objective may ask for. A head that pools one position pools the last of a decoder,
        # which has seen all others, or the first of an encoder ([CLS]).
        offers = {config.predicts, "hidden", *(f"layer.{n}" for n in range(config.layers + 1))}
        if config.head in POOLED:
            offers.add("last_position" if config.decoder else "first_position")
        self.offers: Outputs = frozenset(offers)
        # An objective without this output would leave the head without gradients. A task's head can
        # be removed by a setting; a language model's cannot.
        is_task = config.head != "language_model"
        self.trains = {config.predicts: "model.head=language_model" if is_task else ""}

    def add_extras(self, extras: Sequence[Extra]) -> None:
        """Adds optional parts, after the parameters that the model has."""
        self.extras = tuple(extras)
        for extra in extras:
            # In this order optimizers and checkpoints list the parameters.
            extra.add_to(self)
            self.offers |= extra.offers
            self.trains = {**self.trains, **extra.trains}

    @property
    def inserted(self) -> int:
        """Number of positions that a prompt inserts before a text."""
        return 0 if self.prompt is None else self.config.virtual_tokens

    def with_prompt(self, column: Tensor | None) -> Tensor | None:
        """Extends a column of segments or prefixes to the prompt: [B, S] -> [B, n + S]."""
        if column is None or self.prompt is None:
            return column
        # The prompt belongs to the text: segment 1 (rows with a prompt hold one), or the prefix.
        return F.pad(column, (self.inserted, 0), value=1)

    def pooled(self, predicted: Tensor | None) -> Tensor | None:
        """Shifts the positions that the head reads by the prompt's length: int [B, P] -> [B, P].

        An encoder's head that pools the first position pools the prompt's first.
        """
        first = self.config.head in POOLED and not self.config.decoder
        return predicted if predicted is None or first else predicted + self.inserted

    def answer(
        self,
        name: str,
        head: nn.Module,
        inputs: Inputs,
        hidden: Tensor,
        matrix: Tensor,
        *columns: Tensor | None,
    ) -> dict[str, Tensor]:
        """Runs the head of an output; see `trainer.models.heads.answer`."""
        target, vocabulary = inputs.targets.get(name), self.config.vocab_size
        return answer(name, head, target, vocabulary, hidden, matrix, *columns)

    @property
    def token_embeddings(self) -> Tensor:
        return self.get_parameter("embeddings.tokens.weight")

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        columns = super().columns(inputs)
        if self.config.reads_positions:
            columns |= self.config.position_columns(self.positions(inputs))
        return columns

    def positions(self, inputs: Inputs) -> Tensor:
        """The positions of prompt and text: int [B, n + S]."""
        length = inputs.tokens.shape[1]
        positions = inputs.positions
        if positions is None:
            positions = torch.arange(length, device=inputs.tokens.device)
        positions = positions.expand(len(inputs.tokens), -1) + self.inserted
        # A prompt of n embeddings has the positions 0 to n - 1.
        before = torch.arange(self.inserted, device=positions.device)
        before = before.to(positions.dtype).expand(len(positions), -1)
        return torch.cat([before, positions], 1)

    def stacks(self) -> dict[str, Stack]:
        """The stacks of layers, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Stack)}

    def use_dropout_version(self, version: int) -> None:
        for module in self.modules():
            if isinstance(module, Attention):
                module.dropout_version = version

    def fuse_attention(self, kernel: FusedAttention | None) -> bool:
        modules = [module for module in self.modules() if isinstance(module, Attention)]
        if not all(map(is_fusible, modules)):
            return False
        for module in modules:
            module.fused = kernel
        for model in self.modules():  # itself, and a generator
            if isinstance(model, TransformerModel):
                model.fuses_attention = kernel is not None
        return True

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order. Embeddings and head share a matrix, so both stay in the root.

        A layer that its stack uses several times stays in the root too: as a unit it would be
        gathered, and its gradients reduced, at each use.
        """
        units: list[nn.Module] = []
        for stack in self.stacks().values():
            uses = Counter(stack)
            units += [layer for layer in stack if uses[layer] == 1]
        return units

    def compiled_units(self) -> list[nn.Module]:
        """The layers in order, those that a stack uses several times, too."""
        return list(dict.fromkeys(layer for stack in self.stacks().values() for layer in stack))

    def scan_groups(self) -> list[ScanGroup]:
        return [group for name, stack in self.stacks().items() for group in stack.scan_groups(name)]

    def layer_of(self, name: str) -> LayerPlace | None:
        return place_in_stacks(self, name)

    def role(self, name: str) -> Role:
        first = name.partition(".")[0]
        owner, _, own = name.rpartition(".")
        # Norms are found by their module, since their parameters are called weight and bias too.
        kind = "bias" if own.endswith("bias") else "weight"
        if self.config.peft is not None and self.config.peft.owns(name):
            kind = "adapter"
        elif isinstance(self.get_submodule(owner), nn.LayerNorm | nn.RMSNorm):
            kind = "norm"
        is_head = first in self.head_parts or self._extra(name) is not None
        part = "head" if is_head else "embedding" if first in _EMBEDDINGS else "shared"
        return Role("layer" if self.layer_of(name) else part, kind)  # type: ignore[arg-type]

    def stacked(self) -> dict[str, int]:
        stacked = {
            f"{name}.{own}": len(module.parts)
            for name, module in self.named_modules()
            if isinstance(module, Projection) and len(module.parts) > 1
            for own, _ in module.named_parameters(recurse=False)
        }
        for extra in self.extras:
            stacked |= extra.stacked()
        return stacked

    def _extra(self, name: str) -> Extra | None:
        """The extra that a parameter belongs to."""
        first = name.partition(".")[0]
        return next((extra for extra in self.extras if extra.name == first), None)

    def last_layers(self, count: int) -> frozenset[str]:
        """The last layers, and the pooler of a task's head, which pre-training may have trained."""
        pooler = {name for name, _ in self.named_parameters() if name.startswith("head.pooler.")}
        return super().last_layers(count) | pooler

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        config, shape = self.config, self.get_parameter(name).shape
        added = None if config.peft is None else config.peft.initial_std(name, shape)
        extra = self._extra(name)
        if added is None and extra is not None:
            added = extra.initial_std(shape)
        stds = config.initial_std(name) if added is None else (added,)
        # Fused parameters have several parts with different distributions (T5's queries and keys).
        size = shape.numel() // len(stds)
        parts = []
        for part, std in enumerate(stds):
            # Part i holds elements [i * size, (i + 1) * size). With size 4, elements [2, 9) are
            # [2, 4) of part 0, all of part 1 and [8, 9) of part 2.
            first = min(max(start, part * size), (part + 1) * size)
            last = min(max(stop, part * size), (part + 1) * size)
            bound = config.normal_bound
            parts.append(initial_values(name, first, last, seed=seed, std=std, bound=bound))
        values = torch.cat(parts)
        if extra is not None:
            values += extra.initial_mean
        if (row := config.zero_row(name)) is not None:
            # Elements [row * width, (row + 1) * width) of the table, counted from `start`.
            first, last = (max(0, at * shape[1] - start) for at in (row, row + 1))
            values[first:last] = 0
        return values

    def start_from(self, stored: Stored) -> Start:
        """Initializes parameters from the tensors of the same names.

        A head that the weights lack, and parameters that `peft` adds, are initialized randomly.
        Stored heads and decoders that this model lacks are left out.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        before = stored.config
        # The stored model's configuration says which extras its names belong to.
        with torch.device("meta"):
            extras = before.build_extras() if isinstance(before, TransformerConfig) else ()
        # A later line overrides an earlier one: own names, then new heads, then what peft adds.
        sources: dict[str, str | None] = {name: name for name in shapes}
        sources |= self._new_head(stored, shapes, extras)
        # A part that a setting has added since begins anew.
        own = {name for name in shapes if self._extra(name) is not None}
        anew = {name for name in own if (extra := self._extra(name)) and extra.starts_anew}
        sources |= dict.fromkeys(anew | (own - stored.shapes.keys()))
        if (peft := self.config.peft) is not None:
            sources |= {
                name: None for name in shapes if name not in stored.shapes and peft.owns(name)
            }
        # Stored weights that the model does not use must be expected, or they point to an error.
        settings = {extra.name: extra.pretraining for extra in extras if extra.pretraining}
        parts = set(settings)
        reason = " and ".join(f"{setting} is not set" for setting in settings.values())
        if {self.config.head, before.head} != {"language_model"}:
            parts.add("head")
            reason = f"model.head is {self.config.head}"
            if not any(name.startswith("decoder") for name in shapes):  # T5's taggers
                parts |= {"decoder", "decoder_norm", "decoder_bias"}
        unused = {name for name in stored.shapes if name.partition(".")[0] in parts}
        if self.config.type_vocab == 0:  # a DistilBERT that starts from a BERT
            unused |= {"embeddings.types.weight"} & stored.shapes.keys()
        return Start(sources, frozenset(unused), reason)

    def _new_head(
        self, stored: Stored, shapes: Mapping[str, tuple[int, ...]], extras: Sequence[Extra]
    ) -> dict[str, str | None]:
        """The sources of a task's head that are not initialized from their own names.

        Args:
            extras: of the stored model.
        """
        config, before = self.config, stored.config
        if config.head == "language_model":
            new = before.head != "language_model"
            return {name: None for name in shapes if new and name.startswith("head.")}
        # A head for the same labels is loaded. For other labels only the classifier is new: the
        # pooler of a head of the same kind still fits.
        if (config.head, config.labels) == (before.head, before.labels):
            return {}
        labeled = tuple(extra.name for extra in self.extras if extra.has_labels)
        begin = ("head." if config.head != before.head else "head.classifier.", *labeled)
        found: dict[str, str | None] = {name: None for name in shapes if name.startswith(begin)}
        # "nsp_head.pooler.weight" becomes "head.pooler.weight", if the shapes are the same.
        for ours, theirs in (pair for extra in extras for pair in extra.lends.items()):
            for name in found:
                lent = name.replace(ours, theirs, 1) if name.startswith(ours) else ""
                if stored.shapes.get(lent) == shapes[name]:
                    found[name] = lent
        return found

    def embedding_flops(self) -> int:
        """FLOPs of the projections in the embeddings, per position; lookups cost none."""
        linear = (module for module in self.embeddings.modules() if isinstance(module, nn.Linear))
        return sum(_flops(module.weight) for module in linear)

    def head_flops(self) -> int:
        """`matrix_flops` of the head, per position that it reads."""
        own = matrix_flops(self.head)
        # A tied head multiplies by the token embeddings, which are not among its own parameters.
        shares = self.config.head == "language_model" and self.config.tied
        return own + _flops(self.token_embeddings) if shares else own


def layer_numbers(outputs: Outputs, kind: str = "layer") -> list[int]:
    """The numbers N of the outputs `KIND.N`, in ascending order."""
    prefix = f"{kind}."
    return sorted(int(name.removeprefix(prefix)) for name in outputs if name.startswith(prefix))


def matrix_flops(module: nn.Module, only: str = "", without: str | None = None) -> int:
    """FLOPs per position in the matrices whose names contain `only` and not `without`.

    6 per weight: 2 in the forward pass, and 2 each for the gradients of the input and the weight.
    Frozen weights have no gradient. (Layers below everything trained have no backward pass, but
    are counted as if they had.)
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

"""Training steps of ELECTRA, DeBERTa v2, ModernBERT, MPNet and Llama beside transformers' models,
and of NeoBERT beside its published computation, which transformers lacks; from the same weights on
the same batches.

    python -m benchmarks.step_encoders

Mini sizes (4 layers of 256; 6 for ModernBERT) in fp32 on the CPU, a vocabulary of 30,522, 32 rows
of 128 positions with 15 % of them masked (30 % for ModernBERT, 20 % for NeoBERT; Llama predicts
all next tokens), without dropout. Two works each:

step: forward, backward, clipping and AdamW, as both are used. Theirs computes the logits of all
    positions, and ELECTRA's two models are trained as the paper says, since transformers has no
    class for both.
equal: forward and backward passes that compute the same: with logits at masked positions on both
    sides, and of ELECTRA the discriminator alone.

That the losses agree is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import neobert_reference
from benchmarks.models import initialized, loaded
from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from samestep.examples import Examples, Vocabulary
from samestep.hashing import mix
from trainer.models.codecs import codec_of
from trainer.models.families import deberta_v2, electra, llama, modernbert, mpnet, neobert
from trainer.models.inputs import Inputs
from trainer.models.sampling import sample
from trainer.objectives.kinds import causal_lm, mlm, replaced_tokens
from trainer.publish.export import parameters_of_part

Work: TypeAlias = Literal["step", "equal"]
Family: TypeAlias = Literal["electra", "deberta", "modernbert", "mpnet", "neobert", "llama"]

VOCABULARY = Vocabulary(30_522, pad=0, cls=1, sep=2, mask=3, special=(0, 1, 2, 3))
LENGTH = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY.size,
    "layers": 4,
    "width": 256,
    "heads": 4,
    "ffn_width": 1024,
    "max_positions": 512,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
ELECTRA = electra.Config(**SHAPE, embedding_width=128, generator_divisor=4)
DEBERTA = deberta_v2.Config(**SHAPE, position_buckets=64)
MODERNBERT = modernbert.Config(
    **{**SHAPE, "layers": 6, "ffn_width": 384, "max_positions": 8192, "norm_eps": 1e-5}
)
MPNET = mpnet.Config(**SHAPE)

NEOBERT = neobert.Config(**{**SHAPE, "ffn_width": 688, "max_positions": 4096, "norm_eps": 1e-5})


class PublishedNeoBert(nn.Module):
    """The reference, called as a class of transformers, with these parameters of ours."""

    def __init__(self, config: neobert.Config, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        codec = codec_of(config)
        self.inner = neobert_reference.MaskedLM(codec.to_huggingface())
        self.inner.load_state_dict(codec.export_tensors(parameters))

    def base_model(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return (self.inner.model(input_ids, None, positions),)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.inner.decoder(self.base_model(input_ids, attention_mask)[0])
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


LLAMA = llama.Config(**{**SHAPE, "ffn_width": 688}, kv_heads=2)


def batch_of(objective: Any, size: int) -> dict[str, Tensor]:
    """Rows of random tokens, each one sequence."""
    row = np.arange(size)
    count = LENGTH - 2  # [CLS] and [SEP] surround them
    tokens = np.random.default_rng(0).integers(4, VOCABULARY.size, size * count, dtype=np.int32)
    ones = np.ones(size, dtype=np.float32)
    made = objective.collate(
        Examples(tokens, row, row * 0 + 1, row * 0 + count, mix(row), ones, True), LENGTH
    )
    return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in made.items()}


def masked_positions(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Row, position and label of each prediction."""
    used = batch["weights"] > 0
    return used.nonzero()[:, 0], batch["predicted"][used].long(), batch["labels"][used].long()


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Labels of all positions [B, S], -100 where nothing is predicted."""
    row, at, label = masked_positions(batch)
    labels = torch.full(batch["tokens"].shape, -100)
    labels[row, at] = label
    return labels


def electra_losses(work: Work, size: int) -> tuple[list[nn.Module], Sequence[Callable[[], Tensor]]]:
    """Both sides' models and losses."""
    objective = replaced_tokens.Config().build(VOCABULARY)
    batch, model = batch_of(objective, size), initialized(ELECTRA)
    totals = {name: torch.tensor(total) for name, total in objective.weights(batch).items()}
    own = dict(model.named_parameters())
    small, prefix = codec_of(ELECTRA).export_parts()["generator"]
    generator: Any = loaded("ElectraForMaskedLM", small, parameters_of_part(small, own, prefix))
    discriminator: Any = loaded("ElectraForPreTraining", ELECTRA, own)
    # One set of embeddings, as in the paper.
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.tie_weights()
    tokens, labels = batch["tokens"].long(), labels_of(batch)
    row, at, label = masked_positions(batch)
    original = tokens.clone()
    original[row, at] = label
    attended = torch.ones_like(tokens)
    real = batch["real_weights"]

    def theirs() -> Tensor:
        made = generator(input_ids=tokens, attention_mask=attended, labels=labels)
        with torch.no_grad():
            places = batch["predicted"].long()[..., None].expand(-1, -1, VOCABULARY.size)
            drawn = sample(made.logits.gather(1, places), batch["sample_key"], batch["predicted"])
            read = tokens.clone()
            read[row, at] = drawn[batch["weights"] > 0].long()
        logits = discriminator(input_ids=read, attention_mask=attended).logits
        found = F.binary_cross_entropy_with_logits(
            logits, (read != original).float(), weight=real, reduction="sum"
        )
        loss: Tensor = made.loss + 50 * found / real.sum()
        return loss

    def their_discriminator() -> Tensor:
        logits = discriminator(input_ids=tokens, attention_mask=attended).logits
        return F.binary_cross_entropy_with_logits(logits, (tokens != original).float())

    def our_discriminator() -> Tensor:
        inputs = Inputs(tokens=batch["tokens"], positions=batch["positions"])
        logits = model(inputs, {"replaced"})["replaced"]
        return F.binary_cross_entropy_with_logits(logits, (tokens != original).float())

    if work == "equal":
        return [model, discriminator], (our_discriminator, their_discriminator)
    return [model, nn.ModuleList([generator, discriminator])], (
        lambda: objective.loss(model, without_segments(batch), totals).total,
        theirs,
    )


def masked_lm_losses(
    config: Any,
    their_class: Callable[[Any, Mapping[str, Tensor]], Any],
    mask_fraction: float,
    head: Callable[[Any, Tensor], Tensor],
    columns: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    work: Work,
    size: int,
) -> tuple[list[nn.Module], Sequence[Callable[[], Tensor]]]:
    """Both sides' models and losses.

    Args:
        their_class: returns their model, from our configuration and parameters.
        head: their model and hidden states -> logits.
        columns: of a batch, those that ours reads.
    """
    objective = mlm.Config(mask_fraction=mask_fraction).build(VOCABULARY)
    batch, model = batch_of(objective, size), initialized(config)
    totals = {name: torch.tensor(total) for name, total in objective.weights(batch).items()}
    their_model = their_class(config, dict(model.named_parameters()))
    tokens, labels = batch["tokens"].long(), labels_of(batch)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if offset := config.position_offset:  # they would take [CLS], of id 1, for padding
        inputs["position_ids"] = batch["positions"].long() + offset
    row, at, label = masked_positions(batch)

    def theirs() -> Tensor:
        loss: Tensor = their_model(**inputs, labels=labels).loss
        return loss

    def their_predicted() -> Tensor:
        hidden = their_model.base_model(**inputs)[0]
        return F.cross_entropy(head(their_model, hidden[row, at]), label)

    return [model, their_model], (
        lambda: objective.loss(model, columns(batch), totals).total,
        theirs if work == "step" else their_predicted,
    )


def causal_lm_losses(
    work: Work, size: int
) -> tuple[list[nn.Module], Sequence[Callable[[], Tensor]]]:
    """Both sides' models and losses, which compute the same in both works."""
    objective = causal_lm.Config().build(VOCABULARY)
    batch, model = batch_of(objective, size), initialized(LLAMA)
    totals = {name: torch.tensor(total) for name, total in objective.weights(batch).items()}
    their_model = loaded("LlamaForCausalLM", LLAMA, dict(model.named_parameters()))
    labels = torch.where(batch["weights"] > 0, batch["labels"], -100)
    inputs = {"input_ids": batch["tokens"].long(), "labels": F.pad(labels, (1, 0), value=-100)}

    def theirs() -> Tensor:
        loss: Tensor = their_model(**inputs, use_cache=False).loss
        return loss

    return [model, their_model], (
        lambda: objective.loss(model, without_segments(batch), totals).total,
        theirs,
    )


def without_segments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of a batch in which each row is one sequence."""
    return {name: column for name, column in batch.items() if name != "segments"}


LOSSES: dict[Family, Callable[[Work, int], Any]] = {
    "electra": electra_losses,
    "deberta": partial(
        masked_lm_losses,
        DEBERTA,
        partial(loaded, "DebertaV2ForMaskedLM"),
        0.15,
        lambda model, hidden: model.cls(hidden),
        dict,  # its relative positions are masked by segments in any case
    ),
    "modernbert": partial(
        masked_lm_losses,
        MODERNBERT,
        partial(loaded, "ModernBertForMaskedLM"),
        0.3,
        lambda model, hidden: model.decoder(model.head(hidden)),
        without_segments,
    ),
    "mpnet": partial(
        masked_lm_losses,
        MPNET,
        partial(loaded, "MPNetForMaskedLM"),
        0.15,
        lambda model, hidden: model.lm_head(hidden),
        without_segments,
    ),
    "neobert": partial(
        masked_lm_losses,
        NEOBERT,
        PublishedNeoBert,
        0.2,
        lambda model, hidden: model.inner.decoder(hidden),
        without_segments,
    ),
    "llama": causal_lm_losses,
}


def measure(family: Family, work: Work, size: int, repeats: int) -> Comparison:
    """Both on a batch of `size` rows."""
    models, losses = LOSSES[family](work, size)
    ours, theirs = (loss() for loss in losses)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def contender(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> Contender:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def turn() -> float:
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            if work == "step":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            return size

        return Contender(name, turn)

    reference = "published" if family == "neobert" else "transformers"
    contenders = [
        contender(name, model, loss)
        for name, model, loss in zip(("samestep", reference), models, losses, strict=True)
    ]
    what = "training step" if work == "step" else "forward and backward, equal computations"
    title = f"{family}-mini, {what}: {size} x {LENGTH}, threads: {torch.get_num_threads()}"
    return compare(title, "examples", contenders, repeats)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32, help="examples of a step (default: 32)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--only", choices=list(LOSSES), help="one of the families")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    families = [options.only] if options.only else list(LOSSES)
    works: tuple[Work, ...] = ("step", "equal")
    publish(
        [
            measure(family, work, options.batch, options.repeats)
            for family in families
            for work in works
        ],
        options.json,
    )


if __name__ == "__main__":
    main()

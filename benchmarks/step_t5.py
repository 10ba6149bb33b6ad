"""Forward and backward passes of T5 beside Hugging Face's, from the same weights on the same
batches.

    python -m benchmarks.step_t5

T5-mini (v1.1, 4 + 4 layers of 256) in fp32 on the CPU, span corruption with 512 positions of
sources and 114 of targets, without padding. Each side computes the loss and all gradients: without
dropout, as in v1.1's pre-training, and with 0.1 of hidden states and 0 of attention probabilities.
That the losses agree without dropout is checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.models import import_transformers, initialized
from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from benchmarks.span_corruption import VOCABULARY, rows_of_text
from samestep.examples import Examples
from samestep.hashing import mix
from trainer.models.codecs import codec_of
from trainer.models.families import t5
from trainer.objectives.kinds import span_corruption

MINI = t5.Config(
    layers=4,
    width=256,
    heads=4,
    ffn_width=512,
    activation="geglu_tanh",
    tied=False,
    dropout=0.0,
    attention_dropout=0.0,
)


def measure(size: int, dropout: float, repeats: int) -> Comparison:
    """Both on a batch of `size` examples."""
    transformers = import_transformers()
    from transformers.models.t5.modeling_t5 import T5Attention

    objective = span_corruption.SpanCorruption(span_corruption.Config(), VOCABULARY)
    length, row = objective.pack_spec(512).sequence_length, np.arange(size)
    tokens, ones = rows_of_text(length, size).reshape(-1), np.ones(size, dtype=np.float32)
    made = objective.collate(
        Examples(tokens, row, row * 0, row * 0 + length, mix(row), ones, False), length
    )
    made["dropout_key"] = mix(row).astype(np.uint32).view(np.int32)
    batch = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in made.items()}
    rows = {
        name: column for name, column in batch.items() if "segments" not in name
    }  # each is one sequence
    totals = {name: torch.tensor(total) for name, total in objective.weights(batch).items()}

    model = initialized(replace(MINI, dropout=dropout))
    their_config = transformers.T5Config(
        **codec_of(replace(MINI, dropout=dropout)).to_huggingface()
    )
    their_model = transformers.T5ForConditionalGeneration(their_config)
    their_model.lm_head.weight = torch.nn.Parameter(
        their_model.lm_head.weight.clone()
    )  # it only unties what it reads
    their_model.load_state_dict(
        codec_of(MINI).export_tensors(dict(model.named_parameters())), strict=False
    )  # the token table has several names
    for module in their_model.modules():
        if isinstance(module, T5Attention):
            module.dropout = 0.0

    for each in (model, their_model):
        each.eval()

    def ours() -> torch.Tensor:
        model.zero_grad()
        loss = objective.loss(model, rows, totals).total
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def theirs() -> torch.Tensor:
        their_model.zero_grad()
        loss: torch.Tensor = their_model(
            input_ids=batch["tokens"].long(),
            decoder_input_ids=batch["target_tokens"].long(),
            labels=batch["labels"],
        ).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    torch.testing.assert_close(ours(), theirs(), rtol=1e-5, atol=0.0)
    for each in (model, their_model):
        each.train()
    contenders = [
        Contender("samestep", lambda: size * float(ours() > 0)),
        Contender("Hugging Face", lambda: size * float(theirs() > 0)),
    ]
    where = f"{size} x (512 + 114) positions, dropout {dropout}, threads: {torch.get_num_threads()}"
    title = f"Forward and backward passes of T5-mini, {where}"
    return compare(title, "examples", contenders, repeats)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=8, help="examples of a pass (default: 8)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    publish(
        [measure(options.batch, dropout, options.repeats) for dropout in (0.0, 0.1)], options.json
    )


if __name__ == "__main__":
    main()

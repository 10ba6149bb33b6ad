"""Writes docs/parity.md: models of shipped sizes with random weights, compared with `transformers`.

python tests/parity/table.py; it takes minutes, and 4 GB of memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    BartConfig,
    BertConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    EuroBertConfig,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    Olmo2Config,
    OpenAIGPTConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from benchmarks.neobert_reference import RELEASED, MaskedLM
from tests.outputs import fill, predict
from trainer.checkpoint.huggingface import save_folder
from trainer.models.codecs import codec_of
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import load_weights

NEW_TOKENS = 20
STACKS = ("encoder", "decoder")
T5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "decoder_start_token_id": 0}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SMALL_LLAMA = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
MODELS = {
    "t5-small": T5Config(**T5, d_ff=2048, num_layers=6, num_heads=8),
    "t5-v1_1-small": T5Config(**T5, **V1_1, d_ff=1024, num_layers=8, num_heads=6),
    "bart-base": BartConfig(
        **{f"{stack}_layers": 6 for stack in STACKS},
        **{f"{stack}_attention_heads": 12 for stack in STACKS},
        **{f"{stack}_ffn_dim": 3072 for stack in STACKS},
        d_model=768,
        forced_eos_token_id=None,
    ),
    "gpt2": GPT2Config(),
    "openai-gpt": OpenAIGPTConfig(),
    "smollm-135m": LlamaConfig(
        **SMALL_LLAMA, vocab_size=49152, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "qwen3-0.6b, 4 of its layers": Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "olmo-2-1b, 2 of its layers, 32,000 tokens": Olmo2Config(
        vocab_size=32000,
        hidden_size=2048,
        num_hidden_layers=2,
        num_attention_heads=16,
        intermediate_size=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"},
        eos_token_id=2,
    ),
}
SMALL_ELECTRA = {"intermediate_size": 256, "num_attention_heads": 1, "hidden_size": 64}
DEBERTA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
SHARED = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
ENCODERS = {
    "bert-base": (BertConfig(), "MaskedLM"),
    "roberta-base": (
        RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
        "MaskedLM",
    ),
    "albert-base": (
        AlbertConfig(
            hidden_size=768, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu_new"
        ),
        "MaskedLM",
    ),
    "distilbert-base": (DistilBertConfig(), "MaskedLM"),
    "electra-small, discriminator": (ElectraConfig(), "PreTraining"),
    "electra-small, generator": (ElectraConfig(**SMALL_ELECTRA), "MaskedLM"),
    "modernbert-base": (ModernBertConfig(), "MaskedLM"),
    "mpnet-base": (MPNetConfig(max_position_embeddings=514, layer_norm_eps=1e-5), "MaskedLM"),
    "eurobert-210m": (EuroBertConfig(rope_parameters={"rope_theta": 250_000.0}), "MaskedLM"),
    "deberta-base": (DebertaConfig(**DEBERTA), "MaskedLM"),
    "deberta-v3-base": (DebertaV2Config(**DEBERTA, **SHARED), "MaskedLM"),
}
XLNET = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
HEADER = """# Parity with transformers

Written by `tests/parity/table.py`: models of the released sizes, with random weights, in fp32 on a CPU. A
difference is the largest difference of any element, divided by the largest element; for gradients, of the worst
parameter. Inputs are 2 rows of 256 tokens, with targets of 64 for T5 and BART; rows of encoders have 256 and 200. `tests/parity/` makes the same comparisons and
more with small models, including BERT, RoBERTa and every task head of a family (classification, regression, multiple
choice, tagging, spans): logits, losses and gradients are within 1e-5 of `transformers`.

NeoBERT has no class in `transformers`: its row is beside a reference written from the published code
(`benchmarks/neobert_reference.py`); its second row has three packed sequences and padding.

Recurrent models have no class in `transformers`. `tests/parity/test_lstm.py` compares them with compositions of `torch.nn.LSTM`,
`nn.Embedding` and `nn.Linear` that read one sequence at a time: logits, loss and gradients of packed rows are within 1e-5, in both
directions. So are those of the classifier with concat pooling, on rows padded on either side.

The span loss differs on padded batches: ours is a softmax over positions with a token; `transformers` includes padding,
so its models must learn that no answer is in padding. The two are compared on rows without padding. Predictions are the
same, since padding is in no answer.

| model | parameters | logits | loss | gradients | {tokens} greedy tokens |
|---|---|---|---|---|---|
"""  # noqa: E501


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(name: str) -> str:
    """A row of the table."""
    config, generator = MODELS[name], torch.Generator().manual_seed(0)
    two_stacks = config.is_encoder_decoder
    auto: Any = (
        transformers.AutoModelForSeq2SeqLM if two_stacks else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    theirs: PreTrainedModel = auto.from_config(config).eval()
    if name == "t5-v1_1-small":  # which transformers unties only when it loads
        head = torch.randn(config.vocab_size, config.d_model, generator=generator)
        theirs.lm_head.weight = nn.Parameter(head * config.d_model**-0.5)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        weights = load_weights(Path(folder))
        ours = weights.config.build().eval()
        fill(ours, dict(weights.tensors))
    tokens = torch.randint(2, config.vocab_size, (2, 256), generator=generator)
    labels = (
        torch.randint(2, config.vocab_size, (2, 64), generator=generator) if two_stacks else tokens
    )
    if two_stacks:
        start = F.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
        logits = [
            theirs(input_ids=tokens, decoder_input_ids=start).logits,
            predict(ours, tokens=tokens, target_tokens=start),
        ]
    else:
        positions = torch.arange(256).expand(2, -1)
        logits = [
            theirs(input_ids=tokens).logits,
            predict(ours, tokens=tokens, positions=positions),
        ]
    losses = [F.cross_entropy(each.flatten(0, 1), labels.flatten()) for each in logits]
    for loss in losses:
        loss.backward()
    expected = codec_of(weights.config).import_tensors(
        {key: value.grad for key, value in theirs.named_parameters()}
    )
    # The bias of BART's logits is constant there.
    gradients = max(
        difference(value.grad, expected[key])
        for key, value in ours.named_parameters()
        if name != "bart-base" or key != "head.bias"
    )
    equal = torch.equal(ours_greedy(ours, tokens, two_stacks), theirs_greedy(theirs, tokens))
    count = sum(parameter.numel() for parameter in ours.parameters())
    differences = (difference(logits[1], logits[0]), difference(losses[1], losses[0]), gradients)
    cells = " | ".join(f"{each:.0e}" for each in differences)
    return f"| {name} | {count:,} | {cells} | {'equal' if equal else 'NOT EQUAL'} |"


def compare_encoder(name: str) -> str:
    """A row of the table, for a model that generates no text."""
    config, head = ENCODERS[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, f"AutoModelFor{head}").from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        weights = load_weights(Path(folder))
        ours = weights.config.build().eval()
        fill(ours, dict(weights.tensors))
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(256) < torch.tensor([[256], [200]])
    tokens = torch.randint(5, config.vocab_size, (2, 256), generator=generator)
    tokens = torch.where(real, tokens, config.pad_token_id)
    positions = torch.arange(256).expand(2, -1)
    logits = [
        theirs(input_ids=tokens, attention_mask=real.int()).logits[real],
        predict(ours, tokens=tokens, segments=real.int(), positions=positions)[real],
    ]
    if head == "PreTraining":
        replaced = (tokens % 7 == 0)[real].float()
        losses = [F.binary_cross_entropy_with_logits(each, replaced) for each in logits]
    else:
        losses = [F.cross_entropy(each, tokens[real]) for each in logits]
    return row(name, weights.config, theirs, ours, logits, losses)


def compare_xlnet() -> str:
    """A row of the table: two streams, and 42 predictions in each row."""
    torch.manual_seed(0)
    theirs = transformers.XLNetLMHeadModel(XLNetConfig(**XLNET)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        weights = load_weights(Path(folder))
        ours = weights.config.build().eval()
        fill(ours, dict(weights.tensors))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 32000, (2, 256), generator=generator)
    places = torch.stack([torch.randperm(255, generator=generator)[:42] + 1 for _ in tokens])
    types = (torch.arange(256) >= 100).long().expand(2, -1)
    order = torch.arange(1, 43, dtype=torch.int32).expand(2, -1)
    rank = torch.zeros(2, 256, dtype=torch.int32).scatter(1, places, order)
    hidden = (rank[:, None, :] > 0) & (rank[:, None, :] >= rank[:, :, None])
    logits = [
        theirs(
            input_ids=tokens,
            token_type_ids=types,
            perm_mask=hidden.float(),
            target_mapping=F.one_hot(places, 256).float(),
            use_mems=False,
        ).logits,
        predict(ours, tokens=tokens, token_types=types, predicted=places, extra={"rank": rank}),
    ]
    losses = [
        F.cross_entropy(each.flatten(0, 1), tokens.gather(1, places).flatten()) for each in logits
    ]
    return row("xlnet-base", weights.config, theirs, ours, logits, losses)


def compare_neobert() -> str:
    """A row of the table, beside the reference."""
    torch.manual_seed(0)
    theirs = MaskedLM(RELEASED)
    with tempfile.TemporaryDirectory() as folder:
        content = {**RELEASED, "architectures": ["NeoBERTLMHead"]}
        save_folder(Path(folder) / "model", content, theirs.state_dict())
        weights = load_weights(Path(folder) / "model")
        ours = weights.config.build().eval()
        fill(ours, dict(weights.tensors))
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(256).expand(2, -1)
    columns = {
        "tokens": torch.randint(5, 30522, (2, 256), generator=generator),
        "segments": torch.stack([torch.ones(256).long(), (place[0] < 200) * (1 + place[0] // 90)]),
        "positions": torch.stack([place[0], place[0] % 90]),
    }
    real = columns["segments"] > 0
    columns["tokens"] *= real
    logits = [theirs(**columns)[real], predict(ours, **columns)[real]]
    losses = [F.cross_entropy(each, columns["tokens"][real]) for each in logits]
    return row("neobert", weights.config, theirs, ours, logits, losses)


def row(
    name: str,
    config: Any,
    theirs: nn.Module,
    ours: Any,
    logits: list[Tensor],
    losses: list[Tensor],
) -> str:
    """The row of a model that generates no text, from theirs and ours."""
    for loss in losses:
        loss.backward()
    expected = codec_of(config).import_tensors(
        {key: value.grad for key, value in theirs.named_parameters() if value.grad is not None}
    )
    gradients = max(difference(value.grad, expected[key]) for key, value in ours.named_parameters())
    count = sum(parameter.numel() for parameter in ours.parameters())
    differences = (difference(logits[1], logits[0]), difference(losses[1], losses[0]), gradients)
    cells = " | ".join(f"{each:.0e}" for each in differences)
    return f"| {name} | {count:,} | {cells} | - |"


def theirs_greedy(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model.generate(
        input_ids=tokens,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, -NEW_TOKENS:]


def ours_greedy(model: Any, tokens: Tensor, two_stacks: bool) -> Tensor:
    if two_stacks:
        begin = torch.zeros(2, 1, dtype=torch.int64)
        logits, cache = model.start(Inputs(tokens, target_tokens=begin), NEW_TOKENS)
    else:
        logits, cache = model.start(
            Inputs(tokens, torch.ones_like(tokens)), tokens.shape[1] + NEW_TOKENS
        )
    chosen = [logits.argmax(-1)]
    while len(chosen) < NEW_TOKENS:
        chosen.append(model.step(chosen[-1], cache).argmax(-1))
    return torch.stack(chosen, 1)


if __name__ == "__main__":
    rows = [compare_encoder(name) for name in ENCODERS] + [compare_neobert(), compare_xlnet()]
    rows += [compare(name) for name in MODELS]
    versions = f"\ntorch {torch.__version__}, transformers {transformers.__version__}.\n"
    page = HEADER.format(tokens=NEW_TOKENS) + "\n".join(rows) + "\n" + versions
    Path(__file__).parents[2].joinpath("docs", "parity.md").write_text(page, encoding="utf-8")

"""Generated tokens are those of `transformers`, from the same random weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from samestep.examples import Vocabulary
from tests.outputs import fill
from trainer.generation import Config, Generator
from trainer.training.weights.loading import load_weights

# So few tokens that texts end at many lengths.
VOCABULARY = Vocabulary(size=24, pad=0, cls=None, sep=None, mask=None, special=(0, 1), eos=1)
T5 = T5Config(
    vocab_size=24, d_model=32, d_kv=12, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
)
BART = BartConfig(
    vocab_size=24,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)
GPT2 = GPT2Config(
    vocab_size=24, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1
)
LENGTHS = (9, 1, 17, 4, 12, 3)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_new_tokens": 6},
    *(
        {"beams": 4, "length_penalty": penalty, "early_stopping": stopping}
        for penalty, stopping in (
            (0.6, False),
            (0.6, True),
            (1.0, "never"),
            (1.0, True),
            (2.0, False),
            (2.0, "never"),
        )
    ),
    {"beams": 3, "length_penalty": -1.0, "min_new_tokens": 5},
]


@pytest.fixture(params=["t5", "bart", "gpt2"], scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Any]:
    """A random model of theirs, and ours with its weights."""
    kinds: dict[str, Any] = {
        "t5": (T5ForConditionalGeneration, T5),
        "bart": (BartForConditionalGeneration, BART),
        "gpt2": (GPT2LMHeadModel, GPT2),
    }
    model_class, config = kinds[request.param]
    reference: Any = model_class(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        if request.param == "bart":  # whose texts would not end otherwise
            reference.final_logits_bias[0, 1] = 3.0
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference.eval().save_pretrained(folder)
    weights = load_weights(folder)
    model = weights.config.build()
    fill(model, dict(weights.tensors))
    return reference, model


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 24, (length,), generator=generator).tolist() for length in LENGTHS]


def theirs(
    reference: Any, sources: Sequence[Sequence[int]], settings: dict[str, Any]
) -> list[list[int]]:
    """What they generate, without the end token and what follows it."""
    side = "right" if reference.config.is_encoder_decoder else "left"
    tokens = pad_sequence(
        [torch.tensor(source) for source in sources], batch_first=True, padding_side=side
    )
    settings = {{"beams": "num_beams"}.get(name, name): value for name, value in settings.items()}
    generated = reference.generate(
        input_ids=tokens,
        attention_mask=(tokens > 0).long(),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    new = generated[:, 1 if side == "right" else tokens.shape[1] :].tolist()
    return [text[: text.index(1)] if 1 in text else text for text in new]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "greedy"
)
def test_tokens_are_those_of_transformers(pair: tuple[Any, Any], settings: dict[str, Any]):
    """Sources of different lengths in one batch, of which texts of different lengths come."""
    reference, model = pair
    generated = Generator(model, VOCABULARY, Config(max_new_tokens=12, **settings))(texts())
    assert generated == theirs(reference, texts(), settings)
    assert len(set(map(len, generated))) > 1 or settings.get("length_penalty") == 2.0

"""What generation promises whatever the model: draws, batches, limits."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import mix, uniform
from tests.outputs import predict
from trainer.generation import Config, Generator
from trainer.generation.ensemble import Ensemble
from trainer.generation.sampling import sample
from trainer.models.families import bart, bert, bilm, gpt2, llama, modernbert, t5
from trainer.models.peft.kinds import prefix, prompt

SHAPE: dict[str, Any] = {"vocab_size": 40, "layers": 2, "width": 32, "heads": 4, "ffn_width": 48}
T5 = t5.Config(**SHAPE, head_width=12)
GPT2 = gpt2.Config(**SHAPE, max_positions=24)
BERT = bert.Config(**SHAPE, max_positions=24, causal=True)
LLAMA = llama.Config(**SHAPE, kv_heads=1, head_width=8, max_positions=24, window=4, qk_norm=True)
# Local layers see 2 positions on each side.
MODERNBERT = modernbert.Config(
    **SHAPE, max_positions=24, causal=True, local_window=4, global_every=2
)
PROMPTED = {
    f"{name}, {kind}": dataclasses.replace(config, peft=peft)
    for name, config in {
        "t5 language_model": dataclasses.replace(T5, architecture="language_model"),
        "t5 prefix_lm": dataclasses.replace(T5, architecture="prefix_lm"),
        "gpt2": GPT2,
        "modernbert": MODERNBERT,
    }.items()
    for kind, peft in {"prompt": prompt.Config(3), "prefix": prefix.Config(3)}.items()
}
VOCABULARY = Vocabulary(size=30, pad=0, cls=None, sep=None, mask=None, special=(0, 1), eos=1)
SOURCES = [[5, 9, 2, 7], [3], [8, 8, 4, 6, 2, 9, 10], [11, 4]]


def make(config: Any, seed: int = 0) -> Any:
    """A model of random weights; those of 10 tokens, which the tokenizer lacks, would be the
    likeliest.
    """
    model = config.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.embeddings.tokens.weight[30:] *= 5
    return model


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, 12),
        ({"temperature": 0.5}, 12),
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, 6),
        ({"top_k": 6, "top_p": 0.7, "temperature": 1.5}, 4),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(settings: dict[str, Any], chosen: int):
    """The shares of 200,000 draws are within 5 standard deviations of what a loop over the tokens
    says.
    """
    config, count = Config(sample=True, **settings), 200_000
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0, -2.0, 1.0, -0.5, 0.8, -1.5, 0.2, -3.0, -0.2])
    expected = np.zeros(12)
    weights = np.exp(logits.numpy().astype(np.float64) / config.temperature)
    kept = np.argsort(-weights)[: config.top_k]
    for token in kept:
        if expected.sum() < config.top_p * weights[kept].sum():
            expected[token] = weights[token]
    expected /= expected.sum()
    assert np.count_nonzero(expected) == chosen
    drawn = torch.from_numpy(uniform(mix(np.arange(count))))
    shares = np.bincount(sample(logits.expand(count, -1), drawn, config), minlength=12) / count
    np.testing.assert_array_less(
        np.abs(shares - expected), 5 * np.sqrt(expected * (1 - expected) / count) + 1e-12
    )


@pytest.mark.parametrize("config", [T5, GPT2, MODERNBERT], ids=["t5", "gpt2", "modernbert"])
def test_a_text_does_not_depend_on_its_batch(config: Any):
    """Nor does a sampled one, as long as its number and the seed are the same."""
    model = make(config)
    for settings in ({"sample": True, "top_p": 0.95}, {"beams": 3}, {}):
        together = Generator(model, VOCABULARY, Config(12, **settings))(SOURCES, first=10)
        by_two = Config(12, batch_size=2, **settings)
        alone = [
            Generator(model, VOCABULARY, by_two)([source], 10 + n)[0]
            for n, source in enumerate(SOURCES)
        ]
        assert together == Generator(model, VOCABULARY, by_two)(SOURCES, 10) == alone
        assert max(max(text, default=0) for text in together) < 30
    drawn = [
        Generator(model, VOCABULARY, Config(12, sample=True, seed=seed))(SOURCES) for seed in (0, 1)
    ]
    assert drawn[0] != drawn[1]
    same = Generator(model, VOCABULARY, Config(12, sample=True))([SOURCES[0]] * 4)
    assert len(set(map(tuple, same))) > 1


@pytest.mark.parametrize("config", PROMPTED.values(), ids=PROMPTED)
def test_padding_comes_before_a_prompt(config: Any) -> None:
    """So a text does not depend on the lengths of the others in its batch."""
    model = make(config)
    for beams in (1, 3):
        together = Generator(model, VOCABULARY, Config(8, beams=beams))(SOURCES)
        alone = Generator(model, VOCABULARY, Config(8, beams=beams, batch_size=1))(SOURCES)
        assert together == alone


@pytest.mark.parametrize("config", [T5, GPT2], ids=["t5", "gpt2"])
def test_an_ensemble_chooses_by_the_mean_of_the_logits(config: Any) -> None:
    """Computed anew for each token; the beams of one model twice are its own."""
    members = [make(config, seed).eval() for seed in range(3)]
    found = Generator(Ensemble(members), VOCABULARY, Config(8))(SOURCES)
    for source, text in zip(SOURCES, found, strict=True):
        expected: list[int] = []
        while len(expected) < 8 and expected[-1:] != [1]:
            inputs = {"tokens": torch.tensor([source])}
            if config.encoder_decoder:
                inputs["target_tokens"] = torch.tensor([[0, *expected]])
            else:
                inputs["tokens"] = torch.tensor([[*source, *expected]])
                inputs["positions"] = torch.arange(len(source) + len(expected))[None]
            logits = torch.stack([predict(member, **inputs)[0, -1, :30] for member in members])
            expected.append(int(logits.mean(0).argmax()))
        assert text == [token for token in expected if token != 1]
    alone = [Generator(member, VOCABULARY, Config(8))(SOURCES) for member in members]
    assert found not in alone
    # A table with other rows of padding changes nothing.
    padded, parameters = members[0].config.pad_vocabulary(dict(members[0].named_parameters()), 48)
    wide = padded.build().eval()
    wide.load_state_dict(parameters, strict=False)
    assert Generator(Ensemble([wide, *members[1:]]), VOCABULARY, Config(8))(SOURCES) == found
    beams = Config(8, beams=3)
    twice = Generator(Ensemble([members[0]] * 2), VOCABULARY, beams)(SOURCES)
    assert twice == Generator(members[0], VOCABULARY, beams)(SOURCES)


def test_members_of_an_ensemble_are_of_one_kind() -> None:
    prefixed, decoder = (
        dataclasses.replace(T5, architecture=name) for name in ("prefix_lm", "language_model")
    )
    encoder = dataclasses.replace(BERT, causal=False)
    for pair in ((T5, GPT2), (prefixed, decoder), (GPT2, encoder)):
        with pytest.raises(ConfigError, match="read texts in different ways"):
            Ensemble([make(config) for config in pair])
    with pytest.raises(ConfigError, match="a model of the ensemble writes no text"):
        Ensemble([bilm.Config(vocab_size=40, proj_size=0, hidden_size=512).build()] * 2)


@pytest.mark.parametrize(
    "config",
    [
        BERT,
        MODERNBERT,
        LLAMA,
        *PROMPTED.values(),
        dataclasses.replace(T5, architecture="language_model"),
        dataclasses.replace(T5, architecture="prefix_lm"),
        dataclasses.replace(T5, architecture="shared_encoder_decoder"),
    ],
    ids=[
        "causal_bert",
        "causal_modernbert",
        "llama",
        *PROMPTED,
        "t5_language_model",
        "t5_prefix_lm",
        "t5_shared",
    ],
)
def test_greedy_tokens_are_those_of_whole_forward_passes(config: Any):
    """Computed anew for each token, without a cache or padding."""
    model = make(config).eval()
    for source, text in zip(SOURCES, Generator(model, VOCABULARY, Config(8))(SOURCES), strict=True):
        expected: list[int] = []
        while len(expected) < 8 and expected[-1:] != [1]:
            if config.encoder_decoder:
                targets = torch.tensor([[0, *expected]])
                logits = predict(model, tokens=torch.tensor([source]), target_tokens=targets)
            else:
                row = torch.tensor([source + expected])
                prefix = torch.arange(row.shape[1])[None] < len(source)
                positions = torch.arange(row.shape[1])[None]
                is_prefix_lm = getattr(config, "prefix_lm", False)
                logits = predict(
                    model, tokens=row, positions=positions, prefix=prefix if is_prefix_lm else None
                )
            expected.append(int(logits[0, -1, :30].argmax()))
        assert text == [token for token in expected if token != 1]


def test_what_is_too_long_loses_its_beginning(caplog: pytest.LogCaptureFixture):
    generate = Generator(make(GPT2), VOCABULARY, Config(5))
    long = [2 + n % 20 for n in range(30)]
    with caplog.at_level(logging.WARNING):
        assert generate([long, [5]]) == generate([long[-20:], [5]])
    assert [record.getMessage()[:39] for record in caplog.records] == [
        "1 of 2 texts are longer than 20 tokens, "[:39]
    ]
    assert generate([]) == []


def test_a_source_that_is_too_long_loses_its_end(caplog: pytest.LogCaptureFixture):
    """But not the token that ends it."""
    config = bart.Config(**SHAPE, max_positions=24, start_token=1)
    generate = Generator(make(config), VOCABULARY, Config(5))
    long = [2 + n % 20 for n in range(30)]
    with caplog.at_level(logging.WARNING):
        assert generate([[*long, 1], [5, 1]]) == generate([[*long[:23], 1], [5, 1]])
    assert [record.getMessage()[:39] for record in caplog.records] == [
        "1 of 2 texts are longer than the 24 tokens"[:39]
    ]


@pytest.mark.parametrize(
    ("config", "vocabulary", "settings", "words"),
    [
        (dataclasses.replace(BERT, causal=False), VOCABULARY, {}, "samestep fill"),
        (GPT2, dataclasses.replace(VOCABULARY, eos=None), {}, "no token that ends a text"),
        (T5, dataclasses.replace(VOCABULARY, pad=None), {}, "no <pad>"),
        (GPT2, VOCABULARY, {"max_new_tokens": 24}, "takes texts of 24 tokens"),
        (GPT2, VOCABULARY, {"max_new_tokens": 9, "beams": 16}, "at most half of the 30 tokens"),
    ],
)
def test_models_that_cannot_generate(
    config: Any, vocabulary: Vocabulary, settings: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words):
        Generator(config.build(), vocabulary, Config(**{"max_new_tokens": 8, **settings}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beams": 0}, "beams is 0. Use at least 1"),
        ({"top_k": 0, "sample": True}, "top_k is 0"),
        ({"top_p": 1.5, "sample": True}, "top_p is 1.5"),
        ({"temperature": 0.0, "sample": True}, "temperature is 0.0"),
        ({"min_new_tokens": 128}, "use 0 to 127"),
        ({"beams": 2, "sample": True}, "exclude each other"),
        ({"top_p": 0.9}, "have no effect without sample"),
        ({"seed": 7}, "have no effect without sample"),
        ({"length_penalty": 0.6}, "have no effect without beam search"),
        ({"early_stopping": "never"}, "have no effect without beam search"),
        ({"early_stopping": True, "sample": True}, "have no effect without beam search"),
        ({"seed": -1, "sample": True}, r"seed is -1. Use 0 to 2\*\*64 - 1"),
        ({"seed": 2**64, "sample": True}, "seed is 18446744073709551616"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Config(**settings)

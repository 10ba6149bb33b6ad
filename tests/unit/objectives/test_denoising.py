"""Denoising: each scheme against its published definition, counted over 10,000 texts.

Nothing is lost, and a text's pair depends on nothing but the text and its key.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import mix
from tests.unit.objectives.test_span_corruption import restored
from tests.unit.objectives.texts import EOS, PAD, SENTINELS, VOCABULARY, only, pack, pairs_of
from trainer.objectives import noise
from trainer.objectives.kinds import span_corruption
from trainer.objectives.kinds.denoising import Config, Scheme
from trainer.objectives.text_to_text import Ragged

LAYOUTS = ("encoder_decoder", "prefix_lm", "language_model")
SCHEMES = get_args(Scheme)
WHOLE = ("bert", "mass", "deshuffle", "infill", "permute_sentences", "bart", "delete", "rotate")
DOT = 3
STOPS = replace(VOCABULARY, full_stops=(DOT,))
MASK = SENTINELS[0]
R, S, X = SENTINELS[-1], SENTINELS[-2], SENTINELS[-3]
LENGTHS = [1, 2, 3, 4, 5, 700, 1, *np.random.default_rng(0).integers(1, 90, 60)]
TEXTS = 10_000

Pairs = list[tuple[list[int], list[int]]]


def made(
    scheme: str, length: int, texts: int = TEXTS, vocabulary: Vocabulary = STOPS, **settings: Any
) -> tuple[Pairs, list[list[int]]]:
    """The pairs of many texts of one length, and the texts."""
    objective = Config(scheme, **settings).build(vocabulary)
    spec = objective.pack_spec(int(objective.sizes(np.array([length]))[0][0]))
    examples, lines = pack([length] * texts, spec, "padded")
    return pairs_of(objective.collate(examples, spec.sequence_length)), lines


def denoised(scheme: str, length: int) -> tuple[np.ndarray, Ragged, Ragged]:
    """As `made`, without rows: the objective's pairs of texts of the tokens 100, 101, ..."""
    tokens = np.tile(np.arange(100, 100 + length, dtype=np.int32), TEXTS)
    objective = Config(scheme).build(STOPS)
    return objective.pairs(Ragged(tokens, np.full(TEXTS, length)), mix(np.arange(TEXTS)))


def lengths_of_spans(target: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """The text of each sentinel, and the number of tokens after it."""
    special = np.flatnonzero(np.isin(target.tokens, (*SENTINELS, EOS)))
    text = np.repeat(np.arange(target.length.size), target.length)[special]
    is_span = target.tokens[special] != EOS
    return text[is_span], np.diff(special, append=0)[is_span] - 1


def of_distinct_tokens(scheme: str, length: int, texts: int = TEXTS, **settings: Any) -> np.ndarray:
    """The sources of texts of the tokens 100, 101, ...: int [texts, length]; all equally long."""
    objective = Config(scheme, **settings).build(STOPS)
    tokens = np.tile(np.arange(100, 100 + length, dtype=np.int32), texts)
    _, source, target = objective.pairs(
        Ragged(tokens, np.full(texts, length)), mix(np.arange(texts))
    )
    assert np.array_equal(target.tokens.reshape(texts, -1)[:, :-1].ravel(), tokens)
    return source.tokens.reshape(texts, -1)[:, :-1]


def chi_squared(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def critical(freedom: int) -> float:
    """Exceeded by chance once in 1000 times (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_lost_under_any_layout_and_packing(
    scheme: Any, policy: Any, layout: Any
) -> None:
    objective = Config(scheme, layout=layout).build(STOPS)
    spec = objective.pack_spec(64)
    examples, texts = pack(LENGTHS, spec, policy)
    batch = objective.collate(examples, spec.sequence_length)
    assert batch["tokens"].shape in ((examples.key.size, width) for width in (63, 64))
    assert batch["labels"].shape == (examples.key.size, objective.predictions(64))
    pairs = pairs_of(batch)
    assert all(source[-1] == target[-1] == EOS for source, target in pairs)
    for (source, target), text in zip(pairs, texts, strict=True):
        if scheme in WHOLE:
            assert target[:-1] == text
        elif scheme == "drop":
            assert Counter(source + target) == Counter([*text, EOS, EOS])
        else:
            assert restored(source[scheme == "ul2" :], target) == text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_is_the_same_alone_and_in_any_batch(scheme: Any, policy: Any, layout: Any) -> None:
    objective = Config(scheme, layout=layout).build(STOPS)
    spec = objective.pack_spec(48)
    examples, _ = pack(np.random.default_rng(0).integers(1, 100, 60), spec, policy)
    batch = objective.collate(examples, spec.sequence_length)
    for rows in ([5], [7, 0, 5, 5, 3]):
        some = objective.collate(only(examples, rows), spec.sequence_length)
        assert all(np.array_equal(some[name], batch[name][rows]) for name in batch)


def test_an_order_is_the_same_among_any_number_of_texts_even_if_hashes_tie() -> None:
    """Among 65,536 hashes of 32 bits some are equal, and the order of these must not change."""
    key = mix(np.arange(40_000))
    long = np.full(8, 65_536)
    alone = noise.random_order(long, key[:8])
    among = noise.random_order(np.concatenate((long, np.ones(39_992, dtype=np.int64))), key)
    assert np.array_equal(alone, among[: alone.size])
    assert np.array_equal(np.sort(alone), np.arange(alone.size))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_key_gives_another_pair(scheme: Any) -> None:
    objective = Config(scheme).build(STOPS)
    spec = objective.pack_spec(128)
    examples, _ = pack([4000], spec, "concat")
    examples.tokens[::9] = DOT
    first, second = (
        objective.collate(
            replace(examples, key=mix(examples.key + np.uint64(epoch))), spec.sequence_length
        )
        for epoch in (0, 1)
    )
    assert (first["tokens"] != second["tokens"]).any(axis=1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit"])
def test_spans_are_the_bytes_of_span_corruption(policy: Any, layout: Any) -> None:
    settings = {"noise_density": 0.25, "mean_span_length": 2.0, "layout": layout, "z_loss": 1e-4}
    one, other = Config("spans", **settings), span_corruption.Config(**settings)
    batches = []
    for config in (one, other):
        objective = config.build(VOCABULARY)
        spec = objective.pack_spec(64)
        examples, _ = pack(LENGTHS, spec, policy)
        batches.append(objective.collate(examples, spec.sequence_length))
    assert batches[0].keys() == batches[1].keys()
    assert all(np.array_equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_bert_masks_15_percent_and_replaces_80_10_10() -> None:
    sources = of_distinct_tokens("bert", 100)
    text = np.arange(100, 200)
    masked, changed = sources == MASK, (sources != MASK) & (sources != text)
    assert np.isin(sources[changed], range(3, 1000)).all()  # random tokens are ordinary ones
    assert masked.mean() == pytest.approx(0.15 * 0.8, abs=0.001)
    assert changed.mean() == pytest.approx(0.15 * 0.1 * 996 / 997, abs=0.0006)
    random = np.bincount(sources[changed], minlength=1000)[3:1000]
    # Three tokens in a thousand cannot differ from the text that they replace.
    assert chi_squared(random[100:]) < critical(random[100:].size - 1)


def test_bert_as_t5_has_it_masks_90_percent_and_keeps_none() -> None:
    sources = of_distinct_tokens("bert", 100, replace_mask=0.9, replace_random=0.1)
    corrupted = (sources != np.arange(100, 200)).sum(axis=1)
    assert corrupted.max() == 15
    assert corrupted.mean() == pytest.approx(15 - 1.5 / 997, abs=0.01)


@pytest.mark.parametrize("scheme", ["mass", "delete", "drop"])
def test_exactly_15_percent_of_the_tokens_each_equally_likely(scheme: str) -> None:
    if scheme == "mass":
        chosen = of_distinct_tokens(scheme, 40) == MASK
    else:
        _, source, target = denoised(scheme, 40)
        kept = source.tokens.reshape(TEXTS, -1)[:, :-1] - 100
        chosen = np.ones((TEXTS, 40), dtype=bool)
        np.put_along_axis(chosen, kept, False, axis=1)
        assert (np.diff(kept) > 0).all()  # in their order
        if scheme == "drop":
            assert np.array_equal(
                target.tokens.reshape(TEXTS, -1)[:, :-1],
                np.nonzero(chosen)[1].reshape(TEXTS, 6) + 100,
            )
    assert (chosen.sum(axis=1) == 6).all()
    # Counts of positions are no independent draws: their variance is 34/39 of that of 6 draws.
    assert chi_squared(chosen.sum(axis=0)) * 40 / 34 * 39 / 40 < critical(39)
    neighbors = (chosen[:, 1:] & chosen[:, :-1]).mean()
    assert neighbors == pytest.approx(6 * 5 / (40 * 39), abs=0.001)


def test_one_sentinel_replaces_each_run_of_tokens() -> None:
    pairs, texts = made("replace_spans", 60, 500)
    assert [restored(*pair) for pair in pairs] == texts
    _, source, target = denoised("replace_spans", 60)
    for side, others in ((source, 51), (target, 9)):
        special = np.isin(side.tokens, (*SENTINELS, EOS))
        assert np.count_nonzero(~special) == TEXTS * others  # 15 % of 60 are 9
    # Runs are whole: no two sentinels follow each other.
    is_sentinel = np.isin(source.tokens, SENTINELS)
    assert not (is_sentinel[1:] & is_sentinel[:-1]).any()
    runs = np.bincount(lengths_of_spans(target)[1])
    # The first position begins a run with probability 9/60, any other with 51/60 * 9/59.
    assert runs.sum() / TEXTS == pytest.approx(9 / 60 + 51 * 9 / 60, abs=0.05)
    assert runs[2] / runs[1] == pytest.approx(8 / 58, abs=0.01)


@pytest.mark.parametrize("scheme", ["deshuffle", "permute_sentences"])
def test_every_order_is_equally_likely(scheme: str) -> None:
    if scheme == "deshuffle":
        sources = of_distinct_tokens(scheme, 4)
    else:  # sentences of 1, 2 and 3 tokens, each with its stop, and one without at the end
        text = [10, DOT, 20, 20, DOT, 30, 30, 30, DOT, DOT, 40]
        tokens = np.tile(np.array(text, dtype=np.int32), TEXTS)
        found = noise.permute_sentences(
            Ragged(tokens, np.full(TEXTS, len(text))), mix(np.arange(TEXTS)), (DOT,)
        )
        parts = ([10, DOT], [20, 20, DOT], [30, 30, 30, DOT, DOT], [40])
        orders = {
            tuple(chain.from_iterable(order)): i for i, order in enumerate(permutations(parts))
        }
        counts = Counter(orders[tuple(row)] for row in found.tokens.reshape(TEXTS, -1).tolist())
        assert len(counts) == 24
        assert chi_squared(np.array(list(counts.values()))) < critical(23)
        return
    counts = Counter(map(tuple, sources.tolist()))
    assert set(counts) == set(permutations(range(100, 104)))
    assert chi_squared(np.array(list(counts.values()))) < critical(23)


def test_sentences_of_different_texts_are_not_mixed() -> None:
    pairs, texts = made("permute_sentences", 40, 300)
    for (source, target), text in zip(pairs, texts, strict=True):
        assert target[:-1] == text
        assert Counter(source) == Counter(target)


def test_a_text_without_full_stops_is_one_sentence() -> None:
    sources = of_distinct_tokens("permute_sentences", 9, 5)
    assert (sources == np.arange(100, 109)).all()


def test_a_rotated_text_begins_at_each_token_equally_often() -> None:
    sources = of_distinct_tokens("rotate", 20)
    first = sources[:, 0] - 100
    assert np.array_equal(sources - 100, (first[:, None] + np.arange(20)) % 20)
    assert chi_squared(np.bincount(first, minlength=20)) < critical(19)


def test_infilling_masks_30_percent_in_spans_of_poisson_lengths() -> None:
    _, source, target = denoised("infill", 200)
    assert (target.tokens.reshape(TEXTS, 201)[:, :-1] == np.arange(100, 300)).all()
    is_mask = source.tokens == MASK
    text = np.repeat(np.arange(TEXTS), source.length)
    masks = np.bincount(text[is_mask], minlength=TEXTS)
    assert (source.length - 1 - masks == 200 - 60).all()
    # The number of draws of mean 3 until they add up to 60 or more: 60 / 3, and half of a draw's
    # overshoot, (variance + mean^2) / (2 mean^2) - 1 / (2 mean) = 1/2.
    assert masks.mean() == pytest.approx(60 / 3 + 0.5, abs=0.05)
    # Masks are equally likely everywhere: the tokens before the first one, and after the last.
    at, start = np.flatnonzero(is_mask), np.cumsum(source.length) - source.length
    last = np.cumsum(masks) - 1
    before, after = at[last - masks + 1] - start, start + source.length - 2 - at[last]
    for gap in (before, after):
        assert gap.mean() == pytest.approx((140 / (masks + 1)).mean(), abs=0.2)


def test_spans_of_length_0_insert_masks() -> None:
    """With the lengths as they are drawn: each is Poisson, and a twentieth of them is 0."""
    keys, count = mix(np.arange(TEXTS)), np.full(TEXTS, 60)
    tokens = np.arange(TEXTS * 200, dtype=np.int32)  # so what a mask replaces can be seen
    found = noise.infill(Ragged(tokens, np.full(TEXTS, 200)), keys, count, 3.0, -1)
    masks = found.tokens == -1
    # Masks without another one at their side, inside of a text.
    text = np.repeat(np.arange(TEXTS), found.length)
    (at,) = np.nonzero(masks[1:-1] & ~masks[:-2] & ~masks[2:])
    at = at[(text[at] == text[at + 2])] + 1
    lengths = found.tokens[at + 1] - found.tokens[at - 1] - 1
    counts = np.bincount(lengths)
    probability = np.exp(-3.0) * 3.0 ** np.arange(12) / [math.factorial(k) for k in range(12)]
    # The last span of each text, one of 21, is cut off, which makes short ones more frequent.
    share = counts[:12] / counts.sum()
    assert share[0] == pytest.approx(probability[0], abs=0.003)
    assert np.abs(share - probability).max() < 0.012
    assert lengths.mean() == pytest.approx(60 / 20.5, abs=0.05)


@pytest.mark.parametrize("mean", [1.0, 3.0, 40.0])
def test_lengths_are_poisson_distributed(mean: float) -> None:
    drawn = noise._poisson(mix(np.arange(200_000)), mean)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.var() == pytest.approx(mean, rel=0.02)
    assert (drawn == 0).mean() == pytest.approx(math.exp(-mean), abs=0.003)


def test_infilling_has_at_most_a_mask_for_each_masked_token() -> None:
    for length in (1, 2, 3, 7):
        for source, target in made("infill", length, 2000, mean_span_length=1.0)[0]:
            count = round(0.3 * length) or min(1, length - 1)
            assert len(target) - 1 - sum(token != MASK for token in source[:-1]) == count
            assert source.count(MASK) <= count


def test_bart_permutes_sentences_and_then_infills() -> None:
    objective = Config("bart").build(STOPS)
    text = np.arange(100, 140, dtype=np.int32)
    text[9::10] = DOT
    texts = Ragged(np.tile(text, 500), np.full(500, 40))
    key = mix(np.arange(500))
    _, source, target = objective.pairs(texts, key)
    assert np.array_equal(target.tokens.reshape(500, -1)[:, :-1], np.tile(text, (500, 1)))
    permuted = noise.permute_sentences(texts, key, (DOT,))
    both = noise.infill(permuted, key, np.full(500, 12), 3.0, MASK)
    assert np.array_equal(source.length - 1, both.length)
    assert np.array_equal(source.tokens[source.tokens != EOS], both.tokens)
    assert not np.array_equal(permuted.tokens, texts.tokens)


def test_the_mask_is_that_of_the_tokenizer_if_it_has_one() -> None:
    sources = [
        {token for source, _ in made("mass", 20, 5, vocabulary)[0] for token in source}
        for vocabulary in (replace(STOPS, mask=2), STOPS)
    ]
    assert 2 in sources[0]
    assert MASK not in sources[0]
    assert MASK in sources[1]


# Corrupted tokens and spans of a text of 256 tokens, by mode: 15 or 50 % in spans of 3, 8 or 64.
UL2 = {R: {(38, 13), (38, 5)}, X: {(128, 43), (128, 16), (38, 1), (128, 2)}}


def test_ul2_mixes_seven_denoisers_in_equal_parts() -> None:
    _, source, target = denoised("ul2", 256)
    mode = source.tokens[np.cumsum(source.length) - source.length]
    text, lengths = lengths_of_spans(target)
    count = np.bincount(text, lengths, TEXTS).astype(int)
    spans = np.bincount(text, minlength=TEXTS)
    assert np.array_equal(source.length, 1 + 256 - count + spans + 1)
    found = Counter(zip(mode.tolist(), count.tolist(), spans.tolist(), strict=True))
    suffixes = count[mode == S]
    assert (spans[mode == S] == 1).all()
    expected = {(m, *pair) for m, pairs in UL2.items() for pair in pairs}
    assert {each for each in found if each[0] != S} == expected
    parts = np.array([suffixes.size, *(found[each] for each in sorted(expected))])
    assert chi_squared(parts) < critical(6)
    assert (suffixes.min(), suffixes.max()) == (1, 128)
    assert suffixes.mean() == pytest.approx(256 / 4, abs=4)  # mean L / 4, a rate of 0.25


def test_the_parts_of_a_text_under_ul2() -> None:
    pairs, texts = made("ul2", 256, 500)
    for (source, target), text in zip(pairs, texts, strict=True):
        mode, *rest = source
        assert restored(rest, target) == text
        assert not {R, S, X} & {*rest, *target}
        if mode == S:  # the end of the text is predicted
            assert rest == [*text[: len(rest) - 2], SENTINELS[0], EOS]


def test_sizes_grow_with_the_text_and_hold_every_pair() -> None:
    lengths = np.arange(1, 65_537)
    for scheme in SCHEMES:
        for layout in LAYOUTS:
            objective = Config(scheme, layout=layout).build(STOPS)
            assert all((np.diff(side) >= 0).all() for side in objective.sizes(lengths)), scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_of_one_token_and_the_longest(scheme: Any) -> None:
    sentinels = tuple(range(90_000, 1000, -1))
    vocabulary = replace(STOPS, size=90_001, sentinels=sentinels, special=(0, 1, 2, *sentinels))
    objective = Config(scheme).build(vocabulary)
    for lengths in ([1], [1, 1, 1], [2], [65_536]):
        spec = objective.pack_spec(int(objective.sizes(np.array([max(lengths)]))[0][0]))
        examples, _ = pack(lengths, spec, "padded")
        batch = objective.collate(examples, spec.sequence_length)
        assert len(pairs_of(batch)) == len(lengths)


def test_rows_that_only_pad_predict_nothing() -> None:
    objective = Config("ul2").build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, _ = pack([200], spec, "concat")
    examples.weight[1] = 0
    batch = objective.collate(examples, spec.sequence_length)
    assert not batch["weights"][1].any()
    assert objective.weights(batch) == {"lm": float(batch["weights"].sum())}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "deshuffle", "noise_density": 0.2}, "noise_density is 0.2, which scheme desh"),
        ({"scheme": "ul2", "mean_span_length": 3.0}, "mean_span_length is 3.0, which scheme ul2"),
        ({"scheme": "mass", "replace_mask": 0.5}, "replace_mask is 0.5, which scheme mass"),
        ({"scheme": "drop", "noise_density": 1.0}, "noise_density is 1.0. Use a fraction"),
        ({"scheme": "bart", "mean_span_length": 0.5}, "mean_span_length is 0.5. Use at least"),
        ({"scheme": "bert", "replace_mask": 0.95}, "replace_mask is 0.95 and replace_random is"),
        ({"scheme": "bart", "target_length": 0}, "target_length is 0. Use"),
        ({"scheme": "bart", "z_loss": -1.0}, "z_loss is -1.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("mass", {"sentinels": ()}, r"needs \[MASK\] or <extra_id_0>"),
        ("bart", {"full_stops": ()}, "no token for one. Use scheme infill"),
        ("replace_spans", {"sentinels": ()}, "has none"),
        ("ul2", {"sentinels": (9, 8, 7)}, "needs 4 sentinels.* has 3. Use one with 100"),
        ("drop", {"eos": None}, "no </s>"),
    ],
)
def test_a_tokenizer_that_lacks_something_is_refused(
    scheme: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(scheme).build(replace(STOPS, **change))


@pytest.mark.parametrize("scheme", ["replace_spans", "ul2"])
def test_too_few_sentinels_are_refused_before_training(scheme: Any) -> None:
    objective = Config(scheme).build(VOCABULARY)
    with pytest.raises(ConfigError, match=r"corrupted spans.* at most (\d+)") as refusal:
        objective.pack_spec(2048)
    longest = int(str(refusal.value).split("at most ")[1].split(",")[0])
    assert objective.pack_spec(longest).sides is not None
    with pytest.raises(ConfigError):
        objective.pack_spec(longest + 1)


def test_targets_longer_than_the_decoder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"target_length is 100.*targets of 341"):
        Config("ul2", target_length=100).build(VOCABULARY).pack_spec(512)


PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
TEXT = "Thank you for inviting me to your party last week . We had fun ."


def worked_examples() -> list[tuple[str, str, str]]:
    """Scheme, source and target of each row of the table in the documentation."""
    rows = re.findall(r"^\| `(\w+)` \| (.*</s>`) \| (.*</s>`) \|$", PAGE.read_text(), re.MULTILINE)
    return [(scheme, *(side.replace("`", "") for side in sides)) for scheme, *sides in rows]


def test_the_documentation_has_a_worked_example_of_each_scheme() -> None:
    """Each is what the scheme makes of the text under one of 2,000 keys."""
    words = [*dict.fromkeys(TEXT.split()), "apple", "green", "walk"]
    names = ["<pad>", "</s>", *words, *(f"<extra_id_{n}>" for n in range(99, -1, -1))]
    ids = {name: i for i, name in enumerate(names)}
    sentinels = tuple(range(len(names) - 1, len(names) - 101, -1))
    vocabulary = replace(
        VOCABULARY,
        size=len(names),
        special=(PAD, EOS, *sentinels),
        sentinels=sentinels,
        full_stops=(ids["."],),
    )
    text = np.array([ids[word] for word in TEXT.split()], dtype=np.int32)
    texts = Ragged(np.tile(text, 2000), np.full(2000, text.size))
    examples = worked_examples()
    assert {scheme for scheme, *_ in examples} == set(SCHEMES)
    assert f"text     {TEXT}" in PAGE.read_text()
    made_of: dict[str, set[tuple[str, str]]] = {}
    for scheme, source, target in examples:
        if scheme not in made_of:
            _, *sides = Config(scheme).build(vocabulary).pairs(texts, mix(np.arange(2000)))
            shown = [
                [" ".join(names[i] for i in row) for row in np.split(side.tokens, cuts)]
                for side in sides
                for cuts in [np.cumsum(side.length)[:-1]]
            ]
            made_of[scheme] = set(zip(*shown, strict=True))
        assert (source, target) in made_of[scheme], scheme

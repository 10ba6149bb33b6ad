"""Span corruption: T5's lengths and spans, nothing lost, rows independent of each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from benchmarks import span_corruption as benchmark
from samestep.errors import ConfigError
from samestep.hashing import mix
from tests.unit.objectives.texts import EOS, SENTINELS, VOCABULARY, only, pack, pairs_of
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives.kinds.span_corruption import Config, SpanCorruption
from trainer.objectives.noise import random_parts

LAYOUTS = ("encoder_decoder", "prefix_lm", "language_model")


def t5_counts(length: int, density: float, mean: float) -> tuple[int, int]:
    """Corrupted tokens and spans, by `random_spans_noise_mask` of google-research's T5."""
    noise = min(max(int(np.round(length * density)), 1), length - 1)
    return noise, max(int(np.round(noise / mean)), 1)


def t5_lengths(inputs: int, density: float, mean: float) -> tuple[int, int]:
    """Tokens of text and of targets for a length of inputs, by `random_spans_helper` of T5."""

    def after(tokens: int) -> tuple[int, int]:
        noise = round(tokens * density)
        spans = round(noise / mean)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs - 1
    while after(tokens + 1)[0] <= inputs:
        tokens += 1
    return tokens, after(tokens)[1]


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text that a pair was made from."""
    assert source[-1] == target[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in SENTINELS:
            assert token == SENTINELS[len(spans)]
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    text: list[int] = []
    for token in source[:-1]:
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


def span_lengths(
    source: list[int], target: list[int], sentinels: tuple[int, ...] = SENTINELS
) -> tuple[list[int], list[int]]:
    """How long the runs of kept and of corrupted tokens are."""
    cuts = [np.flatnonzero(np.isin(side, (*sentinels, EOS))) for side in (source, target)]
    kept, corrupted = np.diff(cuts[0], prepend=-1)[:-1] - 1, np.diff(cuts[1]) - 1
    return kept.tolist(), corrupted.tolist()


@pytest.mark.parametrize(
    ("density", "mean"), [(0.15, 3.0), (0.15, 10.0), (0.3, 2.0), (0.1, 1.0), (0.5, 4.0)]
)
@pytest.mark.parametrize("inputs", [64, 100, 128, 511, 512, 600])
def test_text_and_targets_are_as_long_as_t5s(inputs: int, density: float, mean: float) -> None:
    sentinels = tuple(range(5000, 4000, -1))
    vocabulary = replace(VOCABULARY, size=5001, sentinels=sentinels)
    objective = Config(noise_density=density, mean_span_length=mean).build(vocabulary)
    spec = objective.pack_spec(inputs)
    assert spec.sides is not None
    text, targets = t5_lengths(inputs, density, mean)
    assert (spec.sequence_length, *spec.sides.size) == (text, inputs, targets)
    assert objective.predictions(inputs) == targets


def test_512_cells_of_sources_give_114_of_targets_without_padding() -> None:
    objective = Config().build(VOCABULARY)
    spec = objective.pack_spec(512)
    assert spec.sequence_length == 568
    examples, _ = pack([5000, 3, 900, 1 << 14, 77], spec, "concat")
    batch = objective.collate(examples, spec.sequence_length)
    assert (batch["segments"][:-1] == 1).all()
    assert (batch["weights"][:-1] == 1).all()
    assert (batch["tokens"][:-1, -1] == EOS).all()
    assert (batch["labels"][:-1, -1] == EOS).all()
    assert {name: (array.dtype.name, array.shape[1]) for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "segments", "positions"), ("int32", 512)),
        **dict.fromkeys(("target_tokens", "target_segments", "target_positions"), ("int32", 114)),
        "labels": ("int64", 114),
        "weights": ("float32", 114),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded"])
def test_source_and_target_hold_the_text_and_the_exact_numbers_of_tokens_and_spans(
    policy: str, layout: str
) -> None:
    config = Config(layout=layout)
    objective = SpanCorruption(config, VOCABULARY)
    spec = objective.pack_spec(128)
    lengths = [1, 2, 3, 4, 5, 1000, 1, *np.random.default_rng(0).integers(1, 200, 60)]
    examples, texts = pack(lengths, spec, policy)
    pairs = pairs_of(objective.collate(examples, spec.sequence_length))
    assert [restored(*pair) for pair in pairs] == texts
    for (source, target), text in zip(pairs, texts, strict=True):
        if len(text) > 1:
            kept, corrupted = span_lengths(source, target)
            assert (sum(corrupted), len(corrupted)) == t5_counts(len(text), 0.15, 3.0)
            assert min(kept) >= 1
            assert min(corrupted) >= 1
        else:
            assert (source, target) == ([*text, EOS], [EOS])


def test_spans_are_distributed_as_those_of_the_published_collator() -> None:
    rows = benchmark.rows_of_text(568, 400)
    objective = SpanCorruption(Config(), benchmark.VOCABULARY)
    examples, _ = pack([rows.size], objective.pack_spec(512), "concat")
    ours = objective.collate(replace(examples, tokens=rows.reshape(-1)), 568)
    theirs = benchmark.PublishedCollator(seed=1)(rows)
    histograms = []
    for batch in (ours, theirs):
        both = [Counter(), Counter()]
        for source, target in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
            for counts, lengths in zip(
                both, span_lengths(source, target, benchmark.SENTINELS), strict=True
            ):
                counts.update(lengths)
        histograms.append(both)
    for mine, published in zip(*histograms, strict=True):
        assert mine.total() == published.total() == 400 * 28
        longest = max(*mine, *published)
        apart = [
            mine[n] / mine.total() - published[n] / published.total() for n in range(longest + 1)
        ]
        # Greatest distance of the cumulative distributions: above 0.02 by chance once in 40 times.
        assert np.abs(np.cumsum(apart)).max() < 0.025


@pytest.mark.long
def test_every_way_to_cut_is_equally_likely() -> None:
    rows = 30_000
    lengths = random_parts(np.full(rows, 6), np.full(rows, 3), mix(np.arange(rows))).reshape(
        rows, 3
    )
    counts = Counter(map(tuple, lengths.tolist()))
    ways = {(a, b - a, 6 - b) for a, b in combinations(range(1, 6), 2)}
    assert set(counts) == ways
    expected = rows / len(ways)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 27.9  # exceeded once in 1000 times


def test_parts_fill_rows_of_any_lengths() -> None:
    random = np.random.default_rng(0)
    items = random.integers(1, 400, 500)
    parts = random.integers(1, items + 1)
    lengths = random_parts(items, parts, mix(np.arange(500)))
    assert lengths.min() == 1
    assert np.array_equal(np.add.reduceat(lengths, np.cumsum(parts) - parts), items)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["concat", "best_fit"])
def test_a_row_is_the_same_alone_and_in_any_batch(policy: str, layout: str) -> None:
    objective = Config(layout=layout).build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, _ = pack(np.random.default_rng(0).integers(1, 100, 60), spec, policy)
    batch = objective.collate(examples, spec.sequence_length)
    for rows in ([5], [7, 0, 5, 5, 3]):
        some = objective.collate(only(examples, rows), spec.sequence_length)
        assert all(np.array_equal(some[name], batch[name][rows]) for name in batch)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2], [65_536]], ids=str)
def test_hard_texts(lengths: list[int]) -> None:
    objective = Config(mean_span_length=100.0).build(VOCABULARY)
    spec = objective.pack_spec(int(objective.sizes(np.array([max(lengths)]))[0][0]))
    examples, texts = pack(lengths, spec, "padded")
    assert [
        restored(*pair) for pair in pairs_of(objective.collate(examples, spec.sequence_length))
    ] == texts


def test_another_key_corrupts_other_spans() -> None:
    objective = Config().build(VOCABULARY)
    spec = objective.pack_spec(128)
    examples, _ = pack([5000], spec, "concat")
    first, second = (
        objective.collate(
            replace(examples, key=mix(examples.key + np.uint64(epoch))), spec.sequence_length
        )
        for epoch in (0, 1)
    )
    assert (first["tokens"] != second["tokens"]).any(axis=1).all()
    examples = only(examples, [0, 0])
    again = objective.collate(examples, spec.sequence_length)
    assert np.array_equal(again["tokens"][0], again["tokens"][1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("median", "target_length"), [(600, None), (55, 124)])
def test_both_sides_of_packed_rows_are_98_percent_full(
    layout: str, median: int, target_length: int | None
) -> None:
    """Documents of some hundred tokens; and of a few dozen, with longer targets than by default."""
    objective = Config(layout=layout, target_length=target_length).build(VOCABULARY)
    spec = objective.pack_spec(512)
    lengths = np.random.default_rng(0).lognormal(np.log(median), 0.8, 1500).astype(int) + 1
    examples, _ = pack(lengths, spec, "best_fit")
    batch = objective.collate(examples, spec.sequence_length)
    filled = [batch["segments"] > 0, batch["weights"] > 0]
    if layout != "encoder_decoder":
        filled = filled[:1]  # the targets are in the same rows
    assert sum(side.sum() for side in filled) > 0.98 * sum(side.size for side in filled)


def test_rows_that_only_pad_predict_nothing() -> None:
    objective = Config().build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, _ = pack([200], spec, "concat")
    examples.weight[1] = 0
    batch = objective.collate(examples, spec.sequence_length)
    assert not batch["weights"][1].any()
    assert batch["segments"][1].any()
    assert objective.weights(batch) == {"lm": float(batch["weights"].sum())}


def test_the_z_loss_is_added_to_the_loss_and_is_a_metric_of_its_own() -> None:
    objective = Config(z_loss=0.01).build(VOCABULARY)
    spec = objective.pack_spec(64)
    examples, _ = pack([150], spec, "concat")
    batch = {
        name: torch.from_numpy(a)
        for name, a in objective.collate(examples, spec.sequence_length).items()
    }
    logits = (
        torch.randn(*batch["labels"].shape, 1100, generator=torch.Generator().manual_seed(0)) * 3
    )

    class Fixed(torch.nn.Module):
        def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, torch.Tensor]:
            assert outputs == {"target_tokens"}
            assert inputs.predicted is None
            assert inputs.tokens is batch["tokens"]
            for name in ("segments", "target_tokens", "target_segments"):
                assert getattr(inputs, name) is batch[name]
            return {"target_tokens": logits.clone()}

    total = batch["weights"].sum()
    loss = objective.loss(Fixed(), batch, {"lm": total})
    used = batch["weights"] > 0
    nll = torch.nn.functional.cross_entropy(logits[used], batch["labels"][used])
    penalty = 0.01 * logits[used].logsumexp(-1).square().mean()
    torch.testing.assert_close(loss.total, nll + penalty)
    means = {name: value / weight for name, (value, weight) in loss.metrics.items()}
    torch.testing.assert_close(means["loss"], nll)
    torch.testing.assert_close(means["z_loss"], penalty)


def test_too_few_sentinels_are_rejected_before_training() -> None:
    objective = Config().build(VOCABULARY)
    with pytest.raises(
        ConfigError, match=r"114 corrupted spans.* 100 sentinels.* at most (\d+)"
    ) as refusal:
        objective.pack_spec(2048)
    longest = int(str(refusal.value).split("at most ")[1].split(",")[0])
    assert objective.pack_spec(longest).sides is not None
    with pytest.raises(ConfigError):
        objective.pack_spec(longest + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sentinels": ()}, "has none"), ({"eos": None}, "no </s>"), ({"pad": None}, "no <pad>")],
)
def test_a_tokenizer_that_lacks_something_is_rejected(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config().build(replace(VOCABULARY, **change))


@pytest.mark.parametrize(
    "settings",
    [
        {"noise_density": 0.0},
        {"noise_density": 1.0},
        {"mean_span_length": 0.5},
        {"target_length": 0},
        {"z_loss": -1.0},
    ],
)
def test_settings_out_of_range_are_rejected(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        Config(**settings)


def test_targets_longer_than_the_decoder_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"target_length is 113.* 568 tokens .*targets of 114"):
        Config(target_length=113).build(VOCABULARY).pack_spec(512)
    with pytest.raises(ConfigError, match="Use 2 to"):
        Config().build(VOCABULARY).pack_spec(1)


def test_the_benchmark_measures_both_on_one_task() -> None:
    measured = benchmark.measure(batches=1, repeats=1)
    assert measured.rate("samestep") > 0
    rows = benchmark.rows_of_text(568, 3)
    batch = benchmark.PublishedCollator()(rows)
    assert batch["tokens"].shape == (3, 512)
    assert batch["labels"].shape == (3, 114)

"""`samestep fill` with given words: scores of masked, left-to-right and bidirectional models."""

from __future__ import annotations

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.config import kind_name
from tests.integration.commands import Samestep
from tests.integration.test_lstm import MODELS, OBJECTIVES
from tests.outputs import outputs
from trainer.inference.candidates import CandidateScorer, Cloze, read_probes
from trainer.training.weights.loading import load_weights

TEXT = "the names of the [MASK] are bound"
WORDS = ("class", "module", "unbelievable")


@pytest.fixture(scope="module")
def runs(
    experiment_file: str, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A BERT, and an LSTM and a biLM of a few steps."""
    from samestep.cli import main

    found = {"bert": finished_run}
    for kind in MODELS:
        found[kind] = tmp_path_factory.mktemp(kind) / "run"
        settings = [MODELS[kind], OBJECTIVES[kind], f"output={found[kind]}", "optimizer.lr=1e-2"]
        assert main(["train", experiment_file, *settings, "data.threads=0"]) == 0
    return found


def expected(run: Path, word: str) -> float:
    """The score of a word in TEXT, by the model on one sequence."""
    weights = load_weights(str(run))
    tokenizer, model = weights.load_tokenizer(), weights.model()
    vocabulary = tokenizer.vocabulary
    size = vocabulary.size
    before, after = TEXT.split("[MASK]")
    left, own, right = (ids.tolist() for ids in tokenizer.encode_batch([before, word, after]))
    kind = kind_name(weights.config)
    if kind == "bert":
        middle = [vocabulary.mask] * len(own)
        tokens = torch.tensor([[vocabulary.cls, *left, *middle, *right, vocabulary.sep]])
        (logits,) = outputs(model, "tokens", tokens=tokens, positions=torch.arange(len(tokens[0])))
        begin = 1 + len(left)
        found = logits[0, :, :size].double().log_softmax(-1)[begin : begin + len(own)]
        return float(found[torch.arange(len(own)), own].sum().detach())
    end = [vocabulary.sep] if kind == "bilm" else []
    tokens = torch.tensor([[vocabulary.cls, *left, *own, *right, *end]])
    total = 0.0
    for name in ("next_tokens", "previous_tokens")[: 2 if kind == "bilm" else 1]:
        (logits,) = outputs(model, name, tokens=tokens)
        labels = tokens[0, 1:] if name == "next_tokens" else tokens[0, :-1]
        found = logits[0, :, :size].double().log_softmax(-1)[: len(labels)]
        total += float(found[torch.arange(len(labels)), labels].sum().detach())
    return total


@pytest.mark.parametrize("kind", ["bert", "lstm", "bilm"])
def test_a_word_is_scored_as_the_model_scores_its_text(kind: str, runs: dict[str, Path]) -> None:
    """Beside other probes of other lengths; a word of several tokens, too."""
    run = runs[kind]
    tokenizer = load_weights(str(run)).load_tokenizer()
    assert len(tokenizer.encode_batch(["unbelievable"])[0]) > 1
    other = Cloze("a [MASK]", ("file", "list"))
    scorer = CandidateScorer(load_weights(str(run)))
    (found, beside) = scorer([Cloze(TEXT, WORDS), other])
    assert beside.shape == (2,)
    np.testing.assert_allclose(found, [expected(run, word) for word in WORDS], rtol=1e-4)


def test_the_command_compares_words(runs: dict[str, Path], samestep: Samestep) -> None:
    for run in runs.values():
        result = samestep("fill", run, TEXT, "a <mask> b", "--candidates", *WORDS)
        assert result.code == 0, result.err
        assert result.out.count("share") == 2
        assert "the names of the class are bound" in result.out


def test_texts_are_shown_as_they_are(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Brackets are the markup of the library that prints the tables, and `[/b]` its error."""
    text = "see [/b] [red] the [MASK] of :key:"
    shown = samestep("fill", finished_run, text)
    assert (shown.code, text in shown.out) == (0, True), shown.err
    shown = samestep("fill", finished_run, text, "--candidates", "class", "file")
    assert shown.out.count("see [/b] [red] the ") == 3, shown.err
    row = {"text": text, "candidates": ["class", "file"], "label": "file", "group": "[/b]"}
    (tmp_path / "probes.jsonl").write_text(json.dumps(row))
    shown = samestep("fill", finished_run, "--probes", tmp_path / "probes.jsonl")
    assert "[/b]" in shown.out, shown.err


@pytest.mark.parametrize("kind", ["bert", "lstm", "bilm"])
def test_a_word_that_the_tokenizer_does_not_know_has_no_score(
    kind: str, runs: dict[str, Path], samestep: Samestep
) -> None:
    """In the text around the mask, it is allowed."""
    result = samestep("fill", runs[kind], TEXT, "--candidates", "class", "猫")
    assert result.code == 2
    assert f"does not know the candidate '猫' for '{TEXT}'" in result.message
    result = samestep("fill", runs[kind], f"猫 {TEXT} 猫", "--candidates", "class", "module")
    assert result.code == 0, result.err


def test_probes_are_counted_by_group(
    runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    """The labels are what the model says in one group, and the opposite in the other."""
    run = runs["bert"]
    texts = ["the [MASK] of a name", "in the [MASK]", "[MASK] is bound"]
    scorer = CandidateScorer(load_weights(str(run)))
    scores = scorer([Cloze(text, ("class", "file")) for text in texts])
    said = [("class", "file")[int(each.argmax())] for each in scores]
    rows: list[dict[str, Any]] = []
    for text, word in zip(texts, said, strict=True):
        other = {"class": "file", "file": "class"}[word]
        for label, group in ((word, "yes"), (other, "no")):
            row = {"text": text, "candidates": ["class", "file"], "label": label, "group": group}
            rows.append(row)
    rows[-1].pop("group")
    probes = tmp_path / "probes.jsonl"
    probes.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    files = ("--scores", tmp_path / "scores.json", "--predictions", tmp_path / "said.jsonl")
    result = samestep("fill", run, "--probes", probes, *files)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "scores.json").read_text()) == {
        "accuracy": 0.5,
        "accuracy.yes": 1.0,
        "accuracy.no": 0.0,
    }
    lines = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [word for word in said for _ in range(2)]
    assert all(sum(line["probabilities"].values()) == pytest.approx(1) for line in lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: is not a probe"),
        ('{"text": "a [MASK]", "label": "b"}', "2: is not a probe"),
        ('{"text": "a", "candidates": ["a", "b"], "label": "a"}', "must have one mask"),
        ('{"text": "a [MASK]", "candidates": ["a"], "label": "a"}', "name at least 2"),
        ('{"text": "a [MASK]", "candidates": ["a", " "], "label": "a"}', "name at least 2"),
        (
            '{"text": "a [MASK]", "candidates": "ab", "label": "a"}',
            "is 'ab', not a list",
        ),
        (
            '{"text": "a [MASK]", "candidates": ["a", "b"], "label": null}',
            "is None, not a text",
        ),
        (
            '{"text": "a [MASK]", "candidates": ["a", "b"], "label": "c"}',
            "not among the candidates",
        ),
        (
            '{"text": "a [MASK]", "candidates": ["a", "b"], "label": "a", "group": 3}',
            "group is 3, not a text",
        ),
        (
            '{"text": "a [MASK]", "candidates": ["a", "b"], "label": "a", "group": ["a"]}',
            "group is ['a'], not a text",
        ),
        (
            r'{"text": "\ud83d [MASK]", "candidates": ["a", "b"], "label": "a"}',
            "which is not valid Unicode",
        ),
    ],
)
def test_a_line_that_is_no_probe_is_named(
    line: str, message: str, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    good = '{"text": "a [MASK]", "candidates": ["a", "b"], "label": "a"}'
    (tmp_path / "probes.jsonl").write_text(f"{good}\n{line}\n")
    result = samestep("fill", finished_run, "--probes", tmp_path / "probes.jsonl")
    assert result.code == 1
    assert "probes.jsonl:2" in result.message
    assert message in result.message


def test_wrong_use(finished_run: Path, tmp_path: Path, samestep: Samestep) -> None:
    fill = ("fill", finished_run)
    assert "Give either texts or --probes FILE" in samestep(*fill).message
    both = samestep(*fill, "a [MASK]", "--probes", tmp_path / "none")
    assert "Give either texts or --probes FILE" in both.message
    assert "need --probes FILE" in samestep(*fill, "a [MASK]", "--scores", "x").message
    long = " ".join(["word"] * 60)
    too_long = samestep(*fill, f"[MASK] {long}", "--candidates", "a", "b")
    assert "tokens and the model reads at most" in too_long.message
    same = samestep(*fill, "a [MASK]", "--candidates", "Class", "class")
    assert "does not tell the candidates Class, class apart" in same.message
    for options in (("--candidates", "a", "b"), ("--probes", tmp_path / "none")):
        text = ["a [MASK]"] * (options[0] == "--candidates")
        top = samestep(*fill, *text, *options, "--top", 3)
        assert (top.code, "--top 3 has no effect with" in top.message) == (2, True)
    # What Python makes of an argument with the byte 0xff.
    assert "is not UTF-8" in samestep(*fill, "a \udcff [MASK]").message
    assert "is not UTF-8" in samestep(*fill, "a [MASK]", "--candidates", "a", "\udcff").message
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no probes" in samestep(*fill, "--probes", tmp_path / "empty.jsonl").message
    assert "cannot read the probes" in samestep(*fill, "--probes", tmp_path / "none").message


@pytest.mark.parametrize("name", ["agreement", "cloze"])
def test_the_probes_of_a_study_are_what_its_example_writes(name: str) -> None:
    probes = import_module(f"examples.{name}_probes").probes
    written = Path(f"configs/studies/probes/{name}.jsonl").read_text()
    assert written == "".join(json.dumps(probe) + "\n" for probe in probes())


def test_each_group_of_agreement_has_as_many_of_either_number() -> None:
    found = read_probes(Path("configs/studies/probes/agreement.jsonl"))
    assert len({probe.text for probe in found}) == len(found) == 360
    for group in ("adjacent", "same number", "other number"):
        own = [probe for probe in found if probe.group == group]
        assert len(own) == 120
        assert sum(probe.label == probe.candidates[1] for probe in own) == 60


def test_a_model_that_ignores_the_sentence_is_right_in_a_quarter_of_the_cloze_probes() -> None:
    """Of the four probes with the same candidates, each word is right in one."""
    found = read_probes(Path("configs/studies/probes/cloze.jsonl"))
    right = Counter((probe.group, tuple(probe.candidates), probe.label) for probe in found)
    groups = Counter(group for group, _, _ in right)
    assert set(right.values()) == {1}
    assert len(groups) == 8
    assert set(groups.values()) == {20}
    for group, candidates, _ in right:
        assert all((group, candidates, word) in right for word in candidates)
        assert len(candidates) == 4

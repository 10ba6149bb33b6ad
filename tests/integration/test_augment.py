"""`samestep augment`: rows with replaced words, the same when the command was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.hashing import combine
from tests.integration import tasks
from tests.integration.commands import Samestep
from trainer.inference import augment
from trainer.inference.augment import Augmenter
from trainer.training.weights.loading import load_weights


def rows(count: int) -> list[dict[str, Any]]:
    found = tasks.classification(count)
    return [{"id": i, **row, "b": f"a file, not {i}"} for i, row in enumerate(found)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_copies_follow_their_row(finished_run: Path, tmp_path: Path, samestep: Samestep) -> None:
    given = rows(40)
    file = write(tmp_path / "rows.jsonl", given)
    out = tmp_path / "out.jsonl"
    options = ("--texts", "text", "b", "--copies", "3", "--output", out)
    assert samestep("augment", finished_run, file, *options).code == 0
    found = read(out)
    assert len(found) == 4 * len(given)
    assert found[::4] == given
    changed = words = 0
    for number, row in enumerate(found):
        own = given[number // 4]
        assert (row["id"], row["label"]) == (own["id"], own["label"])
        assert row["b"].endswith(str(own["id"]))  # numbers and marks stay
        assert "," in row["b"]
        if number % 4:
            pairs = zip(row["text"].split(), own["text"].split(), strict=True)
            same = [one == other for one, other in pairs]
            changed, words = changed + same.count(False), words + len(same)
    assert 0.3 < changed / words < 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_words_are_the_most_likely_ones(finished_run: Path) -> None:
    """Of `samestep fill`, without the word itself and without tokens that are no words."""
    augmenter = Augmenter(str(finished_run), 4)
    (found,) = augmenter(["the class of it"], 4096)
    weights = load_weights(finished_run)
    tokenizer, model = weights.load_tokenizer(), weights.model(frozenset({"tokens"}))
    from trainer.inference.fill import _predict, encode_masked

    tokens, masked = encode_masked(tokenizer, "the class [MASK] it")
    size = tokenizer.vocabulary.size
    likely = _predict(model, tokens, masked, size)[0].topk(200).indices.tolist()
    continuing = set(tokenizer.vocabulary.continuing or ()) | set(tokenizer.vocabulary.special)
    words = [tokenizer.decode([token]) for token in likely if token not in continuing]
    words = [word for word in words if word.isalpha() and word != "of"]
    assert found[2] == words[: len(found[2])]
    assert 3 <= len(found[2]) <= 4
    assert len(found) == 4


def test_vowel_signs_and_accents_belong_to_their_word(finished_run: Path) -> None:
    """A word of Hindi is replaced as a whole, as is one with a decomposed letter."""
    augmenter = Augmenter(str(finished_run), 1)
    text = "हिन्दी, cafe\u0301 file"
    (proposed,) = augmenter([text], 4096)
    assert len(proposed) == 3
    settings = augment.Settings(1, 1.0, 1, 0)
    ((copy,),) = augment._copies([text], [[["one"], ["two"], ["three"]]], settings, combine(0))
    assert copy == "one, two three"


def test_long_texts_are_read_around_the_mask(finished_run: Path) -> None:
    text = " ".join(["the class of the file"] * 20)
    (found,) = Augmenter(str(finished_run), 2)([text], 4096)
    assert len(found) == 100
    assert all(found)


def test_an_interrupted_file_is_continued(
    finished_run: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augment, "_ROWS", 8)
    file = write(tmp_path / "rows.jsonl", rows(24))
    options = ("--texts", "text", "--copies", "2")
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert samestep("augment", finished_run, file, *options, "--output", whole).code == 0
    inner = Augmenter.__call__

    def stops(self: Augmenter, texts: Any, batch_tokens: int) -> Any:
        if texts[0] == rows(24)[8]["text"]:
            raise KeyboardInterrupt
        return inner(self, texts, batch_tokens)

    with monkeypatch.context() as context:
        context.setattr(Augmenter, "__call__", stops)
        samestep("augment", finished_run, file, *options, "--output", parts)
    assert (tmp_path / "parts.jsonl.partial").exists()
    other = samestep("augment", finished_run, file, *options, "--seed", "1", "--output", parts)
    assert (other.code, "begun with another settings" in other.message) == (2, True)
    content = file.read_text()
    write(file, rows(25))  # the rows before the interruption stay, and a longer file would follow
    longer = samestep("augment", finished_run, file, *options, "--output", parts)
    assert (longer.code, "begun with another files" in longer.message) == (2, True)
    file.write_text(content)
    assert samestep("augment", finished_run, file, *options, "--output", parts).code == 0
    assert parts.read_bytes() == whole.read_bytes()


def test_a_file_that_another_process_writes_meanwhile_is_kept(
    finished_run: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one loads its model."""
    file, output = write(tmp_path / "rows.jsonl", rows(4)), tmp_path / "out.jsonl"
    command = ("augment", finished_run, file, "--texts", "text", "--output", output, "--copies")
    inner = Augmenter.__init__

    def overtaken(self: Augmenter, *arguments: Any) -> None:
        inner(self, *arguments)
        with monkeypatch.context() as context:
            context.setattr(Augmenter, "__init__", inner)
            assert samestep(*command, 1).code == 0

    monkeypatch.setattr(Augmenter, "__init__", overtaken)
    result = samestep(*command, 2)
    assert (result.code, "exists already and is complete" in result.message) == (2, True)
    assert len(read(output)) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--texts", "nothing"), "nothing"),
        (("--texts", "{text} and"), "is a template; name columns"),
        (("--texts", "text", "--copies", "0"), "--copies must be at least 1, not 0"),
        (("--texts", "text", "--probability", "1.5"), "--probability must be in (0, 1], not 1.5"),
        (("--texts", "text", "--batch-tokens", "0"), "--batch-tokens must be at least 1"),
        (("--texts", "text", "--seed", "-1"), "--seed must lie in 0 .. 2**64 - 1, not -1"),
    ],
)
def test_wrong_options_are_refused(
    options: tuple[str, ...], message: str, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = write(tmp_path / "rows.jsonl", rows(4))
    result = samestep("augment", finished_run, file, *options, "--output", tmp_path / "out.jsonl")
    assert result.code in (1, 2)
    assert message in result.message, result.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_words_are_whole(finished_run: Path) -> None:
    words = Augmenter(str(finished_run), 1)._whole_words()
    assert len(words) == load_weights(finished_run).load_tokenizer().vocabulary.size
    assert all(word.isalpha() for word in words if word)
    assert torch.tensor([bool(word) for word in words]).float().mean() > 0.1

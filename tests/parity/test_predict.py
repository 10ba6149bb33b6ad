"""`load_model(...).predict` of a Hugging Face folder: the predictions of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer, pipeline

import samestep
from samestep.errors import ConfigError
from tests.parity import folders

WORDS = ("the", "dog", "cat", "run", "##s", "sleep", "here", "good", ",", ".")
TEXTS = ["the dog runs here", "good", "cat sleeps , the dog sleeps here .", "the cat"]
PAIRS = [("the dog runs", "the dog sleeps here"), ("cat", "good dog")]


def folder_of(kind: str, folder: Path, *labels: str) -> Path:
    """A tiny BERT of transformers with random weights, as `save_pretrained` writes it."""
    names = dict(enumerate(labels))
    config = folders.tiny_bert(
        id2label=names,
        label2id={name: number for number, name in names.items()},
        problem_type="regression" if len(labels) == 1 else None,
    )
    model = getattr(transformers, f"BertFor{kind}")(config).eval()
    folders.save(model, folder, WORDS, tokenizer_class="BertTokenizer")
    return folder


@pytest.mark.long
def test_classes_are_those_of_the_pipeline(tmp_path: Path) -> None:
    folder = folder_of("SequenceClassification", tmp_path, "bad", "fine", "good")
    theirs: Any = pipeline("text-classification", str(folder), top_k=None, device="cpu")
    model = samestep.load_model(folder)
    pairs = [{"text": first, "text_pair": second} for first, second in PAIRS]
    for given, same in ((TEXTS, TEXTS), (PAIRS, pairs)):
        found = model.predict(given, batch_tokens=16)
        for each, expected in zip(found, theirs(same), strict=True):
            assert isinstance(each, samestep.ClassPrediction)
            by_name = {row["label"]: row["score"] for row in expected}
            assert each.probabilities == pytest.approx(by_name, abs=1e-5)
            assert list(each.probabilities) == ["bad", "fine", "good"]
            assert (each.label, each.probability) == (
                expected[0]["label"],
                max(each.probabilities.values()),
            )
    assert model.predict([]) == []
    with pytest.raises(ConfigError, match="single text"):
        model.predict("good")
    with pytest.raises(ConfigError, match=r"texts\[1\] cannot be read: no tokens"):
        model.predict(["good", ""])


def test_texts_that_are_cut_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = samestep.load_model(folder_of("SequenceClassification", tmp_path, "bad", "good"))
    long, cut = model.predict(["the dog " * 40, "the dog " * 15])
    assert "1 of 2 rows are longer than the 32 positions" in caplog.text
    assert long == cut


@pytest.mark.long
def test_numbers_are_those_of_the_pipeline(tmp_path: Path) -> None:
    folder = folder_of("SequenceClassification", tmp_path, "score")
    theirs: Any = pipeline(
        "text-classification", str(folder), function_to_apply="none", device="cpu"
    )
    found = samestep.load_model(folder).predict(TEXTS)
    assert [each.value for each in found if isinstance(each, samestep.NumberPrediction)] == (
        pytest.approx([row["score"] for row in theirs(TEXTS)], abs=1e-5)
    )


@pytest.mark.long
def test_tags_are_those_of_the_pipeline_at_first_tokens(tmp_path: Path) -> None:
    folder = folder_of("TokenClassification", tmp_path, "O", "B-PET", "I-PET")
    theirs: Any = pipeline("token-classification", str(folder), ignore_labels=[], device="cpu")
    texts = [text.replace(" ,", "").replace(" .", "") for text in TEXTS]
    model = samestep.load_model(folder)
    found = model.predict(texts)
    assert found == model.predict([text.split() for text in texts])
    for text, each, of_tokens in zip(texts, found, theirs(texts), strict=True):
        assert isinstance(each, samestep.TagsPrediction)
        assert each.words == tuple(text.split())
        first = [row for row in of_tokens if not row["word"].startswith("##")]
        assert each.labels == tuple(row["entity"] for row in first)
        assert each.probabilities == pytest.approx([row["score"] for row in first], abs=1e-5)
    with pytest.raises(ConfigError, match="list of words without white space"):
        model.predict([["the dog"]])


@torch.no_grad()
def test_answers_are_the_best_spans_of_the_model(tmp_path: Path) -> None:
    """transformers 5 has no pipeline for questions, so the spans are searched here."""
    folder = folder_of("QuestionAnswering", tmp_path, "0", "1")
    theirs = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = samestep.load_model(folder).predict(PAIRS)
    for (question, context), answer in zip(PAIRS, found, strict=True):
        assert isinstance(answer, samestep.AnswerPrediction)
        inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        logits = theirs(**inputs)
        places = [i for i, part in enumerate(inputs.sequence_ids(0)) if part == 1]
        scores = {}
        for begin in places:
            for end in places:
                if begin <= end:
                    text = context[offsets[begin][0] : offsets[end][1]]
                    score = float(logits.start_logits[0, begin] + logits.end_logits[0, end])
                    scores[text] = max(score, scores.get(text, score))
        best = sorted(scores.items(), key=lambda each: -each[1])[:20]
        assert answer.text == best[0][0] == context[answer.begin : answer.end]
        assert answer.score == pytest.approx(best[0][1], abs=1e-5)
        expected = torch.tensor([score for _, score in best]).softmax(0)[0]
        assert answer.probability == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ConfigError, match=r"texts\[0\] has 1 texts. Pass a question"):
        samestep.load_model(folder).predict(["the dog"])


def test_a_language_model_predicts_nothing(tmp_path: Path) -> None:
    folder = folder_of("MaskedLM", tmp_path, "a", "b")
    with pytest.raises(ConfigError, match="has the head language_model"):
        samestep.load_model(folder).predict(["the dog"])

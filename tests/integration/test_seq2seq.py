"""Fine-tuning on pairs of texts through the real command.

From files to scores, and what bad input gets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.integration.commands import Samestep
from trainer.monitoring.jsonl import read_rows

WORDS = ["red", "green", "blue", "old", "new", "small", "house", "tree", "dog", "car"]
PREFIX = "turn around: "


def sentences(count: int) -> list[tuple[str, str]]:
    """Sentences of three words, and the same turned around."""
    texts = [
        [WORDS[(7 * i + step * (i // 10 + 1)) % 10] for step in range(3)] for i in range(count)
    ]
    return [(" ".join(text), " ".join(reversed(text))) for text in texts]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.en and train.de of 400 lines, and a tokenizer without sentinels beside the one with
    them.
    """
    from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig

    folder = tmp_path_factory.mktemp("corpus")
    pairs = sentences(400)
    for side, name in enumerate(("train.en", "train.de")):
        (folder / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    texts = [PREFIX + source for source, _ in pairs]
    TokenizerConfig("", "unigram", 34, lowercase=False).train(texts).save(folder / "tokenizer")
    return folder


@pytest.fixture
def build(corpus: Path, samestep: Samestep, tmp_path: Path):
    """Builds a dataset of pairs, with changed settings of the source."""

    def run(*overrides: str, **source: object):
        settings = {
            "kind": "parallel_text",
            "source_paths": [f"{corpus}/train.en"],
            "prefix": PREFIX,
        }
        settings |= {"target_paths": [f"{corpus}/train.de"]}
        config = {
            "source": source or settings,
            "tokenizer": {"path": str(corpus / "tokenizer"), "algorithm": "unigram"},
            "output": str(tmp_path / "data"),
            "heldout_fraction": 0.1,
            "shard_bytes": 8000,
            "workers": 1,
        }
        (tmp_path / "build.yaml").write_text(yaml.safe_dump(config))
        return samestep("data", "build", tmp_path / "build.yaml", *overrides)

    return run


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    (tmp_path / "experiment.yaml").write_text(
        f"""
output: {tmp_path / "run"}
accelerator: cpu
data: {{path: {tmp_path / "data"}, sequence_length: 48, packing: best_fit, lanes: 8}}
model: {{kind: t5, vocab_size: 256, layers: 1, width: 32, heads: 2, head_width: 16, ffn_width: 64, dropout: 0.1,
  attention_dropout: 0.0}}
objective: {{kind: seq2seq, target_length: 24}}
optimizer: {{kind: adafactor, lr: 1e-2}}
schedule: {{decay: constant}}
training: {{steps: 6, global_batch_size: 6, micro_batch_size: 3, log_every: 1, evaluate_every: 6, max_grad_norm: null}}
checkpoint: {{every: 3}}
"""  # noqa: E501
    )
    return str(tmp_path / "experiment.yaml")


@pytest.mark.long
def test_from_files_to_scores(
    samestep: Samestep, build, corpus: Path, experiment: str, tmp_path: Path
) -> None:
    assert build().code == 0
    assert samestep("data", "inspect", tmp_path / "data").code == 0
    assert samestep("train", experiment).code == 0
    run = tmp_path / "run"
    assert "verified" in samestep("ledger", "verify", run).out
    fed = samestep("ledger", "step", run, "2").out
    lines = {
        name: {
            part.rpartition(":")[2]
            for part in fed.replace("\n", ", ").split(", ")
            if f"{name}:" in part
        }
        for name in ("train.en", "train.de")
    }
    assert lines["train.en"] == lines["train.de"] != set()

    pytest.importorskip("sacrebleu")
    arguments = ("evaluate", run, "--generate", "beams=2", "max_new_tokens=6")
    heldout = samestep(*arguments, "--metrics", "bleu", "chrf", "rouge_l", "--limit", "7")
    assert heldout.code == 0, heldout.err
    scores = dict(line.split() for line in heldout.out.splitlines())
    assert scores.keys() == {"step", "pairs", "bleu", "chrf", "rouge_l"}
    assert (scores["step"], scores["pairs"]) == ("6", "7")
    assert all(0 <= float(scores[name]) <= 100 for name in ("bleu", "chrf", "rouge_l"))
    assert (
        samestep(
            *arguments, "--limit", "5", "--pairs", corpus / "train.en", corpus / "train.de"
        ).code
        == 0
    )
    rows = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    assert [(row["step"], row["pairs"], row["of"]) for row in rows] == [
        (6, 7, f"{tmp_path}/data"),
        (6, 5, f"{corpus}/train.en,{corpus}/train.de"),
    ]
    assert samestep("export", run, tmp_path / "exported").code == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    (trained,) = (row for row in read_rows(run / "metrics.jsonl") if "heldout/accuracy" in row)
    assert f"| token_accuracy | {trained['heldout/accuracy']:.6g} |" in card
    assert "| accuracy |" not in card
    assert (
        "Of 7 texts generated for data, after step 6:\n\n| score | value |\n| --- | --- |\n| bleu "
        "| " in card
    )
    assert "Of 5 texts generated for train.en, train.de, after step 6:" in card
    # The same model twice is the model; an ensemble leaves no scores in the run.
    alone = samestep(*arguments, "--metrics", "chrf", "--limit", "7")
    twice = samestep(*arguments, "--metrics", "chrf", "--limit", "7", "--ensemble", run)
    assert (twice.code, twice.out) == (0, alone.out)
    assert len((run / "scores.jsonl").read_text().splitlines()) == len(rows) + 1
    result = samestep("evaluate", run, "--generate", "beem=2")
    assert (result.code, "did you mean 'beams'" in result.message) == (2, True)
    result = samestep("evaluate", run, "--generate", "--pairs", corpus / "train.en")
    assert (result.code, "as many files of targets as of sources" in result.message) == (2, True)


@pytest.mark.parametrize("layout", ["prefix_lm", "language_model"])
def test_a_decoder_alone_is_fine_tuned_as_well(
    samestep: Samestep, build, experiment: str, layout: str
) -> None:
    assert build().code == 0
    changes = [f"model.architecture={layout}", f"objective.layout={layout}", "training.steps=2"]
    assert samestep("train", experiment, *changes, "data.packing=padded").code == 0


@pytest.mark.long
def test_bart_is_trained_exported_and_writes_what_transformers_writes(
    samestep: Samestep, build, experiment: str, tmp_path: Path
) -> None:
    """And what is refused: another start token, and targets longer than its positions."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from trainer.training.weights.loading import load_weights

    assert build().code == 0
    model = (
        "model={kind: bart, vocab_size: 134, layers: 1, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 48, initializer_range: 0.3, start_token: %d}"
    )
    changes = [model % 1, "optimizer={kind: adamw, lr: 1e-3}"]
    assert samestep("train", experiment, *changes).code == 0
    assert samestep("export", tmp_path / "run", tmp_path / "exported").code == 0
    prompt = f"{PREFIX}old small dog"
    result = samestep("generate", tmp_path / "run", "--max-new-tokens", 12, prompt)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    assert theirs.generation_config.decoder_start_token_id == 1
    ours = load_weights(tmp_path / "run").load_tokenizer()
    (source,) = ours.encode_batch([prompt])
    tokens = torch.tensor([[*source.tolist(), 1]])
    (row,) = theirs.generate(input_ids=tokens, max_new_tokens=12, do_sample=False).tolist()
    text = ours.decode(row[1 : row.index(1, 1)] if 1 in row[1:] else row[1:])
    assert result.out.splitlines() == [" ".join(text.splitlines())]

    refused = samestep("train", experiment, model % 2, f"output={tmp_path / 'other'}")
    assert refused.code == 2
    assert "set model.start_token=1" in refused.message
    long = samestep(
        "train", experiment, *changes, "objective.target_length=49", f"output={tmp_path / 'other'}"
    )
    assert long.code == 2
    assert "targets of 49 tokens are over the model's position table of 48" in long.message


@pytest.mark.long
def test_long_texts_are_cut_for_training_and_compared_whole(
    samestep: Samestep, build, experiment: str, tmp_path: Path
) -> None:
    from data_pipeline.reading.dataset import Dataset
    from trainer.inference.scores import heldout_pairs

    assert build().code == 0
    cut = [
        "objective.truncate_sources=true",
        "objective.truncate_targets=true",
        "objective.target_length=3",
    ]
    assert (
        samestep("train", experiment, *cut, "data.sequence_length=6", "training.steps=3").code == 0
    )
    run = tmp_path / "run"
    assert samestep("train", run / "config.yaml", "training.steps=6").code == 0
    assert "verified" in samestep("ledger", "verify", run).out
    scored = samestep(
        "evaluate", run, "--generate", "max_new_tokens=6", "--metrics", "accuracy", "--limit", "7"
    )
    assert scored.code == 0
    assert "7 of 7 sources are longer than 5 tokens and are truncated" in scored.err
    whole = {target for _, target in sentences(400)}
    assert {target for _, target in heldout_pairs(Dataset.open(tmp_path / "data"))} <= whole


def test_files_of_different_length(samestep: Samestep, build, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "short.de").write_text("\n".join(["x"] * 399))
    result = build(f"source.target_paths=[{tmp_path / 'short.de'}]")
    assert result.code == 1
    assert f"{corpus}/train.en:400 has no partner in {tmp_path}/short.de. Correct" in result.message


def test_empty_lines(samestep: Samestep, build, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "gap.de").write_text("\n".join("" if i == 6 else "red" for i in range(400)))
    gap = f"source.target_paths=[{tmp_path / 'gap.de'}]"
    result = build(gap)
    assert result.code == 1
    assert (
        f"{corpus}/train.en:7: empty target. Correct it, or count, list and leave out such "
        "documents" in result.message
    )
    assert build(gap, "on_error=skip").code == 0
    (rejected,) = (tmp_path / "data" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected) == {
        "file": f"{corpus}/train.en",
        "line": 7,
        "reason": "empty target",
    }


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        (
            "objective.target_length=3",
            1,
            ["train.en:", "the target has", "objective.target_length is 3", "raise it to"],
        ),
        (
            "data.sequence_length=6",
            1,
            ["train.en:", "the source has", "set objective.truncate_sources=true"],
        ),
        (
            "data.packing=concat",
            2,
            ["data.packing is concat, and the objective reads pairs", "data.packing=best_fit"],
        ),
        (
            "model.architecture=prefix_lm",
            2,
            ["the objective, seq2seq, needs target_tokens", "objective.layout=prefix_lm"],
        ),
        (
            "objective={kind: span_corruption, mean_span_length: 1, noise_density: 0.5}",
            2,
            ["spans", "sentinels"],
        ),
    ],
)
def test_settings_that_do_not_fit_the_pairs(
    samestep: Samestep, build, experiment: str, override: str, code: int, words: list[str]
) -> None:
    assert build().code == 0
    length = ["data.sequence_length=512"] if "span_corruption" in override else []
    result = samestep("train", experiment, override, *length)
    assert result.code == code
    assert all(word in result.message for word in words), result.message


def test_documents_instead_of_pairs(
    samestep: Samestep, build, corpus: Path, experiment: str
) -> None:
    assert build("heldout_fraction=0", kind="text", paths=[f"{corpus}/train.en"]).code == 0
    result = samestep("train", experiment)
    assert result.code == 1
    assert "holds documents; build a dataset from a source of pairs" in result.message


def test_a_tokenizer_without_sentinels(
    samestep: Samestep, build, corpus: Path, experiment: str, tmp_path: Path
) -> None:
    settings = corpus / "tokenizer" / "tokenizer_config.json"
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in settings.parent.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    (plain / settings.name).write_text(
        json.dumps({**json.loads(settings.read_text()), "extra_ids": 0})
    )
    assert build(f"tokenizer.path={plain}").code == 0
    result = samestep("train", experiment, "objective={kind: span_corruption}")
    assert result.code == 2
    assert (
        "needs a tokenizer with sentinels (<extra_id_0>, ...), and this one has none"
        in result.message
    )

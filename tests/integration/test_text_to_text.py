"""Runs of T5 and GPT-2 through the commands: what they are fed, say of themselves, and become.

And what is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel, T5ForConditionalGeneration

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import load
from tests.conformance.worker import TASKS
from tests.integration.commands import Samestep
from trainer.training.experiment import Experiment
from trainer.training.run import train

STEPS = 6


@pytest.fixture(scope="module")
def t5_run(t5_experiment: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("runs") / "t5"
    changes = [
        f"output={run}",
        f"training.steps={STEPS}",
        f"training.evaluate_every={STEPS}",
        "checkpoint.every=3",
    ]
    assert train(load(Experiment, t5_experiment, changes)) == 0
    return run


def test_a_step_has_the_tokens_of_both_sides(
    samestep: Samestep, t5_experiment: str, tmp_path: Path
) -> None:
    result = samestep("train", t5_experiment, f"output={tmp_path}", "training.steps=4")
    assert "10 examples x (64 + 14) = 780 tokens a step" in result.err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    assert [row["train/tokens"] for row in rows] == [780 * (i + 1) for i in range(4)]
    assert all(0 < row["data/padding_fraction"] < 0.2 for row in rows)


def test_the_ledger_proves_both_sides_and_a_step_is_made_again(
    samestep: Samestep, t5_run: Path
) -> None:
    verified = samestep("ledger", "verify", t5_run)
    assert verified.code == 0, verified.err
    replayed = samestep("replay", t5_run, 5, "--json")
    assert replayed.code == 0, replayed.err
    found = json.loads(replayed.out)
    assert found["compared"] == [5, 5]
    assert len(found["examples"]) == 10
    assert (
        samestep("ledger", "verify", t5_run, "objective.mean_span_length=2").code == 0
    )  # the ledger knows the objective


def test_it_scores_held_out_text_as_it_did_in_training(samestep: Samestep, t5_run: Path) -> None:
    result = samestep("evaluate", t5_run)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (t5_run / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [
        row["heldout/loss"] for row in rows if "heldout/loss" in row and row["step"] == STEPS
    ]
    assert float(dict(line.split() for line in result.out.splitlines())["loss"]) == pytest.approx(
        trained, rel=1e-4
    )


def test_it_becomes_a_model_of_transformers(
    samestep: Samestep, t5_run: Path, tmp_path: Path
) -> None:
    assert samestep("export", t5_run, tmp_path / "exported").code == 0
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "exported")
    assert torch.isfinite(model(torch.tensor([[5, 6, 1]]), labels=torch.tensor([[7, 1]])).loss)


DECODER = (
    "model={kind: gpt2, vocab_size: 700, layers: 1, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 64}"
)


@pytest.mark.parametrize(
    ("objective", "before", "after"),
    [("causal_lm", [1], []), ("{kind: span_corruption, layout: language_model}", [], [1])],
)
def test_transformers_continues_texts_with_an_exported_decoder_as_the_run_does(
    samestep: Samestep,
    t5_experiment: str,
    tmp_path: Path,
    objective: str,
    before: list[int],
    after: list[int],
) -> None:
    """</s>, 1 in this vocabulary and 50256 in GPT-2's own, begins texts, or ends sources."""
    run, exported = tmp_path / "run", tmp_path / "exported"
    changes = [f"output={run}", "training.steps=1", DECODER, f"objective={objective}"]
    assert train(load(Experiment, t5_experiment, changes)) == 0
    assert samestep("export", run, exported).code == 0
    model = GPT2LMHeadModel.from_pretrained(exported)
    settings = model.generation_config
    assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 1)

    ours, theirs = Tokenizer.load(run / "tokenizer"), AutoTokenizer.from_pretrained(exported)
    assert Tokenizer.load(exported).fingerprint == ours.fingerprint
    text = "the class of an object"
    inputs = theirs(text, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    assert ids == [*before, *ours.encode_batch([text])[0].tolist(), *after]
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0].tolist()
    new = ours.decode([token for token in output[len(ids) :] if token != 1])
    result = samestep("generate", run, "--max-new-tokens", 6, text)
    assert result.out.splitlines() == [" ".join(new.splitlines())]


def test_it_fills_no_masks(samestep: Samestep, t5_run: Path) -> None:
    result = samestep("fill", t5_run, "the [MASK] is")
    assert result.code == 2
    assert "use samestep generate" in result.message


def test_sources_are_shown_with_their_targets(samestep: Samestep, t5_experiment: str) -> None:
    dataset = Path(t5_experiment).parent / "dataset"
    for layout in ("encoder_decoder", "language_model"):
        shown = samestep(
            "data",
            "show",
            dataset,
            "--objective",
            t5_experiment,
            f"objective.layout={layout}",
            "--count",
            3,
        )
        sources = re.findall(r"^  (.*)</s>$", shown.out, re.MULTILINE)
        targets = re.findall(r"^→ (.*)</s>$", shown.out, re.MULTILINE)
        assert len(sources) == len(targets) >= 3
        for source, target in zip(sources, targets, strict=True):
            assert (
                re.findall("<extra_id_[0-9]+>", source)
                == re.findall("<extra_id_[0-9]+>", target)
                != []
            )


@pytest.mark.long
def test_modes_of_ul2_are_shown_and_a_decoder_alone_learns_from_them(
    samestep: Samestep, t5_experiment: str, tmp_path: Path
) -> None:
    ul2 = ["objective={kind: denoising, scheme: ul2, layout: prefix_lm}"]
    dataset = Path(t5_experiment).parent / "dataset"
    shown = samestep("data", "show", dataset, "--objective", t5_experiment, *ul2, "--count", 20)
    modes = re.findall(r"^  <extra_id_(9[789])>", shown.out, re.MULTILINE)
    assert set(modes) == {"97", "98", "99"}
    changes = [*ul2, "model.architecture=prefix_lm", "training.steps=2", f"output={tmp_path}"]
    assert train(load(Experiment, t5_experiment, changes)) == 0
    assert samestep("ledger", "verify", tmp_path).code == 0


def test_text_is_shown_as_it_is_where_every_token_is_predicted(
    samestep: Samestep, t5_experiment: str
) -> None:
    dataset = Path(t5_experiment).parent / "dataset"
    shown = samestep(
        "data", "show", dataset, "--objective", t5_experiment, *TASKS["causal_lm"], "--count", 20
    ).out
    assert "62 predicted" in shown
    assert "→" not in shown.partition("example 0")[2]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["model.architecture=language_model"],
            "set model.architecture=encoder_decoder or objective.layout=language_m",
        ),
        (
            ["objective.layout=prefix_lm"],
            "offers hidden, target_tokens; set model.architecture=prefix_lm or objective",
        ),
        (["objective=causal_lm"], "set model.architecture=language_model, or choose"),
        (
            [*TASKS["causal_lm"], "objective={kind: prefix_lm, layout: prefix_lm}"],
            "choose another model or objective",
        ),
        (["data.packing=pairs"], "by token types, and the model has none"),
        (["data.sequence_length=2000"], "sentinels"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    samestep: Samestep, t5_experiment: str, tmp_path: Path, overrides: list[str], told: str
) -> None:
    result = samestep("train", t5_experiment, f"output={tmp_path / 'run'}", *overrides)
    assert result.code == 2
    assert told in result.message


def test_a_run_goes_on_only_with_the_packing_that_it_began_with(
    samestep: Samestep, t5_run: Path, t5_experiment: str
) -> None:
    """Another noise density makes other examples of the same documents."""
    more = ("train", t5_experiment, f"output={t5_run}", "training.steps=8")
    result = samestep(*more, "objective.noise_density=0.3")
    assert result.code != 0
    assert "data.packing" in result.message

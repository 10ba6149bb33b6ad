"""Multi-task pre-training by the commands: plain text and pairs in one run, in proportion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from samestep.cli import main
from tests.integration.commands import Samestep, Start, losses
from tests.integration.test_seq2seq import PREFIX, sentences

FEW, MANY, TEXTS = 60, 240, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of pairs and one of text, with one tokenizer, and an experiment on them."""
    folder = tmp_path_factory.mktemp("multi_task")
    pairs = sentences(TEXTS)

    def build(name: str, source: dict[str, object]) -> None:
        tree = {
            "source": source,
            "tokenizer": {
                "path": str(folder / "tokenizer"),
                "algorithm": "unigram",
                "vocab_size": 34,
            },
            "output": str(folder / name),
            "heldout_fraction": 0.1,
            "shard_bytes": 4000,
            "workers": 1,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        if name == "text":
            assert main(["data", "tokenizer", str(folder / "text.yaml")]) == 0
        assert main(["data", "build", str(folder / f"{name}.yaml")]) == 0

    rows = [{"text": f"{PREFIX}{source}. {target}."} for source, target in pairs]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build("text", {"kind": "jsonl", "paths": [str(folder / "text.jsonl")]})
    for name, count in (("few", FEW), ("many", MANY)):
        paths = {}
        for side, key in enumerate(("source_paths", "target_paths")):
            file = folder / f"{name}.{side}"
            file.write_text("".join(pair[side] + "\n" for pair in pairs[:count]))
            paths[key] = [str(file)]
        build(name, {"kind": "parallel_text", **paths, "prefix": PREFIX})
    (folder / "experiment.yaml").write_text(
        f"""
output: {folder / "run"}
accelerator: cpu
data:
  sequence_length: 48
  packing: best_fit
  lanes: 4
  proportional: {{limit: 150, temperature: 2.0}}
  sources:
    - {{path: {folder / "text"}}}
    - {{path: {folder / "few"}}}
    - {{path: {folder / "many"}}}
model: {{kind: t5, vocab_size: 256, layers: 1, width: 32, heads: 2, head_width: 16, ffn_width: 64, dropout: 0.1,
  attention_dropout: 0.0}}
objective: {{kind: multi_task, of: {{kind: span_corruption, target_length: 32}}}}
optimizer: {{kind: adafactor, lr: 1e-2}}
schedule: {{decay: constant}}
training: {{steps: 8, global_batch_size: 9, micro_batch_size: 3, log_every: 1, evaluate_every: 8, max_grad_norm: null}}
checkpoint: {{every: 4}}
"""  # noqa: E501
    )
    return folder


@pytest.mark.long
def test_a_run_mixes_text_and_pairs_at_any_world_size(
    folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    """Trained, continued, proven; each task is scored by itself."""
    experiment, run = folder / "experiment.yaml", tmp_path / "run"
    result = samestep("train", experiment, f"output={run}", "data.threads=0")
    assert result.code == 0, result.err
    # The sizes count the pairs that were not held out; 150 is the limit of the larger ones.
    shares = dict(part.split() for part in _mixture(result.err).split(", "))
    sizes = {name: _documents(folder / name) for name in ("text", "few", "many")}
    assert sizes["few"] < 150 < min(sizes["text"], sizes["many"])
    rates = {name: min(size, 150) ** 0.5 for name, size in sizes.items()}
    for name, rate in rates.items():
        assert float(shares[name]) == pytest.approx(rate / sum(rates.values()), rel=1e-4)
    assert samestep("ledger", "verify", run).code == 0
    taken = samestep("ledger", "step", run, 3)
    assert all(name in taken.out for name in sizes), taken.out

    three = tmp_path / "three"
    arguments = ("train", experiment, f"output={three}", "strategy=fsdp", "--processes", 3)
    assert start(*arguments, "training.steps=5").wait(300).code == 0
    assert start(*arguments[:3], "--processes", 2).wait(300).code == 0
    found, expected = losses(three), losses(run)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)

    alone = ("data.sources=[]", f"data.path={folder / 'few'}")
    scored = samestep("evaluate", run, *alone, "--generate", "--metrics", "accuracy")
    assert scored.code == 0, scored.err
    of_text = samestep(
        "evaluate",
        run,
        alone[0],
        f"data.path={folder / 'text'}",
        "objective.of.noise_density=0.3",
    )
    assert of_text.code == 0, of_text.err


def test_wrong_input(folder: Path, tmp_path: Path, samestep: Samestep) -> None:
    experiment, run = folder / "experiment.yaml", f"output={tmp_path / 'run'}"

    def message(*settings: str) -> str:
        result = samestep("train", experiment, run, *settings)
        assert result.code in (1, 2)
        return result.message

    assert "use data.packing=best_fit, or padded" in message("data.packing=concat")
    assert "temperature is 0.5. Use 1 or more" in message("data.proportional.temperature=0.5")
    assert "limit is 0. Use 1 or more" in message("data.proportional.limit=0")
    short = message("data.sequence_length=16", "data.packing=padded")
    assert "the source has" in short
    assert "set objective.truncate_sources=true" in short
    other = message("objective.of={kind: mlm}")
    assert "of is mlm, which makes no pairs of texts out of plain text" in other


def _mixture(err: str) -> str:
    (line,) = [line for line in err.splitlines() if " data  " in line]
    return line.split(" data  ")[1].strip()


def _documents(dataset: Path) -> int:
    manifest = json.loads((dataset / "manifest.json").read_text())
    return sum(shard["documents"] for shard in manifest["splits"]["train"])

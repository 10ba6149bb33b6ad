"""The sections that dashboards make of the names of metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from trainer.monitoring.sections import sectioned

PAGE = Path(__file__).parents[3] / "docs" / "monitoring.md"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train/loss", "loss/train_loss"),
        ("heldout/mlm_loss", "loss/heldout_mlm_loss"),
        ("heldout/sst2/loss", "loss/heldout_sst2_loss"),
        ("heldout/perplexity", "loss/heldout_perplexity"),
        ("perf/useful_tokens_per_second", "throughput/useful_tokens_per_second"),
        ("perf/peak_memory_gib", "system/peak_memory_gib"),
        ("perf/energy_joules", "system/energy_joules"),
        ("train/tokens", "data/tokens"),
        ("data/padding_fraction", "data/padding_fraction"),
        ("train/loss_scale", "train/loss_scale"),
        ("heldout/accuracy", "heldout/accuracy"),
        ("time/data_wait", "time/data_wait"),
    ],
)
def test_the_name_begins_with_the_section(name: str, shown: str):
    assert sectioned({name: 0.5}) == {shown: 0.5}


def test_the_sweep_names_a_metric_that_wandb_gets():
    sweep = yaml.safe_load((PAGE.parents[1] / "configs/sweeps/bert_mini.yaml").read_text())
    assert sweep["metric"]["name"] in sectioned({"heldout/loss": 0.0})


def test_documented_metrics_keep_names_of_their_own():
    table = PAGE.read_text().partition("| name | meaning |")[2].partition("### ")[0]
    names = re.findall(r"`((?:train|heldout|perf|data|time)/\w+)`", table)
    assert len(names) > 20
    assert len(sectioned(dict.fromkeys(names, 0.0))) == len(set(names))

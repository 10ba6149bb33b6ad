"""XLNet against its classes in transformers: two streams, one stream, and both formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import XLNetConfig, XLNetLMHeadModel

from samestep.errors import ConfigError
from tests.outputs import outputs, parameters, published
from tests.parity.pairs import load, saved
from tests.unit.objectives.test_mlm_sbo import VOCABULARY, examples
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import xlnet
from trainer.objectives.kinds import permutation_lm

SHAPE = {"vocab_size": 100, "d_model": 48, "n_layer": 3, "n_head": 4, "d_inner": 96}
CONFIG = xlnet.Config(vocab_size=100, layers=3, width=48, heads=4, ffn_width=96, max_positions=64)


def make(folder: Path, kind: Any = XLNetLMHeadModel, **changes: Any) -> tuple[Any, Any, Any]:
    """A random model of transformers, saved in the folder, and ours imported from it."""
    theirs = kind(XLNetConfig(**{**SHAPE, "summary_type": "first", **changes})).eval()
    return saved(theirs, folder, 0.1), *load(xlnet.Config, folder)


def rows(types: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(24) < torch.tensor([24, 15, 9])[:, None]
    tokens = torch.randint(5, 100, real.shape, generator=generator)
    found = {"tokens": torch.where(real, tokens, 0), "segments": real.int()}
    if types:
        found["token_types"] = (torch.arange(24) >= 6).int().expand(3, -1)
    return found


def same_gradients(config: Any, theirs: Any, ours: Any) -> None:
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()
    }
    actual = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()
    }
    torch.testing.assert_close(actual, codec_of(config).import_tensors(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("types", [True, False])
def test_two_streams_are_those_of_transformers(types: bool, tmp_path: Path) -> None:
    """Logits, loss and every gradient, by perm_mask and target_mapping."""
    theirs, config, ours = make(tmp_path / "theirs")
    columns = rows(types)
    tokens, segments = columns["tokens"], columns["segments"]
    predicted = torch.tensor([[3, 7, 8, 20], [2, 5, 9, 0], [4, 1, 0, 0]])
    used = predicted > 0
    rank = torch.zeros(3, 24, dtype=torch.int32)
    order = torch.tensor([[2, 4, 1, 3], [3, 1, 2, 0], [1, 2, 0, 0]], dtype=torch.int32)
    rank.scatter_(1, predicted, order)
    (logits,) = outputs(
        ours, "permuted_tokens", **columns, predicted=predicted, extra={"rank": rank}
    )
    visible = (rank[:, None, :] == 0) | (rank[:, None, :] < rank[:, :, None])
    visible &= segments[:, None, :] == segments[:, :, None]
    found = theirs(
        input_ids=tokens,
        token_type_ids=columns.get("token_types"),
        perm_mask=(~visible).float(),
        target_mapping=F.one_hot(predicted, 24).float(),
        use_mems=False,
    ).logits
    torch.testing.assert_close(logits[used], found[used], rtol=1e-5, atol=1e-5)
    labels = torch.randint(5, 100, predicted.shape, generator=torch.Generator().manual_seed(2))
    F.cross_entropy(logits[used], labels[used]).backward()
    F.cross_entropy(found[used], labels[used]).backward()
    same_gradients(config, theirs, ours)

    folder = tmp_path / "ours"
    save_folder(folder, *published(config, parameters(ours)))
    again, report = XLNetLMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert load(xlnet.Config, folder)[0] == config


@pytest.mark.parametrize(
    ("ending", "head"),
    [
        ("SequenceClassification", "classification"),
        ("TokenClassification", "tagging"),
        ("QuestionAnsweringSimple", "question_answering"),
        ("MultipleChoice", "multiple_choice"),
    ],
)
@pytest.mark.parametrize("types", [True, False])
def test_heads_are_those_of_transformers(
    ending: str, head: str, types: bool, tmp_path: Path
) -> None:
    """All positions see each other; heads pool the first one."""
    labels = {"num_labels": 3} if head in ("classification", "tagging") else {}
    theirs, config, ours = make(tmp_path, getattr(transformers, f"XLNetFor{ending}"), **labels)
    assert config.head == head
    columns = rows(types)
    pooled = head in ("classification", "multiple_choice")
    at = torch.zeros(3, 1, dtype=torch.long) if pooled else None
    (logits,) = outputs(ours, head, **columns, predicted=at)
    inputs = {"input_ids": columns["tokens"], "attention_mask": columns["segments"].float()}
    if types:
        inputs["token_type_ids"] = columns["token_types"]
    if head == "multiple_choice":
        inputs = {name: each[:, None] for name, each in inputs.items()}
    found = theirs(**inputs, use_mems=False)
    if head == "question_answering":
        expected = torch.stack((found.start_logits, found.end_logits), -1)
    else:
        expected = found.logits.view(3, 1, -1) if pooled else found.logits
    real = torch.ones(3, 1, dtype=torch.bool) if pooled else columns["segments"] > 0
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)
    logits[real].square().mean().backward()
    expected[real].square().mean().backward()
    same_gradients(config, theirs, ours)
    exported = codec_of(config).export_tensors(parameters(ours))
    assert exported.keys() == theirs.state_dict().keys()


def test_dropout_after_the_last_layer_is_the_last() -> None:
    """As in transformers, whose taggers have none of their own."""
    model = replace(CONFIG, head="tagging", labels=("O", "B", "I"), dropout=0.5).build()
    fill_randomly(model)
    seen: list[Tensor] = []
    for module in (model.head, model.head.classifier):
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    keys = torch.arange(3, dtype=torch.int32)
    outputs(model.train(), "tagging", tokens=rows(False)["tokens"], dropout_key=keys)
    finished, read = seen
    assert 0.45 < (finished == 0).float().mean() < 0.55
    assert torch.equal(read, finished)


def test_packed_sequences_do_not_see_each_other() -> None:
    """A packed sequence gets the logits that it gets alone, whatever else is in its row."""
    model = CONFIG.build().eval()
    fill_randomly(model)
    objective = permutation_lm.Config().build(VOCABULARY)
    arrays = objective.collate(examples(4), 64)
    batch = {name: torch.from_numpy(np.asarray(each)) for name, each in arrays.items()}
    names = ("tokens", "segments", "predicted")
    columns = {name: batch[name] for name in names}
    (whole,) = outputs(model, "permuted_tokens", **columns, extra={"rank": batch["rank"]})
    for row in range(4):
        for segment in batch["segments"][row].unique().tolist()[1:]:
            at = (batch["segments"][row] == segment).nonzero()[:, 0]
            first, last = int(at[0]), int(at[-1]) + 1
            own = (batch["predicted"][row] >= first) & (batch["predicted"][row] < last)
            own &= batch["weights"][row] > 0
            if not own.any():
                continue
            alone = outputs(
                model,
                "permuted_tokens",
                tokens=batch["tokens"][row : row + 1, first:last],
                predicted=batch["predicted"][row : row + 1, own] - first,
                extra={"rank": batch["rank"][row : row + 1, first:last]},
            )[0][0]
            torch.testing.assert_close(alone, whole[row, own], rtol=1e-4, atol=1e-5)


def test_no_prediction_depends_on_tokens_after_it_in_the_order() -> None:
    model = CONFIG.build().eval()
    fill_randomly(model)
    objective = permutation_lm.Config(k=2).build(VOCABULARY)
    arrays = objective.collate(examples(1), 64)
    batch = {name: torch.from_numpy(np.asarray(each)) for name, each in arrays.items()}
    used = batch["weights"][0] > 0
    order = batch["rank"][0].gather(0, batch["predicted"][0]).masked_fill(~used, 0)
    names = ("tokens", "segments", "predicted")
    columns = {name: batch[name] for name in names}
    (before,) = outputs(model, "permuted_tokens", **columns, extra={"rank": batch["rank"]})
    for entry in used.nonzero()[:4, 0].tolist():
        changed = batch["tokens"].clone()
        changed[0, batch["predicted"][0, entry]] = 7
        columns["tokens"] = changed
        (after,) = outputs(model, "permuted_tokens", **columns, extra={"rank": batch["rank"]})
        differs = (after != before).any(-1)[0] & used
        # Those that come later may differ; itself and those that come before may not.
        assert not differs[order <= order[entry]].any()


def fill_randomly(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_released_sizes() -> None:
    """116.8M and 360.3M parameters (Yang et al. 2019 use BERT's sizes, and a vocabulary of 32k)."""
    large = {"layers": 24, "width": 1024, "heads": 16, "ffn_width": 4096}
    for settings in ({}, large):
        with torch.device("meta"):
            ours = replace(xlnet.Config(), **settings).build()
            config = codec_of(replace(xlnet.Config(), **settings)).to_huggingface()
            theirs = XLNetLMHeadModel(XLNetConfig(**config))
        count = sum(parameter.numel() for parameter in ours.parameters())
        assert count == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"summary_type": "last"}, "summary_type 'last', but a classification head needs 'first'"),
        ({"summary_activation": "gelu"}, "summary_activation 'gelu', .* needs 'tanh'"),
    ],
)
def test_a_head_that_pools_in_another_way_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "words", **settings)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "classes", transformers.XLNetForSequenceClassification, **settings)
    tree, tensors = load_folder(tmp_path / "classes")
    del tree["summary_type"]  # its default is "last"
    with pytest.raises(ConfigError, match="summary_type 'last'"):
        read_config(xlnet.Config, tree, tensors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nsp": True}, "nsp is set, but XLNet has no such head"),
        ({"also_causal": True}, "also_causal is set"),
        ({"norm": "pre"}, "XLNet has norm post"),
        ({"width": 15, "heads": 3}, "width is 15"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        xlnet.Config(**settings)

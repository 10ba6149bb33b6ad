"""Every usual form of a published model is read; docs/huggingface.md has the table."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from samestep.errors import CheckpointError, ConfigError
from samestep.examples import Vocabulary
from tests.outputs import outputs, predict
from tests.parity.pairs import add_noise
from trainer.checkpoint.huggingface import save_folder
from trainer.checkpoint.layout import StoredTensors
from trainer.generation import Config, Generator
from trainer.inference.fill import check_masked_lm
from trainer.models.codecs import codec_of
from trainer.publish import sentence_transformers
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights, _add_base, load_weights

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
LONG = partial(pytest.param, marks=pytest.mark.long)
NAMED = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
DEBERTA = {
    **BERT,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
GPT = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
BART = {
    "vocab_size": 60,
    "d_model": 16,
    "max_position_embeddings": 40,
    **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 32 for stack in ("encoder", "decoder")},
}
XLNET = {"vocab_size": 60, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
DISTIL = {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
V2 = {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
LLAMA = {**BERT, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": BERT,
    "Roberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "Camembert": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "Albert": {**BERT, "embedding_size": 8},
    "DistilBert": {**DISTIL, "max_position_embeddings": 40},
    "Electra": {**BERT, "embedding_size": 8},
    "MPNet": {**BERT, "pad_token_id": 1},
    "ModernBert": {**BERT, **NAMED},
    "Deberta": {**DEBERTA, "pooler_hidden_size": 16},
    "DebertaV2": {**DEBERTA, **V2, "pooler_hidden_size": 16},
    "XLNet": {**XLNET, "summary_type": "first"},
    "GPT2": {**GPT, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    "OpenAIGPT": {**GPT, "pad_token_id": 0},
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Olmo2"), LLAMA),
    "EuroBert": {**LLAMA, "mask_token_id": 3},
    "T5": {**T5, "decoder_start_token_id": 0},
    "MT5": {**T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    "Bart": BART,
}
FORMS: dict[str, tuple[str, ...]] = {
    "no head": ("Model",),
    "encoder alone": ("EncoderModel",),
    "PreTraining": ("ForPreTraining",),
    "language model": ("ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForCausalLM"),
    "SequenceClassification": ("ForSequenceClassification",),
    "TokenClassification": ("ForTokenClassification",),
    "QuestionAnswering": ("ForQuestionAnsweringSimple", "ForQuestionAnswering"),
    "MultipleChoice": ("ForMultipleChoice", "DoubleHeadsModel"),
}
LIGHT = ("Bert", "T5")
LABELED = ("SequenceClassification", "TokenClassification")
LABELS = {"id2label": {"0": "no", "1": "perhaps", "2": "yes"}, "num_labels": 3}
TOKENS = torch.arange(5, 25).view(2, 10)


def model_of(family: str, form: str, **settings: object) -> Any:
    """A random model of transformers; None if it has no such class."""
    classes = (getattr(transformers, family + name, None) for name in FORMS[form])
    found = next(filter(None, classes), None)
    if found is None:
        return None
    torch.manual_seed(0)
    if form in LABELED:
        settings = LABELS | settings
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family] | settings)
    model = found(config).eval()
    add_noise(model, 0.05)
    return model


@torch.no_grad()
def states_of(model: Any) -> Tensor:
    """The hidden states of the stack that reads texts."""
    inner = getattr(model, "encoder", None) if "EncoderModel" in type(model).__name__ else None
    inner = inner or getattr(model.base_model, "encoder", None)
    is_pair = model.config.model_type in ("t5", "mt5", "bart")
    if is_pair:
        inner = inner or model.transformer.encoder
    found: Tensor = (inner if is_pair else model.base_model)(input_ids=TOKENS).last_hidden_state
    return found


@torch.no_grad()
def our_states(weights: Weights) -> Tensor:
    name = f"layer.{weights.config.layers}"
    columns = {"tokens": TOKENS, "positions": torch.arange(10).expand(2, -1)}
    return outputs(weights.model(frozenset({name})), name, **columns)[0]


@torch.no_grad()
def assert_same_logits(weights: Weights, theirs: Any) -> None:
    """Compares what the heads say: of tokens, replacements, texts, choices, tags and spans."""
    model, config = weights.model(), weights.config
    # Heads of T5 and BART read the position of the token that ends a text.
    tokens = TOKENS.clone()
    if config.encoder_decoder:
        tokens[:, -1] = theirs.config.eos_token_id
    columns = {"tokens": tokens, "positions": torch.arange(10).expand(2, -1)}
    inputs = {"input_ids": tokens}
    if config.head == "language_model" and config.encoder_decoder:
        targets = TOKENS.clone()
        targets[:, 0] = theirs.config.decoder_start_token_id
        columns["target_tokens"] = inputs["decoder_input_ids"] = targets
    if config.head in ("classification", "multiple_choice"):
        columns["predicted"] = torch.full((2, 1), 9 if config.decoder else 0)
    if config.head == "multiple_choice":
        inputs = {"input_ids": tokens[None]}
    found = theirs(**inputs)
    logits = found.get("logits", found.get("prediction_logits"))
    if logits is None:
        logits = torch.stack([found.start_logits, found.end_logits], -1)
    ours = predict(model, **columns).view(logits.shape)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def read_as(weights: Weights) -> str:
    """The name of a head in the table."""
    head = weights.config.head
    if head != "language_model":
        return {"embedding": "encoder", "question_answering": "spans"}.get(head, head)
    try:
        check_masked_lm(weights, "x")
        return "fills" if weights.config.predicts == "tokens" else weights.config.predicts
    except ConfigError:
        return "generates"


def exported_again(weights: Weights, folder: Path) -> Weights:
    codec = codec_of(weights.config)
    tensors = codec.export_tensors(dict(weights.tensors)) | codec.export_spare(weights.spare)
    unshared = {name: each.clone() for name, each in tensors.items()}
    save_folder(folder, codec.to_huggingface(), unshared)
    return load_weights(folder)


@pytest.mark.parametrize("family", [each if each in LIGHT else LONG(each) for each in FAMILIES])
def test_every_form_loads(family: str, tmp_path: Path) -> None:
    """States and logits are equal, an export is read back, and the page's row says how."""
    cells: list[str] = []
    for number, form in enumerate(FORMS):
        theirs = model_of(family, form)
        if theirs is None:
            cells.append("")
            continue
        theirs.save_pretrained(tmp_path / str(number))
        weights = load_weights(tmp_path / str(number))
        torch.testing.assert_close(our_states(weights), states_of(theirs), rtol=1e-5, atol=1e-5)
        cells.append(read_as(weights))
        head, has_task = weights.config.head, form in list(FORMS)[4:]
        # A bare model has no head. XLNet's needs its two streams; test_xlnet.py compares them.
        skips = head == "embedding" or form == "no head" or cells[-1] == "permuted_tokens"
        if not skips and has_task == (head != "language_model"):
            assert_same_logits(weights, theirs)
        if weights.config.labels:
            assert weights.config.labels == ("no", "perhaps", "yes")
        again = exported_again(weights, tmp_path / f"again {number}")
        assert again.config == weights.config
        assert again.spare.keys() == weights.spare.keys()
        torch.testing.assert_close(dict(again.tensors), dict(weights.tensors), rtol=0, atol=0)
    row = f"| `{theirs_type(family)}` | {' | '.join(cells)} |"
    assert row in PAGE.read_text(encoding="utf-8"), row


def theirs_type(family: str) -> str:
    model_type: str = getattr(transformers, f"{family}Config").model_type
    return model_type


def saved(folder: Path, form: str = "no head", family: str = "Bert", **settings: object) -> Any:
    model = model_of(family, form, **settings)
    model.save_pretrained(folder)
    return model


def assert_same_states(folder: Path, model: Any) -> Weights:
    weights = load_weights(folder)
    torch.testing.assert_close(our_states(weights), states_of(model), rtol=1e-5, atol=1e-5)
    return weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """Values are those of the file, computed with in fp32."""
    model = model_of("Bert", "no head").to(dtype)
    model.save_pretrained(tmp_path)
    assert_same_states(tmp_path, model.float())


def test_shards_and_pickles(tmp_path: Path) -> None:
    model = model_of("Bert", "language model")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    whole = assert_same_states(tmp_path, model)
    identity = whole.identity()
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    again = assert_same_states(tmp_path, model)
    assert again.config == whole.config
    assert again.identity() != identity
    name = "bert.encoder.layer.0.output.dense.bias"
    wrong = model.state_dict() | {name: torch.full((16,), torch.inf)}
    torch.save(wrong, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"{name} in .*pytorch_model\.bin holds"):
        load_weights(tmp_path).model()


def test_resized_embeddings(tmp_path: Path) -> None:
    model = model_of("Bert", "language model")
    model.resize_token_embeddings(67)
    model.save_pretrained(tmp_path)
    assert assert_same_states(tmp_path, model).config.vocab_size == 67


def test_a_tokenizer_with_more_tokens_than_embeddings(tmp_path: Path) -> None:
    saved(tmp_path, vocab_size=30)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    with pytest.raises(ConfigError, match=r"has 45 tokens, and the model of .* embeddings of 30"):
        load_weights(tmp_path).load_tokenizer()


def started(
    folder: Path, caplog: pytest.LogCaptureFixture, frozen: tuple[str, ...] = (), **settings: Any
) -> dict[str, Tensor]:
    """The initial values of a model that begins with a folder's weights."""
    weights = load_weights(folder)
    model = weights.config.with_settings(**settings).build()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    tokenizer = SimpleNamespace(fingerprint="", vocabulary=SimpleNamespace(size=60))
    tokenizer.extends = lambda other: True
    own = replace(weights)
    object.__setattr__(own, "load_tokenizer", lambda: tokenizer)
    dataset = SimpleNamespace(name="data", tokenizer=tokenizer)
    with caplog.at_level(logging.INFO):
        values = stored_values(own, model, dataset, seed=0)
    return {
        name: values(name, 0, each.numel()).view(each.shape)
        for name, each in model.named_parameters()
    }


@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_the_pooler_of_an_encoder_begins_a_head(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with `from_pretrained` of transformers; and `export` keeps it."""
    model = saved(tmp_path / "encoder", family=family)
    pooler = model.pooler if family == "Albert" else model.pooler.dense
    labels = ("no", "yes")
    found = started(tmp_path / "encoder", caplog, head="classification", labels=labels)
    assert torch.equal(found["head.pooler.weight"], pooler.weight)
    assert "initialized at random: head.classifier.weight, head.classifier.bias" in caplog.text
    again = exported_again(load_weights(tmp_path / "encoder"), tmp_path / "again")
    _, report = transformers.AutoModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again.spare["classification"]["head.pooler.bias"], pooler.bias)


def test_a_frozen_part_may_be_that_of_the_encoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read from there at the start, and again with a checkpoint that leaves it out."""
    pooler = saved(tmp_path).pooler.dense
    task = {"head": "classification", "labels": ("no", "yes")}
    frozen = ("head.pooler.weight", "head.pooler.bias")
    found = started(tmp_path, caplog, frozen, **task)
    assert torch.equal(found["head.pooler.weight"], pooler.weight)
    base = load_weights(tmp_path)
    trained = {name: each for name, each in found.items() if name not in frozen}
    whole = _add_base(base.config.with_settings(**task), StoredTensors.of(trained), base)
    torch.testing.assert_close(dict(whole), found, rtol=0, atol=0)
    with pytest.raises(
        ConfigError, match=r"head\.classifier\.bias is frozen, and .* has no values"
    ):
        started(tmp_path, caplog, ("head.classifier.bias",), **task)


@pytest.mark.parametrize("name", ["pooler.dense.bias", "my_head.weight", "embeddings.word"])
def test_not_a_number_in_a_tensor_that_is_not_used(name: str, tmp_path: Path) -> None:
    """No parameter reads a spare pooler or a strange head, and the file is damaged all the same."""
    tensors = dict(saved(tmp_path).state_dict())
    name = next((each for each in tensors if name in each), name)
    wrong = tensors | {name: torch.full_like(tensors.get(name, torch.ones(3)), torch.nan)}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} in .*model\.safetensors holds NaN"):
        load_weights(tmp_path).model()
    save_file(
        {**tensors, "my_ids": torch.ones(3, dtype=torch.int64)}, tmp_path / "model.safetensors"
    )
    load_weights(tmp_path).model()


@pytest.mark.parametrize("form", ["no head", "SequenceClassification"])
def test_a_masked_lm_head_is_new_where_there_is_none(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, form)
    found = started(tmp_path, caplog, head="language_model", labels=())
    assert found["head.dense.weight"].std() > 0
    assert "initialized at random: head.bias, head.dense.weight, head.dense.bias" in caplog.text
    with pytest.raises(ConfigError, match=r"x has .*head"):
        check_masked_lm(load_weights(tmp_path), "x")


def test_an_encoder_of_t5_writes_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "encoder alone", "T5")
    weights = load_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"x has no head, .* use one that has it, as a BERT"):
        check_masked_lm(weights, "x")
    vocabulary = Vocabulary(60, 0, None, None, None, (), eos=1)
    with pytest.raises(
        ConfigError, match=r"an encoder alone, without a decoder .* instead of T5Enc"
    ):
        Generator(weights.model(), vocabulary, Config())
    for settings in ({"head": "language_model"}, {"head": "classification", "labels": ("a", "b")}):
        message = rf"an encoder alone, and a t5 with model\.head={settings['head']} needs a decoder"
        with pytest.raises(CheckpointError, match=message):
            started(tmp_path, caplog, **settings)
    found = started(tmp_path, caplog, head="tagging", labels=("a", "b"))
    assert torch.equal(
        found["embeddings.tokens.weight"], weights.tensors["embeddings.tokens.weight"]
    )


def test_a_head_that_we_lack_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(tmp_path)
    tensors = {f"bert.{name}": each for name, each in model.state_dict().items()}
    save_file({**tensors, "my_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert_same_states(tmp_path, model)
    assert "no such head: my_head.weight" in caplog.text
    save_file({**tensors, "bert.adapter.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"bert\.adapter\.weight is unexpected"):
        load_weights(tmp_path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("xlm-roberta-xl", None, "__init__"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": name}))
        with pytest.raises(CheckpointError, match=f"model_type {name!r}, .* camembert, deberta,"):
            load_weights(tmp_path)


def test_settings_and_poolers_of_another_form_are_errors_of_the_folder(tmp_path: Path) -> None:
    model = saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = {f"bert.{name}": each for name, each in model.state_dict().items()}
    name = "bert.pooler.dense.weight"
    save_file({**tensors, name: torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"bert\.pooler\.dense has the shapes \[\(3, 3\)"):
        load_weights(tmp_path)
    del tensors[name]  # its bias alone
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"bert\.pooler\.dense has the shapes"):
        load_weights(tmp_path)
    strange = config | {"model_type": "camembert", "architectures": 5, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(strange))
    with pytest.raises(CheckpointError):
        load_weights(tmp_path)


def module_list(*kinds: tuple[str, str]) -> str:
    return json.dumps([{"idx": 0, "name": "0", "type": kind, "path": path} for kind, path in kinds])


def test_other_modules_of_sentence_transformers_are_not_exported(tmp_path: Path) -> None:
    theirs = "sentence_transformers.models."
    encoder, pooling = (f"{theirs}Transformer", ""), (f"{theirs}Pooling", "1_Pooling")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    for modules in (
        (("evil.module.Transformer", ""), pooling),
        (encoder, pooling, ("evil.code.Normalize", "2_Normalize")),
        (encoder, pooling, (f"{theirs}Normalize", "../../x")),
        (encoder, pooling, (f"{theirs}Dense", "2_Dense")),
        (encoder,),
        (),
    ):
        (tmp_path / "modules.json").write_text(module_list(*modules))
        with pytest.raises(ConfigError, match="an export would lose"):
            sentence_transformers.stored(tmp_path)
    kept = module_list(encoder, pooling, (f"{theirs}Normalize", "2_Normalize"))
    (tmp_path / "modules.json").write_text(kept)
    assert sentence_transformers.stored(tmp_path)


@pytest.mark.parametrize("family", [each if each == "Bert" else LONG(each) for each in FAMILIES])
def test_a_named_head_that_is_absent(family: str, tmp_path: Path) -> None:
    """It would be a random one; without its name, the other parameters are read.

    Without a prefix in the names, as in all-mpnet-base-v2, an encoder is read as one, whatever
    language model config.json names.
    """
    bare = "encoder alone" if family in ("T5", "MT5") else "no head"
    model_of(family, bare).save_pretrained(tmp_path / "bare")
    tensors, kind = load_file(tmp_path / "bare/model.safetensors"), read_as_in(tmp_path / "bare")
    for form in FORMS:
        theirs = model_of(family, form)
        if theirs is None:
            continue
        folder = tmp_path / form
        theirs.save_pretrained(folder)
        if read_as_in(folder) == kind:
            continue
        whole = load_file(folder / "model.safetensors")
        own = {name for name in whole if name not in tensors}
        save_file(tensors, folder / "model.safetensors")
        if form in ("PreTraining", "language model") and bare == "no head":
            assert read_as_in(folder) == kind
            begin = f"{theirs.base_model_prefix}."
            body = {name: each for name, each in whole.items() if name.startswith(begin)}
            if begin == "model.":  # which is removed where all names have it
                continue
            save_file(body, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"a model with .*, which the weights") as error:
            load_weights(folder)
        named = str(error.value).split("a model with ")[1].split(", which")[0].split(", ")
        for module in named:
            assert any(f"{module}." in name for name in own), module
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
        assert read_as_in(folder) == kind


def read_as_in(folder: Path) -> str:
    return read_as(load_weights(folder))

"""Exports a checkpoint as a Hugging Face folder, with a model card."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from samestep.config import kind_name
from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.storage.hub import name_and_revision
from trainer.checkpoint import huggingface
from trainer.models import ModelConfig
from trainer.models.codecs import codec_of, sparse_encoders
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.peft import huggingface as adapters
from trainer.publish import model_card, sentence_transformers
from trainer.publish import tokenizer as exported_tokenizer
from trainer.training.weights.loading import Weights, load_weights, warn_of_not_finite

logger = logging.getLogger(__name__)


def export(
    checkpoint: str,
    folder: str,
    part: str | None = None,
    name: str | None = None,
    scores: Sequence[Path] = (),
) -> None:
    """Exports a checkpoint to Hugging Face format: weights, tokenizer and a model card.

    LoRA is merged into the weights.

    Args:
        part: a model inside of the checkpoint's, as ELECTRA's `generator`; None: the model.
        name: of the model in its card; None: the folder's.
        scores: files of `samestep evaluate --scores`, for tables of the card.

    Raises:
        ConfigError: `transformers` has no such model, or there is no such part.
        DataError: a file of scores is no JSON of that form.
    """
    measured = model_card.measured(scores)
    export_weights(load_weights(checkpoint), checkpoint, folder, part, name, measured)


def export_weights(
    weights: Weights,
    checkpoint: str,
    folder: str,
    part: str | None = None,
    name: str | None = None,
    measured: model_card.Scores = MappingProxyType({}),
) -> None:
    """Exports weights that were loaded from `checkpoint`; see `export`."""
    whole = weights
    prefix = ""
    if part is not None:
        parts = codec_of(weights.config).export_parts()
        if part not in parts:
            has = f"has only {', '.join(parts)}" if parts else "has no parts. Leave --part out"
            raise ConfigError(f"--part is {part}, but {checkpoint} {has}.")
        inner, prefix = parts[part]
        weights = replace(weights, config=inner)
    tokenizer = weights.load_tokenizer()
    vocabulary = tokenizer.vocabulary
    # Before any file is written: an export that transformers reads wrongly is worse than none.
    _check_padding(weights, vocabulary)
    mask = None if vocabulary.mask is None else tokenizer.token(vocabulary.mask)
    with tempfile.TemporaryDirectory() as files:
        tokenizer.save(files)
        padding = exported_tokenizer.adapt(
            Path(files), weights.config, vocabulary, weights.generates_targets
        )
        ours, parameters = _merged(whole, checkpoint)
        if part is not None:
            ours, parameters = (
                weights.config,
                parameters_of_part(weights.config, parameters, prefix),
            )
        # It changes no order of similarities.
        if ours.logit_scale:
            ours = ours.with_settings(logit_scale=False)
            del parameters["logit_scale"]
            logger.info("left out, because only training reads it: logit_scale")
        # A padding token that `adapt` has added comes after the vocabulary, and needs a row.
        if padding is not None and padding >= ours.vocab_size:
            ours, parameters = ours.pad_vocabulary(parameters, padding + 1)
        codec = codec_of(ours)
        tensors = codec.export_tensors(parameters) | codec.export_spare(whole.spare)
        warn_of_not_finite(tensors, checkpoint)
        config = codec.to_huggingface() | _token_ids(ours, replace(vocabulary, pad=padding))
        config |= sentence_transformers.cross_encoder(weights)
        more = None
        if whole.step is None and isinstance(whole.folder, Path):
            more = sentence_transformers.stored(whole.folder)
        pooling = Pooling.of_objective(whole.objective)
        if more is None and (ours.head == "embedding" or pooling.pool == "splade"):
            more = sentence_transformers.files(ours, pooling)
        name = name or Path(folder).absolute().name
        is_sparse = sparse_encoders.POOLING in (more or {})
        packages = model_card.packages(weights, Path(files), is_sparse=is_sparse)
        card = model_card.write(
            weights,
            checkpoint,
            name,
            packages,
            mask,
            measured=measured,
            is_sparse=is_sparse,
        )
        huggingface.save_folder(Path(folder), config, tensors, Path(files), card, more=more)
    logger.info("wrote %s: %d tensors of %s", folder, len(tensors), checkpoint)


def export_adapter(checkpoint: str, folder: str, scores: Sequence[Path] = ()) -> None:
    """Exports an adapter for the `peft` library, with the tokenizer and a model card.

    A base model that is a checkpoint of samestep has to be exported as well.

    Raises:
        ConfigError: the model has no adapter, or `peft` has no such kind.
    """
    measured = model_card.measured(scores)
    weights = load_weights(checkpoint)
    if weights.config.peft is None or weights.base is None:
        raise ConfigError(f"{checkpoint} is a whole model without an adapter; leave --adapter out")
    if weights.config.head == "embedding":
        # The names in adapters are of models with a head; AutoModel has others.
        raise ConfigError(
            f"{checkpoint} embeds texts, and peft cannot add its adapter to a model without a "
            "head. Leave --adapter out: the export merges LoRA into the weights."
        )
    base = weights.base
    # A run that started from another adapter went on training it: take the plain model below.
    while base.base is not None and base.config.peft is not None:
        base = base.base
    # The adapter names its base, and the revision on the Hub that it was trained on.
    name, revision = name_and_revision(base.hub) if base.hub else (base.path, "")
    content, tensors = adapters.export_adapter(weights.config, weights.tensors, name)
    warn_of_not_finite(tensors, checkpoint)
    if revision:
        content["revision"] = revision
    tokenizer = weights.load_tokenizer()
    own_name = Path(folder).absolute().name
    with tempfile.TemporaryDirectory() as files:
        tokenizer.save(files)
        # Without a padding token, `adapt` would add one, and the base's embeddings lack its row.
        if tokenizer.vocabulary.pad is not None:
            exported_tokenizer.adapt(
                Path(files), weights.config, tokenizer.vocabulary, weights.generates_targets
            )
        packages = model_card.packages(weights, Path(files), adapter=True)
        card = model_card.write(
            weights, checkpoint, own_name, packages, base=base, measured=measured
        )
        huggingface.save_folder(Path(folder), content, tensors, Path(files), card, adapter=True)
    logger.info("wrote %s: %d tensors of %s, for %s", folder, len(tensors), checkpoint, name)
    if base.step is not None:
        logger.warning(
            "peft needs the base model as well; export it with: samestep export %s DIR", name
        )


def parameters_of_part(
    config: ModelConfig, parameters: dict[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """The parameters of a part: its own begin with `prefix`, others are shared with the model."""
    # Shared embeddings are stored once, under the outer model's names.
    with torch.device("meta"):
        names = [name for name, _ in config.build().named_parameters()]
    return {
        name: parameters[f"{prefix}{name}" if f"{prefix}{name}" in parameters else name]
        for name in names
    }


def _merged(
    weights: Weights,
    checkpoint: str,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and parameters of the model with its adapter merged into the weights."""
    config = weights.config
    peft = config.peft
    if peft is None:
        return config, dict(weights.tensors)
    if not peft.merges:
        # Adapters and prefixes add computations that no weight of the plain model has.
        kind = kind_name(peft)
        fix = "use the checkpoint with samestep"
        if adapters.can_export(config):
            fix = f"samestep export {checkpoint} DIR --adapter writes it for the peft library"
        raise ConfigError(
            f"{checkpoint} has an adapter of kind {kind}, which cannot be merged; {fix}"
        )
    # Merging needs the modules' kinds and shapes only, so no second copy of the weights.
    with torch.device("meta"):
        model = config.build()
    return config.without_peft(), peft.merge(model, weights.tensors)


def _token_ids(config: ModelConfig, vocabulary: Vocabulary) -> dict[str, int]:
    """The tokens that start, end and pad texts in `generate` of `transformers`."""
    is_pair = config.encoder_decoder
    if not (is_pair or config.causal):
        return {}
    ids = {"pad_token_id": vocabulary.pad, "eos_token_id": vocabulary.end}
    # T5's decoder starts with the padding token, as in its pre-training.
    if is_pair:
        start = config.start_token if config.sets_start else vocabulary.pad
        ids["decoder_start_token_id"] = start
    else:
        ids["bos_token_id"] = vocabulary.end if vocabulary.cls is None else vocabulary.cls
    return {name: token for name, token in ids.items() if token is not None}


def _check_padding(weights: Weights, vocabulary: Vocabulary) -> None:
    """Rejects a padding id that would shift positions: RoBERTa's are counted from it."""
    offset, pad = weights.config.position_offset, vocabulary.pad
    if offset and pad != offset - 1:
        raise ConfigError(
            f"the tokenizer {weights.tokenizer} has its padding token at id {pad}, and "
            f"{codec_of(weights.config).model_type} in transformers needs it at {offset - 1}; "
            "build the dataset with a tokenizer of algorithm bpe (or RoBERTa's own), or train "
            "model=bert, which works with any tokenizer"
        )

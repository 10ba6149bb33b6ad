"""Our GPT-1 and GPT-2 against `transformers`, with random small models, in both directions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, OpenAIGPTConfig, PreTrainedModel

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import predict, published
from tests.parity.pairs import assert_gradients_are_equal, saved
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import gpt2, openai_gpt
from trainer.models.inputs import Inputs
from trainer.models.transformer import Transformer
from trainer.training.weights.loading import load_weights

SHAPE = {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 32}
FAMILIES = {"gpt2": GPT2Config(**SHAPE, n_inner=80), "openai-gpt": OpenAIGPTConfig(**SHAPE)}


@pytest.fixture(params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[PreTrainedModel, gpt2.Config, Transformer]:
    """A random model of transformers, and ours imported from the folder it saved."""
    reference = AutoModelForCausalLM.from_config(
        FAMILIES[request.param], attn_implementation="eager"
    ).eval()
    saved(reference, tmp_path / "reference")
    weights = load_weights(tmp_path / "reference")
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    return reference, weights.config, model


def documents(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 300, (length,), generator=generator) for length in lengths]


def packed(*texts: Tensor) -> dict[str, Tensor]:
    """One row of several texts and three positions of padding."""
    lengths = [len(text) for text in texts]
    return {
        "tokens": torch.cat([*texts, torch.zeros(3, dtype=torch.int64)])[None],
        "segments": torch.tensor(
            [[n + 1 for n, length in enumerate(lengths) for _ in range(length)] + [0] * 3]
        ),
        "positions": torch.tensor([[p for length in lengths for p in range(length)] + [0] * 3]),
    }


def test_logits_loss_and_gradients_are_equal(pair):
    reference, config, model = pair
    tokens = torch.stack(documents(32, 32))
    theirs = reference(input_ids=tokens).logits
    ours = predict(model, tokens=tokens, positions=torch.arange(32).expand(2, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    losses = [
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        for logits in (theirs, ours)
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(config, reference, model, atol=1e-6)


def test_packed_documents_get_the_logits_they_get_alone(pair):
    reference, _, model = pair
    first, second = documents(9, 12)
    ours = predict(model, **packed(first, second))[0, :21]
    theirs = torch.cat(
        [reference(input_ids=document[None]).logits[0] for document in (first, second)]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_greedy_tokens_are_those_of_generate(pair):
    """Prompts of different lengths, padded at the left."""
    reference, _, model = pair
    prompts = documents(7, 3, 1)
    tokens = torch.stack([F.pad(prompt, (7 - len(prompt), 0)) for prompt in prompts])
    segments = torch.stack(
        [F.pad(torch.ones_like(prompt), (7 - len(prompt), 0)) for prompt in prompts]
    )
    logits, cache = model.start(Inputs(tokens, segments), capacity=20)
    ours = [logits.argmax(-1)]
    for _ in range(12):
        ours.append(model.step(ours[-1], cache).argmax(-1))
    for prompt, row in zip(prompts, torch.stack(ours, 1), strict=True):
        theirs = reference.generate(
            prompt[None],
            max_new_tokens=13,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=False,
        )
        assert theirs[0, len(prompt) :].tolist() == row.tolist()


def test_transformers_loads_what_we_export(pair, tmp_path: Path):
    _, config, model = pair
    with torch.no_grad():
        for parameter in model.parameters():  # weights that only we have
            parameter.mul_(1.1)
    save_folder(tmp_path / "ours", *published(config, model.state_dict()))
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.stack(documents(20))
    ours = predict(model, tokens=tokens, positions=torch.arange(20)[None])
    torch.testing.assert_close(ours, theirs.eval()(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    assert read_config(type(config), load_folder(tmp_path / "ours")[0]) == config


def test_older_checkpoints_are_understood(pair, tmp_path: Path):
    """No prefix, the causal mask among the weights, and the head's matrix twice."""
    _, tensors = load_folder(tmp_path / "reference")
    config = pair[1]
    old = {name.removeprefix("transformer."): tensors[name] for name in tensors}
    embedding = tensors[codec_of(config).table_names["embeddings.tokens.weight"]]
    old |= {
        "h.0.attn.bias": torch.ones(1),
        "h.1.attn.masked_bias": torch.ones(1),
        "lm_head.weight": embedding,
    }
    imported, expected = (
        codec_of(config).import_tensors(old),
        codec_of(config).import_tensors(tensors),
    )
    assert imported.keys() == expected.keys()
    assert all(torch.equal(imported[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer"):
        codec_of(config).import_tensors(old | {"lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match=r"c_attn\.weight is missing"):
        codec_of(config).import_tensors(
            {name: value for name, value in old.items() if "c_attn" not in name}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"embd_pdrop": 0.2}, r"embd_pdrop 0\.2, .* needs 0\.1"),
        ({"activation_function": "silu"}, "activation_function 'silu'"),
        ({"n_head": 7}, "not a multiple of heads 7"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        read_config(gpt2.Config, {**GPT2Config(**SHAPE).to_dict(), **change})


def test_an_absent_rate_of_the_embeddings_is_that_of_transformers():
    tree = GPT2Config(**SHAPE).to_dict()
    del tree["embd_pdrop"]
    assert read_config(gpt2.Config, tree).dropout == GPT2Config().embd_pdrop == 0.1
    with pytest.raises(ConfigError, match=r"embd_pdrop 0\.1, .* needs 0\.0"):
        read_config(gpt2.Config, {**tree, "resid_pdrop": 0.0})


def test_what_transformers_lacks_is_not_exported():
    with pytest.raises(ConfigError, match="ffn_width 80 cannot be exported"):
        codec_of(openai_gpt.Config(ffn_width=80)).to_huggingface()
    with pytest.raises(ConfigError, match="activation geglu cannot be exported"):
        codec_of(replace(gpt2.Config(), activation="geglu")).to_huggingface()

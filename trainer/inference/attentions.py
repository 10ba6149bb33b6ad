"""`samestep features --attentions`: attention of each layer and head, as an array and a page."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Tokens
from samestep.errors import ConfigError
from samestep.progress import Progress
from samestep.storage import write_text
from samestep.terminal import Console
from trainer.inference.attention_patterns import Patterns
from trainer.inference.features import check_new, chosen_layers, new_array, tokenize
from trainer.inference.hidden_states import TextEncoder, read_texts
from trainer.models.text_inputs import batches

logger = logging.getLogger(__name__)

_SHOWN_TEXTS, _SHOWN_TOKENS = 20, 64  # on the page, whose size grows with both


def run(
    checkpoint: str, file: str, field: str | None, output: Path, layers: str, batch_tokens: int
) -> None:
    """Writes the attention of the texts in a file; see `samestep features --help`.

    Raises:
        ConfigError: the model has no such layer, or its attention cannot be shown.
    """
    page = output.with_suffix(".html")
    check_new(output)
    if page.exists():
        raise ConfigError(f"{page} already exists; name another file with --output, or remove it")
    texts = read_texts(file, field, blank=True)
    encoder = TextEncoder(checkpoint)
    numbers = chosen_layers(encoder, layers, 1)
    if 0 in numbers:
        raise ConfigError("--layers has 0, the embeddings, which have no attention; use 1 or more")
    tokens = tokenize(encoder, texts)
    logger.info("reading %d texts on %s", len(tokens), encoder.device)
    shape, patterns = write(encoder, tokens, numbers, output, page, batch_tokens)
    logger.info("wrote %s: float32 %s", output, " x ".join(map(str, shape)))
    logger.info("wrote %s", page)
    console = Console(highlight=False)
    console.print("Attention of all tokens but special ones, in percent: mean (highest head)")
    console.print(patterns.table(numbers))


def write(
    encoder: TextEncoder,
    tokens: Sequence[Tokens],
    layers: Sequence[int],
    output: Path,
    page: Path,
    batch_tokens: int,
) -> tuple[tuple[int, ...], Patterns]:
    """Writes the probabilities of N texts, in their order, and the page.

    Element [i, l, h, q, k] is the probability with which token q of text i attends to its token k,
    in head h of the l-th of `layers`. Beyond the length of a text, it is 0.

    Returns:
        The shape of the array, [N, layers, H, S, S], where S is the length of the longest text;
        and where the heads attend.
    """
    lengths = np.array([len(text) for text in tokens])
    longest = int(lengths.max())
    shape = (len(tokens), len(layers), encoder.heads, longest, longest)
    special = (encoder.first, encoder.last)
    patterns = Patterns(len(layers), encoder.heads, *special, encoder.sees_all)
    with (
        new_array(output, shape, np.float32) as array,
        Progress("reading texts", len(tokens)) as progress,
    ):
        for numbers in batches(lengths, batch_tokens):
            found = encoder.attention([tokens[number] for number in numbers], layers).cpu().numpy()
            width = found.shape[-1]
            array[numbers, :, :, :width, :width] = found
            for number, attention in zip(numbers.tolist(), found, strict=True):
                own = lengths[number]
                patterns.add(attention[..., :own, :own], tokens[number])
            progress.advance(len(numbers))
        shown = [_text(encoder, text, array[i]) for i, text in enumerate(tokens[:_SHOWN_TEXTS])]
    title = f"Attention: {output.stem}"
    content = jinja2.Template(_PAGE, autoescape=True, keep_trailing_newline=True).render(
        title=title,
        data={"layers": list(layers), "texts": shown},
        left_out=len(tokens) - len(shown),
    )
    write_text(page, content)
    return shape, patterns


def _text(
    encoder: TextEncoder, tokens: Tokens, attention: npt.NDArray[np.float32]
) -> dict[str, object]:
    """The values that the page shows for a text: probabilities as bytes, 255 for 1."""
    count = min(len(tokens), _SHOWN_TOKENS)
    part = (attention[:, :, :count, :count] * 255).round().astype(np.uint8)
    names = [encoder.tokenizer.token(int(token)) for token in tokens[:count]]
    return {
        "tokens": names,
        "heads": encoder.heads,
        "data": base64.b64encode(part.tobytes()).decode(),
    }


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
label { margin-right: 1.5rem } select { font: inherit }
#map { margin-top: 1rem; overflow: auto }
table { border-collapse: collapse; font: 12px/1.2 ui-monospace, monospace }
td { width: 18px; min-width: 18px; height: 18px; padding: 0 }
tbody th { text-align: right; padding-right: 6px; font-weight: 400; white-space: nowrap }
thead th { height: 7rem; font-weight: 400; vertical-align: bottom; padding: 0 }
thead th span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap }
</style>
<h1>{{ title }}</h1>
<p>Each row is a token, each column a token that it attends to; darker is more.
{% if left_out %}{{ left_out }} more texts are in the array alone.{% endif %}</p>
<label>Text <select id="text"></select></label>
<label>Layer <select id="layer"></select></label>
<label>Head <select id="head"></select></label>
<div id="map"></div>
<script>
const data = {{ data | tojson }};
const pick = (id) => document.getElementById(id);
const fill = (id, names) => pick(id).replaceChildren(
  ...names.map((name, i) => new Option(name, i)));
const bytes = data.texts.map((text) => Uint8Array.from(atob(text.data), (c) => c.charCodeAt(0)));
fill("text", data.texts.map((text, i) => `${i + 1}: ${text.tokens.slice(0, 8).join(" ")}`));
fill("layer", data.layers);
fill("head", ["mean", ...Array.from({length: data.texts[0].heads}, (_, i) => i + 1)]);
function draw() {
  const at = +pick("text").value, layer = +pick("layer").value, head = +pick("head").value;
  const {tokens, heads} = data.texts[at], n = tokens.length;
  const value = (h, q, k) => bytes[at][((layer * heads + h) * n + q) * n + k] / 255;
  const mean = (q, k) => Array.from({length: heads}, (_, h) => value(h, q, k))
    .reduce((a, b) => a + b) / heads;
  const table = document.createElement("table"), top = table.createTHead().insertRow();
  top.append(document.createElement("th"));
  for (const token of tokens) {
    const column = document.createElement("th"), name = document.createElement("span");
    name.textContent = token; column.append(name); top.append(column);
  }
  const body = table.createTBody();
  tokens.forEach((token, q) => {
    const row = body.insertRow(), name = document.createElement("th");
    name.textContent = token; row.append(name);
    tokens.forEach((other, k) => {
      const p = head ? value(head - 1, q, k) : mean(q, k), square = row.insertCell();
      square.style.background = `rgb(37 99 235 / ${p})`;
      square.title = `${token} to ${other}: ${p.toFixed(2)}`;
    });
  });
  pick("map").replaceChildren(table);
}
for (const id of ["text", "layer", "head"]) pick(id).onchange = draw;
draw();
</script></html>
"""

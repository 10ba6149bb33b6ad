import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import DataError

REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100_000}


def write(folder: Path, **changes: object) -> Path:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "e": 1}, unk_token="[UNK]"))
    tree = {**json.loads(backend.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": REPLACE}, "the normalizer makes up to 100000 characters"),
        ({"decoder": REPLACE}, "the decoder makes up to 100000 characters"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{**REPLACE, "content": "ee"}] * 9}},
            "makes up to 512",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "makes up to 1000"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "fails"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 2**31}, "unk_token": "a"}},
            "the largest token id is 2147483648, and there are 2 tokens",
        ),
    ],
)
def test_what_takes_all_memory_or_crashes_is_refused(tmp_path: Path, changes, reason: str):
    with pytest.raises(DataError, match=reason):
        Tokenizer.load(write(tmp_path, **changes))


def test_failures_while_encoding_are_errors_of_the_tokenizer(tmp_path: Path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer.load(write(tmp_path, model=model))
    with pytest.raises(DataError, match="the tokenizer fails"):
        tokenizer.encode_batch(["b"])

import gzip
import json
from pathlib import Path

import pytest

from trainer.inference.hidden_states import read_texts


@pytest.mark.parametrize("name", ["texts.json", "texts.jsonl", "texts.jsonl.GZ"])
def test_texts_of_a_json_array_are_not_its_lines(tmp_path: Path, name: str) -> None:
    content = json.dumps([{"text": "one"}, {"text": "two"}], indent=1).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".GZ") else content)
    assert list(read_texts(str(tmp_path / name))) == ["one", "two"]

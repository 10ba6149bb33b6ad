"""docs/reference.md says what the code says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_reference_is_up_to_date():
    render = runpy.run_path(str(DOCS / "make_reference.py"))["render"]
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert page == render(), "write it again: python docs/make_reference.py"

"""docs/studies/costs.md adds up what the pages of the studies say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_costs_are_up_to_date():
    found = runpy.run_path(str(DOCS / "make_study_costs.py"))
    page = found["PAGE"].read_text(encoding="utf-8")
    assert page == found["render"](), "write it again: python docs/make_study_costs.py"
    assert page.count("](") > 10

"""HTML pages from the templates of this package; base.html has the look of all pages."""

from __future__ import annotations

from importlib.resources import files

import jinja2


def render(name: str, **values: object) -> str:
    """Returns a page.

    Args:
        name: of the template, as page.html.
        values: of the template's variables; texts are escaped.
    """
    folder = files(__package__ or "")
    loader = jinja2.FunctionLoader(lambda file: folder.joinpath(file).read_text(encoding="utf-8"))
    environment = jinja2.Environment(loader=loader, autoescape=True, keep_trailing_newline=True)
    return environment.get_template(name).render(**values)

"""The jinja2 environment of report pages: their templates, with everything escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2


@cache
def page_environment() -> jinja2.Environment:
    """Templates of this folder; what a template is given is escaped, what it lacks an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

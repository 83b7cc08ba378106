"""Search strategies by name: each proposes the candidates of a round."""

from __future__ import annotations

from offline_search.strategies import openevolve, sampling  # noqa: F401  they register theirs
from offline_search.strategies.language_model import Strategy

STRATEGIES = Strategy.by_name

"""Replies of a proposer for tests: valid proposals and invalid text."""

from __future__ import annotations

import json
from random import Random

from offline_search.search_space import RandomSource, sample_proposal
from offline_search.settings import Settings

BUDGET = 8


def valid_replies(count: int) -> list[str]:
    """Random valid proposals."""
    settings = Settings(budgets=(BUDGET,))
    sources = (RandomSource(Random(seed)) for seed in range(count))
    return [json.dumps(sample_proposal(source, settings)) for source in sources]


HOSTILE = {
    "empty": "",
    "blank": " \n\t ",
    "refusal": "I'm sorry, but I cannot help with that.",
    "prose": "First, let us think about relevance. " * 40,
    "cut": valid_replies(1)[0][:-20],
    "a list": "[1, 2, 3]",
    "a number": "42",
    "long": "x" * 100_000,
    "long object": '{"scoring": "' + "x" * 100_000 + '"}',
    "deep": '{"scoring": ' + "[" * 5000 + "]" * 5000 + "}",
    "nan": '{"scoring": NaN, "constraints": Infinity, "reassembly": -Infinity}',
    "huge number": '{"scoring": ' + "9" * 5000 + "}",
    "twice": '{"scoring": 1, "scoring": 2, "constraints": 3, "reassembly": 4}',
    "surrogate": '{"scoring": "\\ud800", "constraints": 3, "reassembly": 4}',
    "nul": '{"scoring": "\\u0000"}',
    "other keys": '{"__class__": "os.system", "state": "rm -rf /"}',
    "script": '{"scoring": "<script>alert(1)</script>"}',
    "unknown atom": valid_replies(1)[0].replace("_fusion", "_confusion"),
    "out of range": valid_replies(1)[0].replace('"weight": ', '"weight": 1e9'),
}
"""Invalid replies by name."""

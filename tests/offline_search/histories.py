"""Histories of a few trials on sixteen questions, from which summaries are made."""

from __future__ import annotations

import numpy as np

from offline_search.history import History, Trial
from offline_search.settings import Settings
from tests.offline_search.synthetic import trial
from vllm_autoprune.evaluation.questions import Example

SETTINGS = Settings(budgets=(8,), base_policy="visionzip", proposer="scripted")
EXAMPLES = tuple(
    Example(
        image=f"{number}.png", question=f"Q{number}?", answer="a", category=category
    )
    for number, category in enumerate(["text"] * 4 + ["relation"] * 12)
)
BASE = np.full(16, -3.0)
"""Values of the base policy."""
NOISE = np.tile([-0.2, 0.2], 8)


def history_of(*trials: Trial) -> History:
    """A history in which the base policy has the values ``BASE``."""
    return History(trial("0.0", BASE), list(trials), EXAMPLES)

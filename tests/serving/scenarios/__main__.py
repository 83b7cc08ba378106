"""``python -m tests.serving.scenarios NAME``: run one scenario, print its report.

Knows nothing about any of them.
"""

from __future__ import annotations

import json
import sys

from tests.serving.scenarios import (  # noqa: F401  # each enters its scenarios
    MARK,
    SCENARIOS,
    bases,
    bounds,
    brought,
    caches,
    exact,
    hostile,
    load,
    policies,
    ranks,
)

if __name__ == "__main__":
    print(MARK + json.dumps(SCENARIOS[sys.argv[1]]()))

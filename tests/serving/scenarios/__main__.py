"""``python -m tests.serving.scenarios NAME``: run one scenario, print its report.

With ``--serve``, run the scenarios whose names come on standard input, one a line, until it ends.
A name such as ``selftest:llava`` is the selftest's report of that backbone.
"""

from __future__ import annotations

import json
import sys
import traceback
from unittest.mock import patch

from tests.serving.scenarios import (  # noqa: F401  # each registers its scenarios
    FAILURE,
    MARK,
    SCENARIOS,
    Report,
    adapters,
    bases,
    bounds,
    caches,
    connectors,
    detail_budgets,
    encoder_graphs,
    exact,
    feature_cache,
    field_inputs,
    hostile,
    load,
    modes,
    pipeline,
    policies,
    ranks,
    recall,
    reloaded_weights,
    rendering,
    request_states,
    resized_images,
    speculation,
    split,
)

SELFTEST = "selftest:"


def report(name: str) -> Report:
    """Run one scenario and leave no engine and no patch behind."""
    from tests.serving.engine import release_all

    try:
        if name.startswith(SELFTEST):
            from vllm_autoprune.selftest.serve import serve

            return json.loads(serve(name.removeprefix(SELFTEST)).model_dump_json())
        return SCENARIOS[name]()
    finally:
        patch.stopall()
        release_all()


def main() -> None:
    """Run what the command line or standard input names."""
    if sys.argv[1] != "--serve":
        print(MARK + json.dumps(report(sys.argv[1])))
        return
    for line in sys.stdin:
        try:
            print(MARK + json.dumps(report(line.strip())), flush=True)
        except Exception:
            print(FAILURE + json.dumps(traceback.format_exc()), flush=True)


if __name__ == "__main__":
    main()

"""``python -m vllm_autoprune.selftest NAME``: serve one tiny model, print its report.

Knows nothing about what the report should say.
"""

from __future__ import annotations

import sys

from vllm_autoprune.selftest.run import MARK
from vllm_autoprune.selftest.serve import serve

if __name__ == "__main__":
    print(MARK + serve(sys.argv[1]).model_dump_json())

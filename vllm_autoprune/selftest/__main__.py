"""``python -m vllm_autoprune.selftest NAME``: serve one tiny model and print its report."""

from __future__ import annotations

import sys

from vllm_autoprune.selftest.run import REPORT_PREFIX
from vllm_autoprune.selftest.serve import serve

if __name__ == "__main__":
    print(REPORT_PREFIX + serve(sys.argv[1]).model_dump_json())

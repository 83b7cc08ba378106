"""``python -m vllm_autoprune`` is the command ``vllm-autoprune``."""

import sys

from vllm_autoprune_command import main

if __name__ == "__main__":
    sys.exit(main())

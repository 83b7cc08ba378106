#!/usr/bin/env bash
# LLaVA-1.5, an eighth of an image's visual tokens, the same for every question. Further flags of vLLM are passed on.
set -euo pipefail
exec vllm serve llava-hf/llava-1.5-7b-hf \
    --autoprune-state pivoted_qr-searched-free \
    --autoprune-budget 1/8 \
    --autoprune-requests budget \
    "$@"

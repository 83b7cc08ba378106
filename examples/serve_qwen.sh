#!/usr/bin/env bash
# Qwen2.5-VL, half of an image's visual tokens, the same for every question. Further flags are passed on.
set -euo pipefail
exec vllm serve Qwen/Qwen2.5-VL-7B-Instruct \
    --autoprune-state pivoted_qr-searched-free \
    --autoprune-budget 1/2 \
    --autoprune-requests budget \
    "$@"

"""Size of KV blocks, which the API server aligns the shared part of an image to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import CacheConfig

from vllm_autoprune.serving.compat import attach, get_attachment

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ATTRIBUTE = "autoprune_kv_cache"


def attach_kv_blocks(vllm_config: VllmConfig) -> None:
    """Put the cache config itself on the model config: vLLM sets its block size later on."""
    attach(vllm_config.model_config, ATTRIBUTE, vllm_config.cache_config)


def kv_block_size(model_config: ModelConfig) -> int | None:
    """Tokens of a KV block, None without a prefix cache."""
    config = get_attachment(model_config, ATTRIBUTE)
    assert config is None or isinstance(config, CacheConfig)
    if config is None or not config.enable_prefix_caching:
        return None
    return config.block_size

"""Metrics folder and KV-cache size of a token, sent to every process on the model config.

Workers write files that the API servers' ``/metrics`` reads, in prometheus_client's own format
for several processes. With several API servers vLLM has set that up, and any file in its folder
is exported; for a single one a folder of the plugin's is added. Workers on another machine than
the API server write to a folder that is never read.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_autoprune.serving.compat import attach, get_attachment

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ATTRIBUTE = "autoprune_metrics_setup"

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable: where there are several API servers, vLLM has set it."""


@dataclass(frozen=True, slots=True)
class MetricsSetup:
    """Folder for the metrics of workers, and bytes of one token in the KV cache.

    ``kv_bytes`` are keys and values of all layers and ranks, as for full attention in every layer.
    """

    folder: str
    kv_bytes: int


def attach_metrics_setup(vllm_config: VllmConfig) -> None:
    """Create the setup and put it on the model config; before workers start."""
    setup = MetricsSetup(_shared_folder(), _kv_bytes(vllm_config))
    attach(vllm_config.model_config, ATTRIBUTE, setup)


def find_metrics_setup(model_config: ModelConfig) -> MetricsSetup | None:
    """The setup on a model config; None where the model is served without a state."""
    setup = get_attachment(model_config, ATTRIBUTE)
    assert setup is None or isinstance(setup, MetricsSetup)
    return setup


@cache
def _shared_folder() -> str:
    configured = os.environ.get(MULTIPROCESS)
    if configured:
        return configured
    folder = tempfile.TemporaryDirectory(prefix="vllm-autoprune-metrics-")
    _FOLDERS.append(folder)
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    return folder.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, which removes them."""


def _kv_bytes(vllm_config: VllmConfig) -> int:
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    heads = model.get_total_num_kv_heads() * model.get_head_size()
    return int(2 * model.get_total_num_hidden_layers() * heads * dtype.itemsize)

"""Compatibility with supported vLLM releases that are not installed: every hook, as called."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from packaging.version import Version

from tests.serving.versions import look_up_hooks, read_records
from vllm_autoprune.serving.compat import BELOW, LOWEST, vllm_version

RECORDS = read_records()

_MODELS = "vllm.model_executor.models"
_IMAGES = ("_parse_and_validate_image_input", "_process_image_input")

LOOKED_AT: Mapping[str, str] = {
    "vllm.engine.arg_utils.EngineArgs.add_cli_args": "flags of vLLM's own came; ours are added "
    "to what it returns",
    "vllm.engine.arg_utils.EngineArgs.create_model_config": "one more field is set; ours is added "
    "to what it returns",
    "vllm.renderers.hf.HfRenderer.render_messages": "prompt embeddings that the chat template "
    "leaves out are dropped; messages and the prompt that is returned are what they were",
    "vllm.renderers.hf.HfRenderer.render_messages_async": "as render_messages",
    "vllm.renderers.online_renderer.OnlineRenderer.preprocess_chat": "reasoning effort and the "
    "token ids of the prompt are handed on; we read the request and change nothing",
    "vllm.entrypoints.anthropic.serving.AnthropicServingMessages": "no prompt of its own is "
    "rendered within a client's request; the wrapper of that method is left out",
    "vllm.model_executor.models.interfaces.SupportsMultiModal.get_language_model": "a child is "
    "the language model by its methods, `embed_input_ids` among them, no longer by a protocol; "
    "no tower here has that one",
    "vllm.model_executor.models.gemma4_mm.Gemma4ForConditionalGeneration._process_image_input": ""
    "padding under LoRA of the tower moved to a method; such LoRA is refused",
    **dict.fromkeys(
        (
            *(
                f"{_MODELS}.mistral3.Mistral3ForConditionalGeneration.{name}"
                for name in _IMAGES
            ),
            *(
                f"{_MODELS}.lightonocr.LightOnOCRForConditionalGeneration.{name}"
                for name in _IMAGES
            ),
            f"{_MODELS}.qwen2_5_omni_thinker.Qwen2_5OmniThinkerForConditionalGeneration.{_IMAGES[1]}",
        ),
        "images may come as embeddings, which are refused; what is done with pixels is the same",
    ),
    f"{_MODELS}.paddleocr_vl.PaddleOCRVLForConditionalGeneration._process_image_input": "patches "
    "of all images come in one tensor and are encoded together; ocr.py asks the version",
    f"{_MODELS}.paddleocr_vl.Projector.forward": "norm and layers are called once for all images; "
    "we encode one at a time",
    "vllm.v1.core.encoder_cache_manager.EncoderCacheManager.allocate": "what a request holds is "
    "noted in a method of its own; items and room are counted alike",
    "vllm.v1.kv_cache_interface.KVQuantMode": "more forms that are packed, of whose bytes we say "
    "nothing",
    "vllm.v1.kv_cache_interface.get_kv_quant_mode": "as KVQuantMode",
    "vllm.v1.worker.gpu_worker.Worker.update_weights": "quantized heads of a draft model are "
    "restored besides; features are cleared after it all the same",
    "vllm.v1.worker.gpu_worker.Worker.finish_weight_update": "as update_weights",
}
"""Hooks whose code differs between the installed release and one that is kept, and why each will
do. A name that is not here has the same code in both, or the test below fails."""


def test_every_supported_minor_version_is_recorded() -> None:
    seen = {vllm_version(), *map(Version, RECORDS)}
    assert all(LOWEST <= version < BELOW for version in seen)
    minor_versions = {
        (LOWEST.major, minor) for minor in range(LOWEST.minor, BELOW.minor)
    }
    assert {(version.major, version.minor) for version in seen} == minor_versions


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("version", RECORDS)
def test_hooks_of_a_release_have_the_installed_signatures(version: str) -> None:
    """Same names, kinds, parameters and defaults; differing code needs a recorded reason."""
    here = look_up_hooks()
    there = RECORDS[version]
    again = "PYTHONPATH=.next python -m tests.serving.versions"
    assert there.keys() == here.keys(), f"hooks were added or removed: run `{again}`"
    differing = {name for name in here if here[name]["code"] != there[name]["code"]}
    assert differing <= LOOKED_AT.keys()
    assert {name: {**there[name], "code": ""} for name in here} == {
        name: {**symbol, "code": ""} for name, symbol in here.items()
    }

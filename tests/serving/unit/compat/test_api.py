from __future__ import annotations

import pytest

from vllm_autoprune.serving.compat import api


@pytest.mark.compat
def test_only_the_plugin_s_entry_passes_vllm_s_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.pooling.base import serving as pooling
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import online_renderer

    name = "validate_request_mm_kwargs"
    for module in (pooling, online_renderer):
        monkeypatch.setattr(module, name, getattr(module, name))
    api.allow_mm_kwarg("ours")
    wrapped = getattr(online_renderer, name)
    api.allow_mm_kwarg("ours")
    assert getattr(online_renderer, name) is wrapped

    def validate(kwargs: object, media: object = None, trusted: bool = False) -> None:
        wrapped(mm_processor_kwargs=kwargs, media_io_kwargs=media, trust_request_mm_kwargs=trusted)

    pooling.validate_request_mm_kwargs(
        mm_processor_kwargs={"ours": 1}, media_io_kwargs=None, trust_request_mm_kwargs=False
    )
    validate(None)
    validate({"ours": {"budget": 8}})
    validate({"ours": 1, "size": 2}, trusted=True)
    for kwargs, media in (({"ours": 1, "size": 2}, None), ({"size": 2}, None), (None, {"i": {}})):
        with pytest.raises(VLLMValidationError, match="trust-request-mm-kwargs"):
            validate(kwargs, media)

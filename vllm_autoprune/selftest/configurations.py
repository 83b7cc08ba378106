"""Stand-ins for configurations that checkpoints bring as Python code, with the same fields."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class Ovis2_5Config(PreTrainedConfig):  # type: ignore[misc]  # untyped here
    """Configuration of Ovis 2.5: a language model that transformers knows, and a SigLIP 2 tower."""

    model_type = "ovis2_5"

    def __init__(
        self,
        llm_config: dict[str, Any] | PreTrainedConfig | None = None,
        vit_config: dict[str, Any] | PreTrainedConfig | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        if isinstance(llm_config, dict):
            llm_config = AutoConfig.for_model(**llm_config)
        if isinstance(vit_config, dict):
            vit_config = PreTrainedConfig.from_dict(vit_config)
        self.llm_config = llm_config
        self.vit_config = vit_config


class Ovis2_6MoeConfig(Ovis2_5Config):
    """Configuration of Ovis 2.6 with experts."""

    model_type = "ovis2_6_moe"

    def __init__(self, **fields: Any) -> None:  # or else transformers generates one
        super().__init__(**fields)

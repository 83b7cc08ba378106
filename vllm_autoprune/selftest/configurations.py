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


class Step3p7Config(PreTrainedConfig):  # type: ignore[misc]  # untyped here
    """Configuration of Step-3.7: vLLM's of the language model, and a Perception Encoder."""

    model_type = "step3p7"

    def __init__(
        self,
        text_config: dict[str, Any] | PreTrainedConfig | None = None,
        vision_config: dict[str, Any] | PreTrainedConfig | None = None,
        **fields: Any,
    ) -> None:
        from vllm.transformers_utils.configs.step3p5 import Step3p5Config

        if isinstance(text_config, dict):
            text_config.pop("rope_parameters", None)  # of transformers, by layer type
            text_config = Step3p5Config(**text_config)
        if isinstance(vision_config, dict):
            vision_config = PreTrainedConfig.from_dict(vision_config)
        self.text_config = text_config
        self.vision_config = vision_config
        super().__init__(**fields)

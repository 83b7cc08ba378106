"""The renderer: finds each image's instruction in the chat messages and sends it along.

Knows nothing about what is done with it.
"""

from __future__ import annotations

from typing import Any

from vllm.renderers.hf import HfRenderer

from vllm_autoprune.serving.config import served_state
from vllm_autoprune.serving.instruction import instructions_of
from vllm_autoprune.serving.request import REQUEST_KEY

_STASH = "_autoprune_instructions"


class AutopruneHfRenderer(HfRenderer):
    """HfRenderer that hands the instruction of every image to the multi-modal processor.

    The messages are seen here, the processor's arguments are built later
    (``_apply_prompt_extras`` overwrites them), so the instruction waits in the prompt between.
    """

    def render_messages(self, messages: Any, params: Any) -> Any:
        """As stock, with the instructions noted (``BaseRenderer.render_messages``)."""
        conversation, prompt = super().render_messages(messages, params)
        return conversation, self._noted(messages, prompt)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        """As stock, with the instructions noted."""
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, self._noted(messages, prompt)

    def _noted(self, messages: Any, prompt: Any) -> Any:
        if served_state(self.model_config) is not None and prompt.get("multi_modal_data"):
            prompt[_STASH] = instructions_of(messages)
        return prompt

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        return super()._process_tokens(_handed_over(prompt), **kwargs)

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        return await super()._process_tokens_async(_handed_over(prompt), **kwargs)


def _handed_over(prompt: Any) -> Any:
    instructions = prompt.pop(_STASH, None)
    if instructions is None:
        return prompt
    given = dict(prompt.get("mm_processor_kwargs") or {})
    asked = given.get(REQUEST_KEY, {})
    if isinstance(asked, dict):  # anything else is refused by the processor, with a reason
        given[REQUEST_KEY] = {**asked, "instructions": instructions}
    prompt["mm_processor_kwargs"] = given
    return prompt

"""Chat renderer that passes each image's instruction and detail, and the salt, to the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm.renderers.hf import HfRenderer

from vllm_autoprune.serving.api.instruction import extract_details, extract_instructions
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT, CacheSalt
from vllm_autoprune.serving.compat import allow_mm_kwarg
from vllm_autoprune.serving.shared.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import MultiModalInput, TokensInput, TokensPrompt
    from vllm.renderers.chat_utils import ChatCompletionMessageParam, ConversationMessage
    from vllm.renderers.inputs import DictPrompt
    from vllm.renderers.params import ChatParams
    from vllm.tokenizers.hf import HfTokenizer

_MESSAGE_FIELDS = "_autoprune_message_fields"
"""Key of a prompt under which the fields extracted from its messages wait."""


class AutopruneHfRenderer(HfRenderer):
    """HfRenderer that hands instruction and detail of every image to the multi-modal processor.

    The messages are seen here, the processor's arguments are built later
    (``_apply_prompt_extras`` overwrites them), so both wait in the prompt between.
    """

    def __init__(self, config: VllmConfig, tokenizer: HfTokenizer | None) -> None:
        super().__init__(config, tokenizer)
        served = served_state(config.model_config)
        if served is not None and served.rules.explicit:
            allow_mm_kwarg(REQUEST_FIELD)

    def render_messages(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """As stock, and store the fields in the prompt (``BaseRenderer.render_messages``)."""
        conversation, prompt = super().render_messages(messages, params)
        return conversation, self._store_fields(messages, prompt)

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """As stock, and store the fields in the prompt."""
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, self._store_fields(messages, prompt)

    def _store_fields(
        self, messages: list[ChatCompletionMessageParam], prompt: DictPrompt
    ) -> DictPrompt:
        if served_state(self.model_config) is not None and prompt.get("multi_modal_data"):
            prompt[_MESSAGE_FIELDS] = {
                "instructions": extract_instructions(messages),
                "details": extract_details(messages),
            }
        return prompt

    def _process_tokens(
        self, prompt: TokensPrompt, **kwargs: bool
    ) -> TokensInput | MultiModalInput:
        return super()._process_tokens(self._prepare(prompt), **kwargs)

    async def _process_tokens_async(
        self, prompt: TokensPrompt, **kwargs: bool
    ) -> TokensInput | MultiModalInput:
        return await super()._process_tokens_async(self._prepare(prompt), **kwargs)

    def _prepare(self, prompt: TokensPrompt) -> TokensPrompt:
        if served_state(self.model_config) is None or not prompt.get("multi_modal_data"):
            return prompt
        return _add_salt(_pass_fields(prompt))


def _pass_fields(prompt: TokensPrompt) -> TokensPrompt:
    """Add the fields of the messages to the pruning entry, in place of those a client wrote."""
    fields = cast("dict[str, dict[str, object] | None]", prompt).pop(_MESSAGE_FIELDS, None)
    if fields is None:
        return prompt
    kwargs = dict(prompt.get("mm_processor_kwargs") or {})
    entry = kwargs.get(REQUEST_FIELD)
    entry = {} if entry is None else entry
    if isinstance(entry, dict):  # anything else is refused by the processor, with a reason
        kwargs[REQUEST_FIELD] = {**entry, **fields}
    prompt["mm_processor_kwargs"] = kwargs
    return prompt


def _add_salt(prompt: TokensPrompt) -> TokensPrompt:
    """Pass the ``cache_salt`` to the processor, whose caches hold what several tenants sent."""
    salt = prompt.get("cache_salt")
    if salt:
        kwargs = dict(prompt.get("mm_processor_kwargs") or {})
        prompt["mm_processor_kwargs"] = {**kwargs, SALT: CacheSalt(salt)}
    return prompt

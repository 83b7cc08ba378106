"""Chat renderer that passes each image's instruction and detail, and the salt, to the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.engine_requests import RenderedHashes
from vllm_autoprune.serving.api.instruction import extract_fields, mark_recall_turns
from vllm_autoprune.serving.api.processor import PrunedProcessor
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.request import (
    DETAIL_FIX,
    SALT,
    CacheSalt,
    RecallTurn,
)
from vllm_autoprune.serving.api.request_checks import OFFLINE_FIX, refuse_misplaced
from vllm_autoprune.serving.compat import allow_mm_kwarg, depends_on
from vllm_autoprune.serving.plan import ENTRY, KWARGS, REQUEST_FIELD
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import MultiModalInput, TokensInput, TokensPrompt
    from vllm.renderers.chat_utils import (
        ChatCompletionMessageParam,
        ConversationMessage,
    )
    from vllm.renderers.inputs import DictPrompt
    from vllm.renderers.params import ChatParams
    from vllm.tokenizers.hf import HfTokenizer

_MESSAGE_FIELDS = "_autoprune_message_fields"
"""Key in a prompt that holds the fields extracted from its messages until they are used."""


@depends_on(
    "vllm.renderers.hf:HfRenderer",
    "render_messages",
    "render_messages_async",
    "_process_tokens",
    "_process_tokens_async",
    "_apply_prompt_embeds_to_engine_input",
)
class AutopruneHfRenderer(HfRenderer):
    """HfRenderer that passes instruction and detail of every image to the multi-modal processor.

    The messages are available here, but the processor's arguments are built later
    (``_apply_prompt_extras`` overwrites them). In between, the fields are stored in the prompt.
    """

    def __init__(self, config: VllmConfig, tokenizer: HfTokenizer | None) -> None:
        super().__init__(config, tokenizer)
        self._served = served_state(config.model_config)
        if self._served is not None and self._served.rules.explicit:
            allow_mm_kwarg(REQUEST_FIELD)

    def render_messages(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """As stock, and store the fields in the prompt (``BaseRenderer.render_messages``).

        Raises RequestError for a pruning field in the wrong place; online requests were checked
        before.
        """
        if self._served is not None:
            template = params.chat_template_kwargs
            fields = {"messages": messages, "chat_template_kwargs": template}
            refuse_misplaced(fields, {}, OFFLINE_FIX)
        marked, turns = self._mark_recall_turns(messages, params)
        conversation, prompt = super().render_messages(marked, params)
        return conversation, self._store_fields(messages, prompt, turns)

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """As stock, and store the fields in the prompt."""
        marked, turns = self._mark_recall_turns(messages, params)
        conversation, prompt = await super().render_messages_async(marked, params)
        return conversation, self._store_fields(messages, prompt, turns)

    def _mark_recall_turns(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ChatCompletionMessageParam], list[RecallTurn]]:
        """Mark the later turns that recall tokens of images, if the request asks for recall."""
        if self._served is None or not isinstance(self.mm_processor, PrunedProcessor):
            return messages, []
        token = self.mm_processor.recall_token
        entry = (params.mm_processor_kwargs or {}).get(REQUEST_FIELD)
        # Fields are not validated yet: the processor refuses an entry that is not an object.
        fields = entry if isinstance(entry, Mapping) else {}
        recall = (
            self._served.rules.recall
            if fields.get("recall") is None
            else fields["recall"]
        )
        recalls = (
            isinstance(recall, int) and recall and fields.get("enabled") is not False
        )
        if token is None or not recalls:
            return messages, []
        space = self._space_after_image(token, params.chat_template)
        return mark_recall_turns(messages, token, space)

    def _space_after_image(self, token: str, chat_template: str | None) -> str:
        """White space that the chat template writes between an image and the text after it."""
        mark = "\u2402"
        parts = [{"type": "image"}, {"type": "text", "text": mark}]
        try:
            text = safe_apply_chat_template(
                self.model_config,
                self.get_tokenizer(),
                [{"role": "user", "content": parts}],
                chat_template=chat_template,
                tokenize=False,
            )
        except (ValueError, VLLMValidationError):
            text = ""
        _, has_token, between = str(text).partition(mark)[0].rpartition(token)
        # For a template without content parts, vLLM puts the image token on a line of its own.
        space = between if has_token else "\n"
        return space if not space.strip() else ""

    def _store_fields(
        self,
        messages: list[ChatCompletionMessageParam],
        prompt: DictPrompt,
        turns: list[RecallTurn],
    ) -> DictPrompt:
        if self._served is not None and prompt.get("multi_modal_data"):
            recall_turns = [turn.model_dump() for turn in turns]
            prompt[_MESSAGE_FIELDS] = {
                **extract_fields(messages),
                "recall_turns": recall_turns,
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

    def _apply_prompt_embeds_to_engine_input(
        self, engine_input: MultiModalInput, *args: object, **named: object
    ) -> None:
        """As stock, but keep our hashes, which stock replaces by a plain dictionary."""
        hashes = engine_input["mm_hashes"]
        super()._apply_prompt_embeds_to_engine_input(engine_input, *args, **named)
        if isinstance(hashes, RenderedHashes):
            hashes.update(engine_input["mm_hashes"])
            engine_input["mm_hashes"] = hashes

    def _prepare(self, prompt: TokensPrompt) -> TokensPrompt:
        if self._served is None:
            return prompt
        fields = {
            key: value for key, value in prompt.items() if key != "prompt_token_ids"
        }
        with refusing_requests():
            refuse_misplaced(fields, prompt.get(KWARGS) or {}, OFFLINE_FIX)
            return _pass_fields(prompt) if prompt.get("multi_modal_data") else prompt


def _pass_fields(prompt: Any) -> Any:
    """Pass the fields of the messages and the ``cache_salt`` to the processor, as its arguments.

    The fields go into the pruning entry, where a client may not write them. The salt is needed
    because the processor's caches hold inputs of several tenants.
    """
    fields = prompt.pop(_MESSAGE_FIELDS, None)
    salt = prompt.get("cache_salt")
    kwargs = dict(prompt.get(KWARGS) or {})
    entry = kwargs.get(REQUEST_FIELD)
    entry = {} if entry is None else entry
    # The processor refuses an entry that is not an object, with a reason.
    if fields is not None and isinstance(entry, dict):
        for name in (name for name in fields if entry.get(name) is not None):
            fix = f"leave it out; {DETAIL_FIX}" if name == "details" else "leave it out"
            raise RequestError.of(
                f"{ENTRY}/{name}", "is read of the messages of a chat", fix
            )
        kwargs[REQUEST_FIELD] = {**entry, **fields}
    if salt:
        kwargs[SALT] = CacheSalt(salt)
    if kwargs:
        prompt[KWARGS] = kwargs
    return prompt

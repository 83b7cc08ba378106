"""What messages say about their images: instruction, detail, turns; and an instruction's ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from vllm_autoprune.serving.api.request import RecallTurn
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS, Ids
from vllm_autoprune.serving.request_rules import DETAIL_LEVELS
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseProcessingInfo

# Parts of OpenAI-style messages. A client may send anything as a message or a part.

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "image", "image_pil", "input_image")
_VIDEO_PARTS = ("video_url", "video")
_WORD_PARTS = ("refusal", "thinking", "tool_reference")
"""Kinds of parts that contain text but no instruction."""

_BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a line that is new with every request; vLLM removes it from system prompts too."""


def _message_parts(message: object) -> Sequence[Any]:
    """The parts of a message; a message that is a plain text is a single part."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [content]
    return content if isinstance(content, Sequence) else []


def _part_text(part: object) -> str | None:
    """The text of a part; None for a part of another kind."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _shows(part: object, kinds: Collection[str]) -> bool:
    """Whether a part is of one of these kinds."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in kinds if kind is not None else any(key in part for key in kinds)


_shows_image = partial(_shows, kinds=_IMAGE_PARTS)


def _has_role(message: object, role: str) -> bool:
    return isinstance(message, Mapping) and message.get("role") == role


# Instruction and detail of each image, from messages, or from the prompt if there are none.
#
# The instruction is the text of the user turn that holds the image. For a turn without text, and
# for a tool's result, whose text asks nothing, it is the text before that turn.

_LAST_IDS = 4 * RELEVANCE_IDS
"""Last token ids of a prompt that are decoded: far more than are used of the text."""

_CONTEXT = 2 * LANGUAGE_IDS
"""Characters to read of the task and of the last text, so that no limit of a reader cuts one off.

A token of prose has about four characters."""

_QUESTION = 1024
"""Last characters of a question that are searched for before its image."""


def extract_fields(messages: Sequence[object]) -> dict[str, list[Any]]:
    """Fields of the pruning entry that have one value per image, in the conversation's order.

    ``instructions``: the text of the image's turn. An image without it gets the first text of a
    user, which is the task, and the last text before the image. ``turns``: the index of the image's
    message, or None if the image has no text of its own. ``details``: the level, or None for
    ``auto`` and for images without one. It is read from ``image_url``, or from the part that holds
    it, as in the Responses API. ``video_instructions``: as ``instructions``, one per video.

    Later turns never change these values, so what an image keeps, and its prefix cache, survive a
    conversation. Other turns and the chat template are not part of an instruction.
    """
    names = ("instructions", "details", "turns", "video_instructions")
    fields: dict[str, list[Any]] = {name: [] for name in names}
    task = last = ""
    for i, message in enumerate(messages):
        parts = _message_parts(message)
        texts = [text for part in parts if (text := _part_text(part)) is not None]
        if _has_role(message, "system"):
            texts = [
                t.partition("\n")[2] if t.startswith(_BILLING_HEADER) else t
                for t in texts
            ]
        text = "\n".join(texts).strip()
        last = text or last
        asks = text != "" and not _has_role(message, "tool")
        instruction = text if asks else last
        if not asks and task not in ("", last):
            instruction = (
                f"{truncate_text(task, _CONTEXT)}\n{truncate_text(last, _CONTEXT)}"
            )
        fields["video_instructions"] += [
            instruction for p in parts if _shows(p, _VIDEO_PARTS)
        ]
        for part in filter(_shows_image, parts):
            image = part.get("image_url")
            level = (image if isinstance(image, Mapping) else part).get("detail")
            fields["instructions"].append(instruction)
            fields["details"].append(level if level in DETAIL_LEVELS else None)
            fields["turns"].append(i if asks else None)
        if _has_role(message, "user"):
            task = task or text
    return fields


def extract_prompt_instruction(
    ids: Sequence[int],
    image_token: int,
    decode: Callable[[Sequence[int]], str],
    suffix: str,
    image_text: str = "",
) -> str:
    """Extract the text after the last image, for a prompt that came without messages.

    ``suffix`` is what the chat template appends for generation; it is removed if the prompt ends in
    it. ``image_text`` marks an image in the prompt of a model without an image token. Later turns
    cannot be told apart here, so they are part of the instruction.
    """
    last = max((i for i, token in enumerate(ids) if token == image_token), default=-1)
    text = decode(ids[max(last + 1, len(ids) - _LAST_IDS) :])
    text = text.rpartition(image_text)[2].strip() if image_text else text.strip()
    ending = suffix.strip()
    return text.removesuffix(ending).strip() if ending else text


def find_question_turns(
    texts_before: Sequence[str],
    texts: Sequence[str],
    turns: Sequence[int | None] | None,
) -> list[int | None]:
    """Turn of each image, or None if its question stands directly before the image.

    A turn is named by the index of its first image, whose images one question follows.
    ``texts_before`` holds the prompt text between each image and the image before it. Without
    ``turns``, images with the same question belong to one turn unless the question stands between
    them. Only text before an image is read, so appending turns changes nothing.
    """
    question_turns: list[int | None] = []
    for i, between in enumerate(texts_before):
        # Templates may join the parts of a message, and strip them, in any way.
        question = "".join(texts[i][-_QUESTION:].split())
        ahead = "".join(between.split())
        if turns is not None:
            continues = i > 0 and turns[i] == turns[i - 1]
        else:
            continues = i > 0 and texts[i] == texts[i - 1] and question not in ahead
        if ahead.endswith(question) or (turns is not None and turns[i] is None):
            question_turns.append(None)
        else:
            question_turns.append(question_turns[-1] if continues else i)
    return question_turns


def mark_recall_turns(
    messages: Sequence[Any], token: str, space: str
) -> tuple[list[Any], list[RecallTurn]]:
    """The messages with an image token before every turn that recalls, and these turns.

    No turn recalls if the text of the conversation contains an image token, or if the conversation
    shows anything other than images.
    """
    for part in (part for message in messages for part in _message_parts(message)):
        text = _part_text(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if text is not None or kind in _WORD_PARTS:
            allows_recall = token not in (str(part) if text is None else text)
        else:
            allows_recall = _shows_image(part)
        if not allows_recall:
            return list(messages), []
    marked: list[Any] = []
    turns: list[RecallTurn] = []
    images = 0
    for message in messages:
        parts = _message_parts(message)
        texts = [
            (index, text)
            for index, text in enumerate(map(_part_text, parts))
            if text is not None
        ]
        question = "\n".join(text for _, text in texts).strip()
        in_message = sum(map(_shows_image, parts))
        if images and question and not in_message and _has_role(message, "user"):
            turns.append(RecallTurn(images=images, text=question))
            # The mark stands before the first text, whatever parts come before it.
            content: Any = token + space + texts[0][1]
            if not isinstance(message["content"], str):
                index, _ = texts[0]
                part = parts[index]
                part = (
                    {**part, "text": content} if isinstance(part, Mapping) else content
                )
                content = [*parts[:index], part, *parts[index + 1 :]]
            message = {**message, "content": content}
        images += in_message
        marked.append(message)
    return marked, turns


# Tokenization of the instruction, once for each input that reads it, bounded in length.

MAX_CHARACTERS = 16 * RELEVANCE_IDS
"""Last characters of an instruction that are tokenized, beginning at the start of a word.

A token of prose has about four characters, so this is more text than is ever read."""


def truncate_text(text: str, characters: int = MAX_CHARACTERS) -> str:
    """Keep only the end of an instruction: a pasted document would take seconds to tokenize."""
    if len(text) <= characters:
        return text
    cut = text[-characters:]
    if text[-characters - 1].isspace():
        return cut
    words = cut.split(maxsplit=1)
    return words[1] if len(words) == 2 else cut


def truncate_tower_ids(ids: Ids) -> Ids:
    """Ids for a CLIP text tower, at most RELEVANCE_IDS: the start token and the last ids."""
    return ids if len(ids) <= RELEVANCE_IDS else (ids[0], *ids[1 - RELEVANCE_IDS :])


class InstructionTokenizer:
    """Tokenizer of instructions, for the served model and for the text tower."""

    def __init__(
        self, info: BaseProcessingInfo, tower: TextTower | None, image_token: int
    ) -> None:
        self._info = info
        self._tower = tower
        self._image_token = image_token

    def tokenize(self, text: str, needs: Collection[Need]) -> tuple[Ids, Ids]:
        """Ids for (relevance, language model); empty for an input that ``needs`` does not contain.

        The second ids are the whole text for the language model's first layers, or else the words
        that a policy covers, each tokenized alone.
        """
        end = truncate_text(text)
        relevance = self._relevance(end) if "instruction" in needs else ()
        language: Ids = ()
        if "language" in needs:
            language = self._language(end)
        elif "words" in needs:
            words = [self._language(word) for word in split_content_words(end)]
            language = tuple(token for word in words for token in word)
        return relevance, language[-LANGUAGE_IDS:]

    @cached_property
    def _relevance(self) -> Callable[[str], Ids]:
        if self._tower is None:
            return lambda text: self._language(text)[-RELEVANCE_IDS:]
        from transformers import AutoTokenizer

        text_tower = AutoTokenizer.from_pretrained(self._tower.path)
        # Not cut to one segment: long instructions become several segments, as in CDPruner's code.
        return lambda text: truncate_tower_ids(
            tuple(text_tower(text, truncation=False, verbose=False)["input_ids"])
        )

    def _language(self, text: str) -> Ids:
        ids = self._info.get_tokenizer().encode(text, add_special_tokens=False)
        # A literal image token has no meaning in an instruction, and in some models no embedding.
        return tuple(token for token in ids if token != self._image_token)


# Words of a question that say what it is about, chosen as in MMTok's code.

_ENDINGS = (
    "Answer the question using a single word or phrase.",
    "Answer with the option's letter from the given choices directly.",
)
"""Instructions that benchmarks append to a question."""

_FREQUENT = re.compile(
    "a|an|the|is|are|was|were|be|been|being|have|has|had|do|does|"
    "did|it|they|he|she|we|you|i|what|where|when|why|how|who|which|"
    "and|or|but|so|if|then|question|answer|to|for|with|by|from|at|"
    "into|onto|upon",
    re.ASCII | re.IGNORECASE,
)
"""Words that say nothing about the content of an image."""


def split_content_words(text: str) -> list[str]:
    """The words of a question without frequent words; the whole text if none remains."""
    bare = text.replace("<image>", "")
    for ending in _ENDINGS:
        bare = bare.replace(ending, "")
    words = re.findall(r"\b\w+\b", bare)
    telling = [word for word in words if not _FREQUENT.fullmatch(word)]
    return telling or [bare.strip()]

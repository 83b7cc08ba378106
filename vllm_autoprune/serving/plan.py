"""Plan of an item: what the API server decides about an image, and sends to the workers.

With the bytes of a state that a plan carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, Literal, get_args

from msgspec import Meta
from torch import Tensor

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.plan_codec import RowCodec
from vllm_autoprune.serving.state_codec import MAX_STATE_BYTES
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.tokens import Positions

FIELD = "autoprune_plan"
"""Name of the multi-modal field that carries a plan to the worker."""

KWARGS = "mm_processor_kwargs"
REQUEST_FIELD = "autoprune"
"""Field of a request, and the key in it of the plugin's entry."""

ENTRY = f"{KWARGS}/{REQUEST_FIELD}"
"""Location of the entry in error messages."""

Chooser = Literal["state", "reference", "random", "resized"]
"""What chooses an image's tokens: the state, its base policy alone, a random draw, or nothing: the
image is resized to at most K tokens, or on a fixed grid its tokens are pooled to K. All but the
first are controls, so that a running server can be compared with them on its own traffic."""

CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)


Part = Literal["whole", "core", "delta", "recall"]
"""Kept tokens of an image that one item of the prompt holds: all, those kept for every question,
the others, or more of them that a later turn of the conversation recalls. An image that is split
stands in the prompt as two items."""


Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Token id; vocabularies are checked by the server's rules."""

Ids = tuple[Id, ...]
"""Token ids of a text."""

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

Key = tuple[_Int64, _Int64]
"""Key of an image in the feature cache (:func:`.identities.make_feature_key`)."""

NO_KEY: Key = (0, 0)
"""The key of an image whose features are not cached."""

RELEVANCE_IDS = 1024
"""Token ids of an instruction that relevance reads: its last ones."""

LANGUAGE_IDS = 256
"""Token ids of an instruction that the language model's first layers read: its last ones.

Their attention to all earlier tokens is stored, which would take gigabytes for a long document.
"""

MAX_VIDEO_TOKENS = 1 << 20
"""Bound of N of a video."""

MAX_TEXT_IDS = 1 << 14
"""Ids of text within one item: names of tiles, breaks behind rows, times of frames."""

MAX_SPAN = 1 << 16
"""Positions of an item whose tokens do not stand one after the other."""

LINE = 2
MROPE = 3
"""Rows of the positions that runners keep of a prompt. Of a model with one axis: where each token
stands, and where the rows of its image begin; under M-RoPE: time, height and width."""

MAX_RECALLS = 16
"""Turns of a conversation that recall tokens of one image: the plan of each names all before it."""

# Types of a plan's fields, with their bounds. A plan that is decoded is within them; how fields fit
# each other is checked after that.
_Budget = Annotated[int, Meta(ge=1, le=MAX_VIDEO_TOKENS)]
_Core = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]
_Count = Annotated[int, Meta(ge=0, le=MAX_VIDEO_TOKENS)]
_Instruction = Annotated[Ids, Meta(max_length=RELEVANCE_IDS)]
_Language = Annotated[Ids, Meta(max_length=LANGUAGE_IDS)]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens of an image that were chosen by one question: how many, and its token ids."""

    budget: _Budget
    instruction: _Instruction = ()
    language: _Language = ()


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Plan of one item of a prompt: an image, a video, or one part of an image.

    The instruction comes once for each need that reads it, since their tokenizers differ; empty
    where the policy does not read it.
    """

    budget: _Budget
    """Tokens that the item keeps."""
    key: Key
    """Key of its pixels in the feature cache."""
    instruction: _Instruction = ()
    """Token ids of the question for relevance."""
    language: _Language = ()
    """Token ids of the question for the model's first layers, or of the words to be covered."""
    keep: Chooser = "state"
    """What chooses its tokens."""
    profile: bool = False
    """Whether vLLM profiles its memory: the unpruned size is returned, after a selection."""
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] = b""
    """State of the request, as :func:`encode_state` encodes it; empty for the server's own."""
    tokens: _Count = 0
    """N by the size of the image or video."""
    part: Part = "whole"
    """Which of the image's kept tokens the item holds."""
    core: _Core = 0
    """Tokens of the image's core, where the item is a part of that image; else 0."""
    earlier: Annotated[tuple[Choice, ...], Meta(max_length=MAX_RECALLS)] = ()
    """For a recall, the image with its own question, then every recall before this one."""
    text: Annotated[tuple[tuple[_Count, Id], ...], Meta(max_length=MAX_TEXT_IDS)] = ()
    """Ids of text between the tokens, each after so many of the unpruned ones. The worker embeds
    them, where it is known which tokens are kept; empty where vLLM embeds the text."""
    frames: _Count = 0
    """T of a video; 0 for an image."""
    positions: Positions = "true"
    """Where its tokens stand; they are packed where they have no room."""

    @property
    def group(self) -> tuple[object, ...]:
        """Grouping key: images with the same group are selected by one policy."""
        budgets = tuple(choice.budget for choice in self.earlier)
        chooser = (self.keep, self.state, self.part)
        return (self.budget, *chooser, self.core, budgets, self.frames)

    @property
    def keeps_all(self) -> bool:
        """Whether every token of the image is kept, which is then what it is in stock vLLM."""
        return self.part == "whole" and self.budget >= self.tokens

    @property
    def moves(self) -> bool:
        """Whether its tokens stand elsewhere than one after the other, on an axis of positions."""
        return self.positions != "packed" and not self.keeps_all

    @property
    def runs_policy(self) -> bool:
        """Whether a policy is run: it may read the instruction, and may have a core."""
        return self.keep in ("state", "reference")

    @property
    def read(self) -> tuple[Ids, Ids]:
        """Token ids of the instruction, for the text tower and for the language model."""
        return self.instruction, self.language

    @property
    def kept_before(self) -> int:
        """Tokens of the image that are kept by the items which this one is chosen after."""
        if self.part == "recall":
            return sum(choice.budget for choice in self.earlier)
        return self.core if self.part == "delta" else 0

    @property
    def image_budget(self) -> int:
        """Tokens that the image keeps up to this item."""
        return self.kept_before + self.budget

    def split(self, core: int) -> tuple[ItemPlan, ItemPlan]:
        """Core of K_c tokens and delta of an image that is one item."""
        # A core is chosen alike whatever else is kept, so its plan tells nothing else.
        alone = ItemPlan(
            core, self.key, profile=self.profile, state=self.state, part="core"
        )
        delta = replace(self, budget=self.budget - core, part="delta", core=core)
        alone = replace(alone, tokens=self.tokens, core=core, positions=self.positions)
        return alone, delta

    def recall(self, budget: int) -> ItemPlan:
        """Tokens of the image that a later turn recalls after this item, without its question."""
        budget_before = self.budget if self.earlier else self.image_budget
        earlier = (*self.earlier, Choice(budget_before, *self.read))
        return replace(self, budget=budget, part="recall", earlier=earlier).ask()

    def ask(self, instruction: Ids = (), language: Ids = ()) -> ItemPlan:
        """The plan with another question."""
        return replace(self, instruction=instruction, language=language)

    def write_text(self, tokens: Sequence[int]) -> list[int]:
        """All tokens ``(N,)`` of the item, unpruned, with the text between them."""
        written = list[int]()
        done = 0
        for position, token in self.text:
            written += [*tokens[done:position], token]
            done = max(done, position)
        return [*written, *tokens[done:]]

    def items_before(self) -> Iterator[ItemPlan]:
        """Plans of the image's items that this one is chosen after, in their order."""
        if self.part == "delta":
            yield replace(self, budget=self.image_budget).split(self.core)[0]
        for turn, choice in enumerate(self.earlier):
            item = self.ask(choice.instruction, choice.language)
            item = replace(item, budget=choice.budget, earlier=self.earlier[:turn])
            if turn > 0:
                yield item
            elif self.core:
                yield from item.split(self.core)
            else:
                yield replace(item, part="whole")

    def encode(self) -> Tensor:
        """The row of bytes ``(L,)`` uint8 that carries the plan."""
        return _CODEC.encode(self)

    @staticmethod
    def decode(row: object) -> ItemPlan:
        """Inverse of :meth:`encode`; raises :class:`RequestError` for any other input.

        Plans may come from a client (vLLM's ``/inference/v1/generate`` takes processed inputs).
        """
        try:
            plan = _CODEC.decode(row)
        except ValueError as error:
            raise plan_error(str(error)) from None
        if problem := _find_contradiction(plan):
            raise plan_error(problem)
        return plan


def _find_contradiction(plan: ItemPlan) -> str:
    """What one field of a plan, each within its bounds, says against another; empty if nothing."""
    if plan.frames > plan.tokens:
        return f"has T = {plan.frames} of N = {plan.tokens}"
    if plan.tokens > MAX_BUDGET and not plan.frames:
        return f"has N = {plan.tokens}"
    if plan.text != tuple(sorted(plan.text, key=itemgetter(0))):
        return "has text that is out of order"
    if (plan.part == "recall") != bool(plan.earlier):
        return f"has {len(plan.earlier)} earlier choices as {plan.part}"
    # A core is the tokens of its own item; the other parts have one beside their own.
    cores = {
        "whole": range(1),
        "core": range(plan.budget, plan.budget + 1),
        "delta": range(1, MAX_BUDGET + 1),
        "recall": range(plan.earlier[0].budget if plan.earlier else 1),
    }
    if plan.core not in cores[plan.part]:
        return f"has K_c = {plan.core}"
    if plan.image_budget > (plan.tokens if plan.frames else MAX_BUDGET):
        return f"keeps K = {plan.image_budget} tokens"
    return ""


_LONGEST = 1 << 19
"""Bytes of a plan with as many earlier choices and as much text as there may be, and more."""

_CODEC = RowCodec(ItemPlan, 7, _LONGEST)


_RENDERED = "send images, or inputs that a server with the same settings has rendered"
"""How a request is corrected whose plans or tensors no such server makes."""


def plan_error(what: str, field: str = FIELD) -> RequestError:
    """Error for a plan, or a tensor beside it, that no server's own processor makes."""
    return RequestError.of(field, what, _RENDERED)

"""Plan of an item: what the API server decides about an image, and sends to the workers.

A plan also carries the bytes of a state that a request brings.
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
from vllm_autoprune.tpdsl.tower import Criterion

FIELD = "autoprune_plan"
"""Name of the multi-modal field that carries a plan to the worker."""

KWARGS = "mm_processor_kwargs"
REQUEST_FIELD = "autoprune"
"""Field of a request, and the key of the plugin's entry in it."""

ENTRY = f"{KWARGS}/{REQUEST_FIELD}"
"""Location of the entry in error messages."""

Chooser = Literal["state", "reference", "random", "resized"]
"""What chooses an image's tokens: the state, its base policy alone, a random draw, or nothing
(``resized``): the image is resized to at most K tokens, or on a fixed grid its tokens are pooled to
K. All but the state are controls, with which a running server can be compared on its own traffic.
"""

CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)


Part = Literal["whole", "core", "delta", "recall"]
"""Which kept tokens of an image an item of the prompt holds: all of them, the core kept for every
question, the delta, or tokens that a later turn of the conversation recalls. An image that is split
stands in the prompt as two items."""


Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Token id; the server's rules check it against the vocabularies."""

Ids = tuple[Id, ...]
"""Token ids of a text."""

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

Key = tuple[_Int64, _Int64]
"""Key of an image in the feature cache (:func:`.identities.make_feature_key`)."""

NO_KEY: Key = (0, 0)
"""The key of an image whose features are not cached."""

RELEVANCE_IDS = 1024
"""Number of an instruction's last token ids that relevance reads."""

LANGUAGE_IDS = 256
"""Number of an instruction's last token ids that the language model's first layers read.

Their attention to all earlier tokens is stored, which would take gigabytes for a long document."""

MAX_VIDEO_TOKENS = 1 << 20
"""Upper bound of N of a video."""

MAX_TEXT_IDS = 1 << 14
"""Maximum number of text ids within one item: names of tiles, breaks after rows, times of frames.
"""

MAX_SPAN = 1 << 16
"""Maximum number of positions of an item whose tokens do not stand one after the other."""

LINE = 2
MROPE = 3
"""Number of rows of the positions that runners keep for a prompt. For a model with one axis: the
position of each token, and the position at which the rows of its image begin. Under M-RoPE: time,
height and width."""

MAX_RECALLS = 16
"""Number of turns that may recall tokens of one image: each turn's plan repeats all earlier ones.
"""

# Types of a plan's fields, with their bounds. Decoding enforces these; whether fields fit each
# other is checked afterwards.
_Budget = Annotated[int, Meta(ge=1, le=MAX_VIDEO_TOKENS)]
_Core = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]
_Count = Annotated[int, Meta(ge=0, le=MAX_VIDEO_TOKENS)]
_Instruction = Annotated[Ids, Meta(max_length=RELEVANCE_IDS)]
_Language = Annotated[Ids, Meta(max_length=LANGUAGE_IDS)]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of an image's tokens by one question: their number, and the question's token ids."""

    budget: _Budget
    instruction: _Instruction = ()
    language: _Language = ()


@dataclass(frozen=True, slots=True)
class TowerCut:
    """Cells of an image that leave the vision tower after part of its layers."""

    encoded: Annotated[int, Meta(ge=1, le=MAX_BUDGET)]
    """Number of cells with which the tower starts."""
    depth: Annotated[float, Meta(ge=0.01, le=0.99)]
    """Share of the tower's layers that all cells pass."""
    criterion: Criterion = "difference"
    """What ranks the cells."""

    def find_layer(self, layers: int) -> int:
        """Index of the first of so many layers that only the remaining cells pass."""
        return min(max(1, round(self.depth * layers)), layers - 1)


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Plan of one item of a prompt: an image, a video, or one part of an image.

    The instruction is stored once for each need that reads it, because their tokenizers differ; it
    is empty if the policy does not read it.
    """

    budget: _Budget
    """Number of tokens that the item keeps."""
    key: Key
    """Key of its image or video in the feature cache."""
    instruction: _Instruction = ()
    """Token ids of the question, for relevance."""
    language: _Language = ()
    """Token ids of the question for the language model's first layers, or of the words to be
    covered."""
    keep: Chooser = "state"
    """What chooses its tokens."""
    profile: bool = False
    """Whether vLLM profiles its memory: after a selection, the unpruned rows are returned."""
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] = b""
    """State that the request brings, encoded by :func:`encode_state`; empty for the server's own.
    """
    tokens: _Count = 0
    """N, the number of unpruned tokens, from the size of the image or video."""
    part: Part = "whole"
    """Which of the image's kept tokens the item holds."""
    core: _Core = 0
    """Number of tokens of the image's core, if the item is a part of that image; else 0."""
    earlier: Annotated[tuple[Choice, ...], Meta(max_length=MAX_RECALLS)] = ()
    """For a recall: the choice of the image with its own question, then every recall before this
    one."""
    text: Annotated[tuple[tuple[_Count, Id], ...], Meta(max_length=MAX_TEXT_IDS)] = ()
    """Ids of text between the tokens, each with the number of unpruned tokens before it. The worker
    embeds them, because only it knows which tokens are kept; empty if vLLM embeds the text."""
    frames: _Count = 0
    """T of a video; 0 for an image."""
    positions: Positions = "true"
    """Where its tokens stand; they are packed if there is no room."""
    tower: TowerCut | None = None
    """Which of an image's cells leave the vision tower, if any do; :attr:`tokens` counts the
    others."""

    @property
    def group(self) -> tuple[object, ...]:
        """Grouping key: images with the same group are selected by the same policy."""
        budgets = tuple(choice.budget for choice in self.earlier)
        chooser = (self.keep, self.state, self.part)
        return (self.budget, *chooser, self.core, budgets, self.frames)

    @property
    def keeps_all(self) -> bool:
        """Whether every token of the image is kept, so that it is the same as in stock vLLM."""
        return self.part == "whole" and self.budget >= self.tokens

    @property
    def moves(self) -> bool:
        """Whether its tokens keep positions on an axis, instead of standing one after the other."""
        return self.positions != "packed" and not self.keeps_all

    @property
    def runs_policy(self) -> bool:
        """Whether a policy is run, which may read the instruction and may have a core."""
        return self.keep in ("state", "reference")

    @property
    def read(self) -> tuple[Ids, Ids]:
        """Token ids of the instruction, for the text tower and for the language model."""
        return self.instruction, self.language

    @property
    def kept_before(self) -> int:
        """Number of tokens that the items before this one keep of the same image."""
        if self.part == "recall":
            return sum(choice.budget for choice in self.earlier)
        return self.core if self.part == "delta" else 0

    @property
    def image_budget(self) -> int:
        """K of the image once this item is added: its own and :attr:`kept_before` tokens."""
        return self.kept_before + self.budget

    def split(self, core: int) -> tuple[ItemPlan, ItemPlan]:
        """Split an unsplit image into the plans of its core, of K_c tokens, and of its delta."""
        # A core does not depend on what else is kept, so its plan says nothing about that.
        alone = ItemPlan(
            core, self.key, profile=self.profile, state=self.state, part="core"
        )
        delta = replace(self, budget=self.budget - core, part="delta", core=core)
        alone = replace(alone, tokens=self.tokens, core=core, positions=self.positions)
        alone = replace(alone, tower=self.tower)
        return alone, delta

    def recall(self, budget: int) -> ItemPlan:
        """Plan of tokens that a later turn recalls after this item, without its question yet."""
        budget_before = self.budget if self.earlier else self.image_budget
        earlier = (*self.earlier, Choice(budget_before, *self.read))
        return replace(self, budget=budget, part="recall", earlier=earlier).ask()

    @property
    def unpruned(self) -> ItemPlan:
        """The plan of an item that is as in stock vLLM, without what chooses tokens."""
        return ItemPlan(
            self.budget, NO_KEY, keep=self.keep, tokens=self.tokens, frames=self.frames
        )

    def ask(self, instruction: Ids = (), language: Ids = ()) -> ItemPlan:
        """The plan with its question replaced."""
        return replace(self, instruction=instruction, language=language)

    def write_text(self, tokens: Sequence[int]) -> list[int]:
        """All tokens ``(N,)`` of the unpruned item, with the text between them."""
        written = list[int]()
        done = 0
        for position, token in self.text:
            written += [*tokens[done:position], token]
            done = max(done, position)
        return [*written, *tokens[done:]]

    def items_before(self) -> Iterator[ItemPlan]:
        """Plans of the image's items before this one, given which it is chosen, in their order."""
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
        """The plan as a row of bytes ``(L,)`` uint8."""
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
    """Description of a contradiction between fields within their bounds; empty if none."""
    if plan.frames > plan.tokens:
        return f"has T = {plan.frames} of N = {plan.tokens}"
    if plan.tokens > MAX_BUDGET and not plan.frames:
        return f"has N = {plan.tokens}"
    if plan.tower is not None:
        if plan.frames or plan.keep == "resized":
            return "drops cells inside the tower of a video, or of a resized image"
        if not 0 < plan.tokens < plan.tower.encoded:
            return f"drops all but {plan.tokens} of {plan.tower.encoded} cells"
    if plan.text != tuple(sorted(plan.text, key=itemgetter(0))):
        return "has text that is out of order"
    if (plan.part == "recall") != bool(plan.earlier):
        return f"has {len(plan.earlier)} earlier choices as {plan.part}"
    # A core's own item has only the core's tokens; other parts keep theirs besides the core's.
    cores = {
        "whole": range(1),
        "core": range(plan.budget, plan.budget + 1),
        "delta": range(1, MAX_BUDGET + 1),
        "recall": range(plan.earlier[0].budget + 1 if plan.earlier else 1),
    }
    if plan.core not in cores[plan.part]:
        return f"has K_c = {plan.core}"
    if plan.image_budget > (plan.tokens if plan.frames else MAX_BUDGET):
        return f"keeps K = {plan.image_budget} tokens"
    return ""


_LONGEST = 1 << 19
"""Bound of the bytes of a plan; one with as many earlier choices and as much text as possible fits.
"""

_CODEC = RowCodec(ItemPlan, 8, _LONGEST)


_RENDERED = "send images, or inputs that a server with the same settings has rendered"
"""Suggested fix for a request whose plans or tensors no server makes."""


def plan_error(what: str, field: str = FIELD) -> RequestError:
    """Error for a plan, or for a tensor beside it, that no server's own processor makes."""
    return RequestError.of(field, what, _RENDERED)

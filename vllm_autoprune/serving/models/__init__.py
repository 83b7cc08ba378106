"""Registry of the backbones that can be served pruned, with the checks of their checkpoints.

Model classes are named by import path, because settings are checked before vLLM's models are
imported. ``architectures.toml`` beside this file lists, for every architecture of vLLM that takes
images, its checkpoints, and the reason for refusing those without a backbone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.serving.plan import LANGUAGE_IDS
from vllm_autoprune.text_tower import TOWER_FLAG, TextTower
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FIX = f"serve another state, such as {DEFAULT_STATE}, or another checkpoint"

_INPUTS: dict[Need, str] = {
    "tower": "the vision tower's output for each token",
    "next_layer": "the vision tower's next layer",
    "language": "the language model's first layers",
    "encoder": "the tokens before the projector or the merger",
}

_LAYERS: tuple[Need, ...] = ("tower", "next_layer", "language")
"""Inputs that states may read but that a model with a patch merger cannot provide."""

_MODULE = "vllm_autoprune.serving.models"
_PREFIX = "Autoprune"


@dataclass(frozen=True)
class Field:
    """A field of config.json for which the pruned class supports only some values."""

    name: str
    """Dotted name within the configuration."""
    expected: str
    """The accepted values, in words."""
    accepts: Callable[[Any], bool]
    """Whether a value is accepted; the value of an absent field is None."""

    def problem(self, config: PreTrainedConfig) -> Problem | None:
        """Problem of a checkpoint with an unsupported value; an absent field has the value None."""
        try:
            value = attrgetter(self.name)(config)
        except AttributeError:
            value = None
        if self.accepts(value):
            return None
        what = f"config.json has {self.name} {value!r}; only {self.expected} is known"
        return Problem(
            "model", what, "serve a checkpoint that has it, or serve without a state"
        )


def _exactly(name: str, value: object) -> Field:
    return Field(name, repr(value), lambda present: present == value)


@dataclass(frozen=True)
class Backbone:
    """One served model family: its class in vLLM, the module of its pruned form, its checks."""

    name: str
    """The plugin's name for the family."""
    module: str
    """Module of this package that has the pruned class."""
    stock: str
    """Name of the class in vLLM that is served pruned."""
    fields: tuple[Field, ...] = ()
    """Fields of config.json in which other checkpoints of the architecture may be unsupported."""
    missing: tuple[Need, ...] = (
        "tower",
        "next_layer",
        "language",
        "encoder",
        "merger_input",
    )
    """Inputs that states may read but the model cannot provide."""
    mrope: bool = False
    """Whether tokens have separate positions in time, height and width."""
    unsplittable: str = ""
    """Why an image cannot be several items of a prompt; empty if it can."""
    whole_only: str = "encodes the patches of an image as a whole square"
    """Why no cell of an image can be dropped before the tower; empty if cells can be dropped."""
    whole_tower: str = "has a tower that takes no list of sequences in each layer"
    """Why no cell of an image can be dropped inside the tower; empty if cells can be dropped."""
    videos: bool = False
    """Whether tokens of videos can be chosen; otherwise videos are served as in stock vLLM."""
    graphs: bool = False
    """Whether the vision side can replay CUDA graphs of the tower."""
    packed: str = ""
    """Why kept tokens can only stand one after the other; empty if they can keep their places."""
    embeds_text: bool = False
    """Whether text stands between the tokens of an item, so that the worker embeds it with kept
    tokens."""
    frame: Callable[[PreTrainedConfig], tuple[int, int]] | None = None
    """Number of tokens of each frame of a video, and of rows after the last frame, for models whose
    frames always have the same size."""
    remote_processor: bool = False
    """Whether vLLM serves it with an image processor that is Python code of the checkpoint."""
    host_norm: bool = False
    """Whether its tower in vLLM 0.32 normalizes no pixels, although vLLM leaves it to the tower."""
    state: str = DEFAULT_STATE
    """Recommended state, by the rule of docs/choosing.md, "Default states"."""
    budget: str = "1/8"
    """Recommended budget K, by the same page: what the family's small model stands."""
    architectures: tuple[str, ...] = ()
    """Architecture names in the config.json of checkpoints; if empty, the name of vLLM's class."""

    @property
    def model(self) -> str:
        """Import path of the pruned class, in the form of vLLM's registry."""
        return f"{_MODULE}.{self.module}:{_PREFIX}{self.stock}"

    def tower_problems(
        self, config: PreTrainedConfig, tower: TextTower
    ) -> list[Problem]:
        """Refuse every text tower: no CLIP was trained together with this model's vision tower."""
        what = f"the vision tower of {config.model_type!r} has no text tower beside it"
        fix = "leave the flag out: relevance is then measured by the model's own embeddings"
        return [Problem(f"{TOWER_FLAG} {tower.path}", what, fix)]

    def input_problems(
        self, config: PreTrainedConfig, needs: Collection[Need]
    ) -> list[Problem]:
        """Problems of inputs that a state reads and this checkpoint cannot provide."""
        kind = f"{config.model_type!r}"
        problems = [
            Problem(
                "model", f"the state reads {what}, which {kind} does not give", _FIX
            )
            for need, what in _INPUTS.items()
            if need in self.missing and need in needs
        ]
        if "merger_input" in self.missing and "merger_input" in needs:
            what = (
                f"rank_at merger_in: {kind} has no patch merger to rank tokens before"
            )
            fix = "set rank_at to merger_out, or serve another checkpoint"
            problems.append(Problem("model", what, fix))
        return problems


@dataclass(frozen=True)
class _LlavaBackbone(Backbone):
    """A model of the LLaVA family whose vision tower is CLIP's."""

    fields: tuple[Field, ...] = (
        _exactly("vision_config.model_type", "clip_vision_model"),  # has [CLS] to read
        _exactly("vision_feature_select_strategy", "default"),  # patches without [CLS]
        Field(
            "vision_feature_layer", "one layer", lambda layer: isinstance(layer, int)
        ),
    )
    missing: tuple[Need, ...] = ("merger_input",)

    def tower_problems(
        self, config: PreTrainedConfig, tower: TextTower
    ) -> list[Problem]:
        """Problems of a text tower that belongs to another vision tower."""
        width = config.vision_config.hidden_size
        if tower.vision_width == width:
            return []
        what = f"its vision tower is {tower.vision_width} wide, the model's {width}"
        fix = "give the CLIP checkpoint that the model's vision tower comes from"
        return [Problem(f"{TOWER_FLAG} {tower.path}", what, fix)]

    def input_problems(
        self, config: PreTrainedConfig, needs: Collection[Need]
    ) -> list[Problem]:
        """Problems of inputs that a state reads and this checkpoint cannot provide."""
        whats = []
        vision = config.vision_config
        last_layers = (-1, vision.num_hidden_layers)
        if "next_layer" in needs and config.vision_feature_layer in last_layers:
            whats.append(
                "the model reads the vision tower's last layer, and the state the one after it"
            )
        if "language" in needs:
            whats += self._find_language_problems(config)
        problems = [Problem("model", what, _FIX) for what in whats]
        return super().input_problems(config, needs) + problems

    def _find_language_problems(self, config: PreTrainedConfig) -> Iterator[str]:
        """Reasons why the language model's first layers cannot be read before prefill."""
        vision = config.vision_config
        text = config.text_config
        if text.model_type != "llama":
            yield f"the state reads the first layers of a llama, not of {text.model_type!r}"
        elif not isinstance(text.bos_token_id, int):
            yield f"bos_token_id {text.bos_token_id!r} is no token to begin a sequence with"
        # Tokens of the largest image: one tile, or a base view and the largest grid of crops.
        tokens = (vision.image_size // vision.patch_size) ** 2
        crops = 0
        if config.model_type == "llava_next":
            pinpoints: list[list[int]] = config.image_grid_pinpoints
            largest = max(height * width for height, width in pinpoints)
            crops = largest // vision.image_size**2
        longest = 1 + (1 + crops) * tokens + LANGUAGE_IDS
        if text.max_position_embeddings < longest:
            yield f"max_position_embeddings {text.max_position_embeddings} is below {longest}"


_MERGED = _exactly("vision_config.spatial_merge_size", 2)
"""Side, in patches, of the square that becomes one token."""


# Attention is read from the last of these blocks.
_FULL = Field("vision_config.fullatt_block_indexes", "a list that names a block", bool)


def _qwen(
    name: str, stock: str, *fields: Field, within: str = "", **more: Any
) -> Backbone:
    """A model of Qwen-VL's kind, whose merger makes a token of four patches.

    Names of its fields are relative to the part ``within`` of config.json.
    """
    checked = tuple(
        replace(field, name=within + field.name) for field in (_MERGED, *fields)
    )
    usual = {"missing": _LAYERS, "mrope": True, "whole_only": "", "budget": "1/2"}
    usual["whole_tower"] = "has a tower on which that was not tested"
    return Backbone(name, "qwen", stock, fields=checked, **{**usual, **more})


def _tiled(name: str, stock: str, why: str, *fields: Field, **more: Any) -> Backbone:
    """A model whose tiles have a patch merger; ``why``: the text that the processor adds."""
    why = f"writes {why}"
    return Backbone(
        name, "tiled", stock, fields=fields, missing=_LAYERS, unsplittable=why, **more
    )


def _separated(name: str, stock: str, **more: Any) -> Backbone:
    """A model whose tiles have text between them, which the worker embeds."""
    row = _tiled(name, stock, _TEXT, embeds_text=True, **more)
    return replace(row, module="separated_tiles")


def _step(name: str, stock: str, **more: Any) -> Backbone:
    """A model of Step 3's kind, whose tower has convolutions and no patch merger."""
    why = f"writes {_TEXT}"
    return Backbone(
        name, "separated_tiles", stock, unsplittable=why, embeds_text=True, **more
    )


def _ocr(name: str, stock: str, **fields: Any) -> Backbone:
    """A model that reads pages, for which nearly every token is needed."""
    usual = {"fields": (_MERGED,), "missing": _LAYERS, "budget": "70%"}
    return Backbone(name, "ocr", stock, **{**usual, **fields})


def _ovis(name: str, *architectures: str) -> Backbone:
    """A model that vLLM serves by the class of Ovis 2.5."""
    return Backbone(
        name,
        "ovis",
        "Ovis2_5",
        fields=(
            Field("vit_config.hidden_stride", "2", lambda side: side in (2, None)),
        ),
        missing=_LAYERS,
        unsplittable="writes the rows that begin and end an image around every item",
        embeds_text=True,
        budget="1/2",
        architectures=architectures,
    )


def shuffled_frame(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of tokens of an InternVL frame, which is one square tile; no rows follow frames."""
    vision = config.vision_config
    size, patch = (
        side if isinstance(side, int) else side[0]
        for side in (vision.image_size, vision.patch_size)
    )
    return round(size // patch * config.downsample_ratio) ** 2, 0


def pooled_frame(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of tokens of a LLaVA-OneVision frame, pooled two by two, and of a video's newline."""
    vision = config.vision_config
    return ceil(vision.image_size // vision.patch_size / 2) ** 2, 1


_NAMED: dict[str, Any] = {"videos": True, "embeds_text": True}
"""Videos have the time or the number of each frame, as text, among their tokens."""
_NUMBERED = {**_NAMED, "frame": shuffled_frame}

_SHUFFLED = _exactly("downsample_ratio", 0.5)
_INTERNVL_CHAT = (
    _SHUFFLED,
    _exactly("ps_version", "v2"),  # v1 has the tokens of a tile column by column
    # InternViT of any size has this field, and no other tower has it.
    Field(
        "vision_config.qk_normalization",
        "true or false",
        lambda flag: isinstance(flag, bool),
    ),
)
_WINDOWS = (
    "has layers with sliding windows, which reach back by tokens and not by positions"
)
_NORMALISED = "gets pixels that are normalised before, and cannot be compared"
_ATTENDS_WITHIN = "has layers that attend within windows, which would lose cells"
_PLACES_WHOLE = "places the patches of whole images only"
_MARKS = "the tokens that begin and end an image around every item"
_TEXT = "text around the tiles of every item"

BACKBONES: dict[str, Backbone] = {
    architecture: row
    for row in (
        _LlavaBackbone("llava", "llava", "LlavaForConditionalGeneration"),
        _LlavaBackbone("llava_next", "llava", "LlavaNextForConditionalGeneration"),
        _qwen(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            videos=True,
            graphs=True,
            whole_tower="",
        ),
        _qwen(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            _FULL,
            videos=True,
            graphs=True,
            whole_tower=_ATTENDS_WITHIN,
        ),
        _qwen(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            graphs=True,
            whole_tower="",
            **_NAMED,
        ),
        _qwen(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            whole_tower="",
            **_NAMED,
        ),
        _qwen("qwen3_5", "Qwen3_5ForConditionalGeneration", whole_tower="", **_NAMED),
        _qwen(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            whole_tower="",
            **_NAMED,
        ),
        _qwen("cosmos3_omni", "Cosmos3ForConditionalGeneration", **_NAMED),
        _qwen(
            "cosmos3_edge",
            "Cosmos3EdgeForConditionalGeneration",
            whole_only=_PLACES_WHOLE,
        ),
        _qwen(
            "cohere_compass",
            "CohereCompassForConditionalGeneration",
            whole_only=_NORMALISED,
        ),
        _qwen("glm4v", "Glm4vForConditionalGeneration", **_NAMED),
        _qwen("glm4v_moe", "Glm4vMoeForConditionalGeneration", **_NAMED),
        # Reading pages suffers first from pruning.
        _qwen(
            "glm_ocr",
            "GlmOcrForConditionalGeneration",
            budget="70%",
            whole_only=_PLACES_WHOLE,
        ),
        _qwen(
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            _FULL,
            within="thinker_config.",
            architectures=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
            whole_tower=_ATTENDS_WITHIN,
            whole_only=_NORMALISED,
        ),
        _qwen(
            "qwen3_omni_moe",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            within="thinker_config.",
            architectures=("Qwen3OmniMoeForConditionalGeneration",),
            whole_only=_NORMALISED,
        ),
        _ocr("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", mrope=True),
        _ocr("lightonocr", "LightOnOCRForConditionalGeneration", fields=()),
        _ocr("dots_ocr", "DotsOCRForCausalLM"),
        _qwen(
            "exaone4_5",
            "Exaone4_5_ForConditionalGeneration",
            _FULL,
            mrope=False,
            packed=_WINDOWS,
            whole_tower=_ATTENDS_WITHIN,
            whole_only=_NORMALISED,
            host_norm=True,
        ),
        _ovis("ovis2_5", "Ovis2_5", "Ovis2_6ForCausalLM"),
        _ovis("ovis2_6_moe", "Ovis2_6_MoeForCausalLM"),
        Backbone(
            "llava_onevision",
            "llava",
            "LlavaOnevisionForConditionalGeneration",
            fields=(
                _exactly("vision_config.model_type", "siglip_vision_model"),
                _exactly("vision_feature_select_strategy", "full"),  # all patches
            ),
            videos=True,
            frame=pooled_frame,
        ),
        _tiled(
            "internvl",
            "InternS1ForConditionalGeneration",
            _MARKS,
            _SHUFFLED,
            **_NUMBERED,
            # vLLM serves InternVL of transformers by the class of InternS1.
            architectures=("InternVLForConditionalGeneration",),
        ),
        _tiled(
            "interns1",
            "InternS1ForConditionalGeneration",
            _MARKS,
            _SHUFFLED,
            **_NUMBERED,
        ),
        _tiled(
            "internvl_chat", "InternVLChatModel", _MARKS, *_INTERNVL_CHAT, **_NUMBERED
        ),
        _tiled(
            "qianfan_ocr", "QianfanOCRForConditionalGeneration", _MARKS, *_INTERNVL_CHAT
        ),
        _tiled("skywork_chat", "SkyworkR1VChatModel", _MARKS, *_INTERNVL_CHAT),
        _tiled(
            "nvlm_d",
            "NVLM_D_Model",
            _TEXT,
            *_INTERNVL_CHAT,
            embeds_text=True,
            architectures=("NVLM_D",),
        ),
        _tiled("idefics3", "Idefics3ForConditionalGeneration", _TEXT, embeds_text=True),
        _tiled("smolvlm", "SmolVLMForConditionalGeneration", _TEXT, embeds_text=True),
        _separated(
            "cohere2_vision", "Cohere2VisionForConditionalGeneration", packed=_WINDOWS
        ),
        _separated(
            "lfm2_vl",
            "Lfm2VLForConditionalGeneration",
            architectures=("Lfm2VlForConditionalGeneration",),
        ),
        _separated(
            "llama4",
            "Llama4ForConditionalGeneration",
            packed="has layers that attend within chunks, which are counted by tokens",
        ),
        _step("step3", "Step3VLForConditionalGeneration"),
        _step("step_vl", "StepVLForConditionalGeneration"),
        _step("step3p7", "Step3p7ForConditionalGeneration", packed=_WINDOWS),
        Backbone(
            "mistral3",
            "ocr",
            "Mistral3ForConditionalGeneration",
            missing=_LAYERS,
            unsplittable="writes a break behind every row of every item",
            embeds_text=True,
        ),
        Backbone(
            "gemma3",
            "tiled",
            "Gemma3ForConditionalGeneration",
            unsplittable="lets the tokens of an image see those that follow them",
            packed=_WINDOWS,
        ),
        Backbone(
            "gemma4",
            "gemma4",
            "Gemma4ForConditionalGeneration",
            missing=_LAYERS,
            unsplittable="writes the tokens that begin and end an image around every item",
            packed=_WINDOWS,
        ),
    )
    for architecture in row.architectures or (row.stock,)
}
"""Hugging Face architecture name -> backbone."""


@dataclass(frozen=True)
class Refusal:
    """Architectures of vLLM that take images but are not served pruned, for one common reason."""

    why: str
    """The reason, as the text after "has no pruned form"."""
    models: Mapping[str, Sequence[str]]
    """Architecture -> its checkpoints, and what in vLLM's code shows the reason, if the code shows
    it."""


_TABLE = tomllib.loads(
    Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")
)

CHECKPOINTS: Mapping[str, str] = _TABLE["served"]
"""Architecture with a backbone -> its checkpoints, as ids on the Hugging Face Hub with ``*``."""

REFUSALS = tuple(Refusal(**row) for row in _TABLE["refused"])
"""Reasons for refusal; an architecture has only one."""


def find_architecture(checkpoint: str) -> str | None:
    """The architecture of a checkpoint by its Hub id; None if ``architectures.toml`` has none.

    Of several ids with ``*`` that match, the one with the most other characters counts.
    """
    refused = {name: texts[0] for row in REFUSALS for name, texts in row.models.items()}
    matches: dict[str, int] = {}
    for architecture, ids in {**refused, **CHECKPOINTS}.items():
        for pattern in _list_patterns(ids):
            if fnmatchcase(checkpoint, pattern):
                length = max(len(pattern), matches.get(architecture, 0))
                matches[architecture] = length
    return max(matches, key=lambda name: matches[name], default=None)


def _list_patterns(ids: str) -> Iterator[str]:
    """The ids of a line of ``architectures.toml``, one for each alternative in braces."""
    for text in ids.split(", "):
        start, brace, rest = text.partition("{")
        alternatives, _, end = rest.partition("}")
        for alternative in alternatives.split(","):
            yield f"{start}{alternative}{end}" if brace else text


def find_problems(architecture: str, config: PreTrainedConfig) -> list[Problem]:
    """Why no state can serve a checkpoint: its architecture, or unsupported values of fields."""
    if backbone := BACKBONES.get(architecture):
        return [
            problem for field in backbone.fields if (problem := field.problem(config))
        ]
    return [refuse(architecture)]


def refuse(architecture: str) -> Problem:
    """The problem of an architecture without a backbone."""
    reasons = [row.why for row in REFUSALS if architecture in row.models]
    why = reasons[0] if reasons else "vLLM takes no images for it"
    what = f"architecture {architecture!r} has no pruned form: {why}"
    fix = "serve a model of docs/support.md#models, or without a state"
    return Problem("model", what, fix)


def find_packed_reason(backbone: Backbone, config: PreTrainedConfig) -> str:
    """Why kept tokens of a checkpoint can only stand one after the other; empty if they need not.

    A layer with a sliding window would reach back over distances at which it was never trained.
    """
    if backbone.mrope or backbone.packed:
        return backbone.packed
    text = getattr(config, "llm_config", None) or config.get_text_config()
    layers = getattr(text, "layer_types", None) or ()
    slides = getattr(text, "sliding_window", None) and getattr(
        text, "use_sliding_window", True
    )
    if any("sliding" in layer for layer in layers) or (slides and not layers):
        return _WINDOWS
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    if not rotary or getattr(text, "alibi", False):
        return "has no rotary positions"
    return ""


def require_served(config: PreTrainedConfig) -> Backbone:
    """The backbone of a checkpoint; raises :class:`ConfigError` if no state can serve it."""
    names = config.architectures or [f"of {config.model_type!r}"]
    architecture = next((name for name in names if name in BACKBONES), names[0])
    if problems := find_problems(architecture, config):
        raise ConfigError("cannot serve pruned", problems)
    return BACKBONES[architecture]

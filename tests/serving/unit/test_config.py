from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serving.unit.conftest import Registered, TinyClip
from tests.serving.unit.samples import LLAVA, describe, served, vllm_config
from tests.tpdsl.samples import edited, shipped, state
from vllm_autoprune import ConfigError, PruningPolicy, SafetyRecord, VisualTokens
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving import compat
from vllm_autoprune.serving import config as config_module
from vllm_autoprune.serving.config import ServedState, adopt, resolve, served_state
from vllm_autoprune.serving.rules import RequestRules
from vllm_autoprune.serving.towers import SIGN_KEY, TextTower
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyParams, Reference
from vllm_autoprune.tpdsl.load import shipped_states

MISSING = "atom-that-is-not"
TOWER = "--autoprune-text-tower"


def refusal(settings: object, config: Any = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(settings, vllm_config() if config is None else config)
    problems = caught.value.problems
    assert problems
    assert all(problem.what and problem.mend for problem in problems)
    return problems


def places(settings: object, config: Any = None) -> list[str]:
    return [problem.where for problem in refusal(settings, config)]


# ---- what is accepted ----


@pytest.mark.parametrize("form", ["name", "path", "path as text", "json", "dict", "state"])
def test_a_state_may_be_given_in_every_form(form: str) -> None:
    file = shipped_states()["autoprune"]
    given: Mapping[str, object] = {
        "name": "autoprune",
        "path": file,
        "path as text": str(file),
        "json": file.read_text(),
        "dict": shipped(),
        "state": state(),
    }
    found = resolve({"state": given[form]}, vllm_config())
    assert found.state.digest == state().digest
    assert (found.architecture, found.budget, found.tower) == (LLAVA, 32, None)
    assert found.cache_bytes == 1 << 28


@pytest.mark.parametrize("budget", [64, "64", " 64 "], ids=repr)
def test_a_budget_of_its_own(budget: object) -> None:
    found = resolve({"state": "autoprune", "budget": budget}, vllm_config())
    assert found.budget == found.policy().budget == 64


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 0), ("0", 0), (2, 1 << 31), ("0.5", 1 << 29), (1024, 1 << 40)],
    ids=repr,
)
def test_a_cache_of_its_own(size: object, count: int) -> None:
    found = resolve({"state": "autoprune", "feature_cache_gb": size}, vllm_config())
    assert found.cache_bytes == count


def test_a_text_tower_of_its_own(tiny_clip: TinyClip) -> None:
    settings = {"state": "autoprune", "text_tower": str(tiny_clip.folder)}
    found = resolve(settings, vllm_config())
    assert found.tower is not None
    assert (found.tower.path, found.tower.sign) == (str(tiny_clip.folder), -1)


# ---- what is refused, and where ----


@pytest.mark.parametrize("settings", ["autoprune", 3, None, ["autoprune"], True], ids=repr)
def test_settings_that_are_no_object(settings: object) -> None:
    assert places(settings) == ["additional_config/autoprune"]


def test_a_setting_that_nobody_knows() -> None:
    (problem,) = refusal({"state": "autoprune", "buget": 3})
    assert problem.where == "additional_config/autoprune/buget"
    assert "budget" in problem.mend


@pytest.mark.parametrize("settings", [{}, {"from_flags": True}, {"state": None}], ids=repr)
def test_no_state(settings: object) -> None:
    (problem,) = refusal(settings)
    assert problem.where == "--autoprune-state"
    assert "no state is given" in problem.what


def test_a_budget_without_a_state() -> None:
    assert places({"budget": 64}) == ["--autoprune-state"]
    assert places({"budget": "0"}) == ["--autoprune-state", "--autoprune-budget"]


def test_a_file_that_is_missing_and_a_name_that_is_nearly_one() -> None:
    (problem,) = refusal({"state": "autoprun"})
    assert problem.where == "--autoprune-state autoprun#"
    assert "no such file" in problem.what
    assert "did you mean 'autoprune'?" in problem.mend


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("state: 3")
    (problem,) = refusal({"state": str(file)})
    assert problem.where == f"--autoprune-state {file}#"
    assert "not JSON" in problem.what


@pytest.mark.parametrize(
    ("changes", "pointer", "said"),
    [
        ({"/schema": "autoprune-state/9"}, "/schema", "autoprune-state/9"),
        ({"/scoring/fusion/atom": MISSING}, "/scoring/fusion/atom", MISSING),
        ({"/constraints/selector/q_e": -1}, "/constraints/selector/q_e", "-1"),
        ({"/reassembly/strenth": 1}, "/reassembly/strenth", "not a known field"),
    ],
    ids=["version", "atom", "parameter", "field"],
)
def test_a_state_with_a_mistake_is_pointed_at(
    tmp_path: Path, changes: dict[str, object], pointer: str, said: str
) -> None:
    data = edited(shipped(), {"/reassembly": {"atom": "mean_residual"}, **changes})
    file = tmp_path / "state.json"
    file.write_text(json.dumps(data))
    (in_file,) = refusal({"state": str(file)})
    assert in_file.where == f"--autoprune-state {file}#{pointer}"
    assert said in in_file.what
    (in_settings,) = refusal({"state": data})
    assert in_settings.where == f"#{pointer}"


@pytest.mark.parametrize("budget", [0, -1, "0", "-1", 65537], ids=repr)
def test_a_budget_that_is_no_number_of_tokens(budget: object) -> None:
    (problem,) = refusal({"state": "autoprune", "budget": budget})
    assert problem.where.startswith("--autoprune-budget")
    assert str(budget) in problem.what


@pytest.mark.parametrize("budget", ["x", "1.5", 1.5, "", True, [8]], ids=repr)
def test_a_budget_that_is_no_whole_number(budget: object) -> None:
    (problem,) = refusal({"state": "autoprune", "budget": budget})
    assert problem.where == "--autoprune-budget"
    assert "not a whole number" in problem.what


def test_a_budget_above_the_state_s_limit() -> None:
    data = edited(shipped(), {"/budget": {"atom": "fixed_budget@32", "limit": 48}})
    assert resolve({"state": data, "budget": 48}, vllm_config()).budget == 48
    (problem,) = refusal({"state": data, "budget": 64})
    assert problem.where == "--autoprune-budget#/budget/limit"
    assert "48" in problem.mend


def test_a_budget_below_the_reference_tokens_to_be_kept() -> None:
    data = edited(shipped(), {"/constraints/selector/r_min": 24})
    (problem,) = refusal({"state": data, "budget": 16})
    assert problem.where == "--autoprune-budget#/constraints/selector/r_min"
    assert "24" in problem.what and "16" in problem.what


@pytest.mark.parametrize("size", [-1, "-0.1", "nan", float("nan"), "inf", "much", 1025], ids=repr)
def test_a_cache_that_is_no_size(size: object) -> None:
    (problem,) = refusal({"state": "autoprune", "feature_cache_gb": size})
    assert problem.where == "--autoprune-feature-cache-gb"


@pytest.fixture
def towers(tmp_path: Path) -> dict[str, Path]:
    """Text towers with one mistake each."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "siglip"}')
    return {
        "missing": tmp_path / "nowhere",
        "not CLIP": other,
        "no tokenizer": describe(tmp_path / "bare", tokenizer=False),
        "bad sign": describe(tmp_path / "sign", {SIGN_KEY: 2}),
    }


def test_a_text_tower_with_a_mistake(towers: dict[str, Path]) -> None:
    for path in towers.values():
        assert places({"state": "autoprune", "text_tower": str(path)}) == [f"{TOWER} {path}"]


def test_a_text_tower_of_another_vision_tower(tmp_path: Path) -> None:
    folder = describe(tmp_path)
    vision = SimpleNamespace(model_type="clip_vision_model", hidden_size=1024)
    settings = {"state": "autoprune", "text_tower": str(folder)}
    (problem,) = refusal(settings, vllm_config(vision_config=vision))
    assert problem.where == f"{TOWER} {folder}"
    assert "24 wide, the model's 1024" in problem.what


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (vllm_config(architecture="PixtralForConditionalGeneration"), "has no pruned form"),
        (
            vllm_config(
                vision_config=SimpleNamespace(model_type="siglip_vision_model", hidden_size=24)
            ),
            "no [CLS] token",
        ),
        (vllm_config(vision_feature_layer=[-2, -5]), "several vision layers"),
        (vllm_config(vision_feature_select_strategy="full"), "'full'"),
    ],
    ids=["architecture", "SigLIP", "layers", "strategy"],
)
def test_a_model_that_cannot_be_pruned(config: Any, said: str) -> None:
    (problem,) = refusal({"state": "autoprune"}, config)
    assert problem.where == "model"
    assert said in problem.what


def test_the_rust_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert places({"state": "autoprune"}) == ["VLLM_USE_RUST_FRONTEND"]


def test_lora_on_the_vision_tower() -> None:
    for wanted, refused in ((True, True), (False, False)):
        config = vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=wanted))
        if refused:
            assert places({"state": "autoprune"}, config) == ["--enable-tower-connector-lora"]
        else:
            assert resolve({"state": "autoprune"}, config).budget == 32


@pytest.mark.parametrize("name", ["cudagraph_mm_encoder", "compile_mm_encoder"])
def test_a_vision_tower_that_nothing_can_listen_to(name: str) -> None:
    config = vllm_config(compiled={name: True})
    assert places({"state": "autoprune"}, config) == [f"--compilation-config {name}"]
    assert resolve({"state": "autoprune"}, vllm_config(compiled={name: False})).budget == 32


def _of(base: str) -> dict[str, object]:
    """Settings of a state whose base policy is another one."""
    return {"state": edited(shipped(), {"/base_policy": {"name": base}})}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"model_type": "qwen2"}, "'qwen2'"),
        ({"bos_token_id": None}, "bos_token_id None"),
        ({"max_position_embeddings": 832}, "832 is below 833"),
    ],
)
def test_a_language_model_that_cannot_be_read(text: dict[str, object], said: str) -> None:
    config = vllm_config()
    resolve(_of("fastv"), config)
    vars(config.model_config.hf_config.text_config).update(text)
    (problem,) = refusal(_of("fastv"), config)
    assert said in problem.what
    resolve(_of("divprune"), config)  # it matters only to who reads it


def test_a_language_model_served_in_a_way_that_cannot_be_read() -> None:
    config = vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=False))
    config.parallel_config.pipeline_parallel_size = 2
    assert places(_of("fastv"), config) == ["--enable-lora", "--pipeline-parallel-size"]
    resolve(_of("divprune"), config)


def test_what_cannot_be_read_limits_only_what_requests_may_bring() -> None:
    config = vllm_config(lora=SimpleNamespace(enable_tower_connector_lora=False))
    found = resolve({"state": "autoprune", "requests": "states"}, config)
    ((need, reason),) = found.lacks
    assert (need, reason.partition(":")[0]) == ("language", "--enable-lora")
    assert found.needs == {"cls_attention", "instruction", "tower", "next_layer"}
    resolve({"state": "autoprune", "requests": "budget:16-64"}, config)


def test_rules_for_requests_that_are_none() -> None:
    assert places({"state": "autoprune", "requests": "everything"}) == ["--autoprune-requests"]


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_tower_that_is_read_to_its_end_has_no_next_layer(layer: int) -> None:
    resolve(_of("prumerge_plus"), vllm_config())
    (problem,) = refusal(_of("prumerge_plus"), vllm_config(vision_feature_layer=layer))
    assert "last layer" in problem.what
    resolve(_of("visionzip"), vllm_config(vision_feature_layer=layer))


def test_every_problem_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    settings = {
        "state": edited(shipped(), {"/schema": 1}),
        "budget": "x",
        "text_tower": str(tmp_path),
        "feature_cache_gb": "x",
        "buget": 1,
    }
    assert set(places(settings, vllm_config(architecture="Other"))) == {
        "#/schema",
        "--autoprune-budget",
        f"{TOWER} {tmp_path}",
        "--autoprune-feature-cache-gb",
        "additional_config/autoprune/buget",
        "VLLM_USE_RUST_FRONTEND",
        "model",
    }


# ---- what is served ----


def test_policies_of_a_served_state() -> None:
    found = served({"/constraints/selector/q_e": 2}, budget=8)
    assert (found.policy().budget, found.policy().quota) == (8, 2)
    assert (found.policy(16).budget, found.policy(16).quota) == (16, 2)
    assert found.policy(16, "reference").quota == 0
    assert found.policy(16) is found.policy(16)


def test_needs_are_those_of_every_budget_a_request_may_ask_for() -> None:
    """r_min = K leaves nothing to exchange at the default budget, but at a larger one."""
    fixed = served({"/base_policy": {"name": "divprune"}, "/constraints/selector/r_min": 8})
    assert fixed.policy().needs == frozenset()
    assert fixed.needs == fixed.policy(16).needs == {"cls_attention", "instruction"}


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_served_state_travels(how: str, registered: Registered) -> None:
    tower = TextTower("some/clip", 1, "because", 77, 768, 1024)
    sent = served({"/base_policy": {"name": "divprune"}}, 16, tower, cache_bytes=5)
    rules = RequestRules("states", 8, 64, stated=True)
    sent = dataclasses.replace(sent, rules=rules, lacks=(("language", "because"),))
    found = pickle.loads(pickle.dumps(sent)) if how == "pickle" else copy.deepcopy(sent)
    assert isinstance(found, ServedState)
    assert found.state.digest == sent.state.digest
    assert found.policy() == sent.policy()
    assert found.policy(8, "reference") == sent.policy(8, "reference")
    assert (found.budget, found.tower, found.cache_bytes) == (16, tower, 5)
    assert (found.rules, found.lacks) == (rules, sent.lacks)
    # Where a state arrives it is served: a process without the flags knows of nothing else.
    assert [architecture for architecture, _ in registered.models] == [LLAVA]


# ---- the safety check at start-up ----


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base policy that gives one token twice, which no state can mend."""
    sound = BASE_POLICIES["divprune"]

    def repeats(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> Reference:
        found = sound.select(params, tokens, budget).picks
        return Reference(torch.cat([found[:, :1], found[:, :-1]], dim=1))

    monkeypatch.setitem(BASE_POLICIES, "divprune", dataclasses.replace(sound, function=repeats))


DIVPRUNE: dict[str, object] = {"/base_policy": {"name": "divprune"}}
CHECKS = ["preserve_budget", "no_shape_change", "deterministic"]


@pytest.mark.usefixtures("broken")
def test_a_state_that_breaks_its_promises_serves_its_base_policy(
    logged: pytest.LogCaptureFixture,
) -> None:
    data = edited(shipped(), DIVPRUNE)
    found = resolve({"state": data}, vllm_config())
    assert not found.policy().refines
    assert found.state.digest == state(DIVPRUNE).without_exchange().digest
    (record,) = logged.records
    assert record.levelname == "WARNING"
    assert "valid_indices" in record.getMessage()


@pytest.mark.usefixtures("broken")
def test_a_state_that_may_not_fall_back_is_refused() -> None:
    data = edited(shipped(), {**DIVPRUNE, "/safety": CHECKS})
    (problem,) = refusal({"state": data})
    assert problem.where == "state#/safety"
    assert "valid_indices" in problem.what
    assert "fallback_to_selection" in problem.mend


def test_a_sound_state_is_served_as_it_is(logged: pytest.LogCaptureFixture) -> None:
    for changes in ({}, {"/safety": CHECKS}):
        found = resolve({"state": edited(shipped(), {**DIVPRUNE, **changes})}, vllm_config())
        assert found.policy().refines
    assert logged.records == []


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "value", [{1, 2}, nested(100_000), 10**5000, b"bytes"], ids=["set", "deep", "huge", "bytes"]
)
def test_a_dictionary_that_is_no_json_is_told_as_every_other_problem(value: object) -> None:
    (problem,) = refusal({"state": {"schema": value}})
    assert problem.where == "#" and problem.what.startswith("not JSON: ")


def test_start_up_does_not_wait_for_a_large_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def noted(policy: PruningPolicy) -> SafetyRecord:
        checked.append(policy.budget)
        return SafetyRecord(())

    monkeypatch.setattr("vllm_autoprune.serving.vetting.safety_check", noted)
    for budget in (16, 256, 4096):
        resolve({"state": "autoprune", "budget": budget}, vllm_config())
    large = {"/budget/atom": "fixed_budget@512", "/constraints/selector/r_min": 512}
    data = edited(shipped(), large)
    resolve({"state": data, "budget": 4096}, vllm_config())
    assert checked == [16, 256, 256, 512]


# ---- adopt: from additional_config to the model config ----


def test_adopted_the_state_is_on_the_model_config_and_our_settings_are_gone(
    registered: Registered, logged: pytest.LogCaptureFixture
) -> None:
    config = vllm_config({"state": "autoprune", "budget": 16})
    before = config.additional_config
    adopt(config)
    found = served_state(config.model_config)
    assert found is not None
    assert found.budget == 16
    assert config.additional_config == {"theirs": {"x": 1}}
    assert "autoprune" in before  # the caller's own dictionary, perhaps of another engine
    assert [architecture for architecture, _ in registered.models] == [LLAVA]
    (record,) = logged.records
    assert found.state.digest[:12] in record.getMessage()


@pytest.mark.parametrize("additional", [{"theirs": 1}, {}, "opaque"], ids=repr)
def test_without_our_settings_nothing_is_touched(
    registered: Registered, additional: object
) -> None:
    config = vllm_config()
    config.additional_config = additional
    attributes = dict(vars(config.model_config))
    adopt(config)
    assert config.additional_config is additional
    assert vars(config.model_config) == attributes
    assert served_state(config.model_config) is None
    assert registered.models == []


def test_a_config_without_a_model_waits_for_the_one_that_has_it() -> None:
    config = vllm_config({"state": "autoprune"})
    config.model_config = None
    adopt(config)
    assert config.additional_config["autoprune"] == {"state": "autoprune"}


def test_a_mistake_on_the_command_line_ends_with_one_message(registered: Registered) -> None:
    config = vllm_config({"state": "nowhere", "budget": "x", "from_flags": True})
    with pytest.raises(SystemExit) as caught:
        adopt(config)
    said = str(caught.value.code)
    assert said.startswith("\nvllm-autoprune: cannot serve pruned: 2 problem(s)")
    assert "--autoprune-state nowhere" in said and "--autoprune-budget" in said
    assert caught.value.__suppress_context__
    assert served_state(config.model_config) is None
    assert registered.models == []


@pytest.mark.parametrize("settings", [{"state": "nowhere"}, "autoprune"], ids=repr)
def test_a_mistake_in_python_is_an_exception(settings: object) -> None:
    with pytest.raises(ConfigError):
        adopt(vllm_config(settings))


def test_another_vllm_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "BELOW", compat.LOWEST)
    with pytest.raises(ConfigError, match="outside"):
        adopt(vllm_config({"state": "autoprune"}))


def test_a_vllm_in_which_names_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(stock: str) -> None:
        raise ConfigError("vLLM", [Problem("vllm.x", f"is not there for {stock}", "mend")])

    monkeypatch.setattr(config_module, "require_hooks", moved)
    with pytest.raises(ConfigError, match=f"not there for {LLAVA}"):
        adopt(vllm_config({"state": "autoprune"}))


@pytest.mark.compat
def test_the_state_stays_out_of_the_compile_hash() -> None:
    """Compiled graphs do not depend on it, so another state must not compile them anew."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.utils import get_hash_factors, hash_factors

    class Model(SimpleNamespace):
        def compute_hash(self) -> str:
            return "model"

    def hashed(settings: object) -> str:
        config = VllmConfig.__new__(VllmConfig)
        vars(config).update(vars(stock))
        additional = {"theirs": 1}
        vars(config).update(model_config=Model(**model), additional_config=additional)
        if settings is not None:
            vars(config).update(additional_config={**additional, "autoprune": settings})
            adopt(config)
            assert served_state(config.model_config) is not None
        return config.compute_hash()

    stock, model = VllmConfig(), vars(vllm_config().model_config)
    assert hashed({"state": "autoprune"}) == hashed({"state": "autoprune", "budget": 64})
    assert hashed({"state": "autoprune"}) == hashed(None)
    # A model config hashes the fields it declares, and ours is none of them.
    bare = ModelConfig.__new__(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        vars(bare)[field.name] = None
    before = hash_factors(get_hash_factors(bare, set()))
    compat.attach(bare, "autoprune", served())
    assert hash_factors(get_hash_factors(bare, set())) == before

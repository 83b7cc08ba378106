"""Boundaries of imports, and what the packages export."""

from __future__ import annotations

import importlib.metadata
import inspect
import pickle
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import vllm_autoprune
from tests.modules import SOURCES, imported_modules
from vllm_autoprune import errors
from vllm_autoprune.errors import AutopruneError, Problem

# What a room may import of the rooms beside it: arrows point down only. Of serving, sorted by
# process: API server and worker are separate processes and never import each other.
SHARED = {
    "compat",
    "description",
    "history",
    "identities",
    "inputs",
    "plan",
    "plan_rules",
    "request_rules",
    "request_states",
    "served_state",
    "settings",
    "state_codec",
}
ROOMS: dict[str, set[str]] = {
    "ops": {"errors"},
    "tpdsl": {"errors", "ops", "backbones"},
    "base_policies": {"errors", "tpdsl", "ops"},
    "serving.compat": set(),
    "serving.history": set(),
    "serving.request_rules": {"history"},
    "serving.settings": {"history", "request_rules"},
    "serving.flags": {"settings"},
    "serving.plan_codec": set(),
    "serving.state_codec": set(),
    "serving.state_safety": set(),
    "serving.plan": {"plan_codec", "state_codec"},
    "serving.identities": {"plan", "served_state"},
    "serving.inputs": {"plan"},
    "serving.served_state": {
        "compat",
        "plan",
        "request_rules",
        "state_codec",
    },
    "serving.description": {"request_rules", "served_state"},
    "serving.request_states": {"plan", "state_codec", "state_safety"},
    "serving.plan_rules": {"plan", "request_rules", "served_state", "state_codec"},
    "serving.encoder_steps": {"compat", "plan", "state_codec"},
    "serving.api": SHARED,
    "serving.worker": SHARED,
    "serving.models": SHARED | {"api", "worker"},
    "serving.startup_rules": SHARED | {"encoder_steps", "models"},
    "serving.startup": SHARED
    | {"api", "encoder_steps", "models", "startup_rules", "state_safety"},
    "serving.plugin": {"compat", "flags", "settings", "startup"},
}
# All packages of the repository, lowest first: a package imports itself and those of lower layers.
LAYERS = (
    {"vllm_autoprune.errors"},
    {"vllm_autoprune.hub", "vllm_autoprune.tower"},
    {
        "vllm_autoprune.record_file",
        "vllm_autoprune.backbones",
        "vllm_autoprune.flags",
        "vllm_autoprune.text_tower",
    },
    {"vllm_autoprune.connection", "vllm_autoprune.stream", "vllm_autoprune.statistics"},
    {"vllm_autoprune.http_client", "vllm_autoprune.report", "vllm_autoprune.advise"},
    {"vllm_autoprune.probe", "vllm_autoprune.ops"},
    {"vllm_autoprune.tpdsl"},
    {"vllm_autoprune.base_policies"},
    {"vllm_autoprune.serving"},
    {"vllm_autoprune.selftest"},
    {"vllm_autoprune.checkpoint", "vllm_autoprune.positions"},
    {"vllm_autoprune.evaluation"},
    {"vllm_autoprune.explain"},
    {"vllm_autoprune.picture"},
    {"offline_search"},
    {"vllm_autoprune.cli"},
    {"vllm_autoprune.__main__"},
    {"benchmarks"},
)
HEAVY = {"vllm", "transformers"}


def modules_of(name: str) -> set[str]:
    """A module, or those of a folder."""
    return {
        module for module in SOURCES if module == name or module.startswith(f"{name}.")
    }


CORE = sorted(
    set[str]().union(
        *(modules_of(f"vllm_autoprune.{room}") for room in ROOMS if "." not in room)
    )
)


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down(room: str) -> None:
    prefix, _, name = f"vllm_autoprune.{room}".rpartition(".")
    modules = modules_of(f"{prefix}.{name}")
    beside = {
        f"{module}: {imported}"
        for module in modules
        for imported in imported_modules(SOURCES[module])
        if imported.startswith(f"{prefix}.")
        and imported.removeprefix(f"{prefix}.").split(".")[0]
        not in {name, *ROOMS[room]}
    }
    assert modules and beside == set()


def test_every_module_of_serving_is_in_a_room() -> None:
    rooms = set[str]().union(*(modules_of(f"vllm_autoprune.{room}") for room in ROOMS))
    assert modules_of("vllm_autoprune.serving") - rooms == {"vllm_autoprune.serving"}


def test_no_package_imports_a_higher_one_and_every_package_has_a_layer() -> None:
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}

    def package(module: str) -> str:
        parts = module.split(".")
        names = (parts[0], ".".join(parts[:2]))
        return next((name for name in names if name in layers), module)

    assert {package(module) for module in SOURCES} - layers.keys() == {"vllm_autoprune"}
    wrong = {
        f"{module} imports {name}"
        for module, path in SOURCES.items()
        for name in imported_modules(path)
        if name.split(".")[0] in ("tests", "scripts")
        or (
            {package(module), package(name)} <= layers.keys()
            and package(name) != package(module)
            and layers[package(name)] >= layers[package(module)]
        )
    }
    assert wrong == set()


def test_there_is_no_import_cycle() -> None:
    graph = {
        name: (imported_modules(path) & SOURCES.keys()) - {name}
        for name, path in SOURCES.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_core_loads_no_server() -> None:
    for module in CORE:
        names = {name.split(".")[0] for name in imported_modules(SOURCES[module])}
        assert not names & HEAVY, module


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (f"import importlib as i; [*map(i.import_module, {['vllm_autoprune', *CORE]!r})]", HEAVY),
        ("from vllm_autoprune_command import main; sys.argv = ['x', '--version']; main()",
         {"torch", "vllm_autoprune"}),
        ("from vllm_autoprune.cli.main import main; main(['atoms'])",
         {"PIL", "matplotlib", *HEAVY}),
        ("import offline_search.search, offline_search.report",
         {"optuna", "openevolve", "matplotlib", *HEAVY}),
        # A server without settings registers no counters.
        ("from vllm_autoprune.serving.plugin import register; register();"
         "from vllm.config import VllmConfig; VllmConfig()", {"vllm_autoprune.serving.startup"}),
    ],
    ids=["core", "version", "command", "search", "server"],
)  # fmt: skip
def test_starting_loads_nothing_heavy(code: str, absent: set[str]) -> None:
    code = f"import sys; {code}; print(sorted({absent!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    version = importlib.metadata.version("vllm-autoprune")
    assert lines[-1] == "[]" and ("--version" not in code or lines[0] == version)


def test_pictures_are_opened_in_one_place() -> None:
    """Which decodes them whole, as vLLM does, and refuses what is none."""
    text = {name: path.read_text(encoding="utf-8") for name, path in SOURCES.items()}
    readers = {
        name for name, source in text.items() if re.search(r"Image\.open\(", source)
    }
    assert readers == {"vllm_autoprune.evaluation.pictures"}


# ---- public surface ----

ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, Exception) and error.__module__ == errors.__name__
]


def test_public_names() -> None:
    # Submodules become attributes of a package as they are imported; they are not its names.
    public = {
        name
        for name, value in vars(vllm_autoprune).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(vllm_autoprune.__all__)


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = re.findall("── (\\w+)", errors.__doc__ or "")
    leaves = [e.__name__ for e in ERRORS if e is not AutopruneError]
    assert sorted(drawn) == sorted(leaves)
    assert all(issubclass(error, AutopruneError) for error in ERRORS)


@pytest.mark.parametrize("error", ERRORS)
def test_a_message_lists_every_problem_and_survives_pickling(
    error: type[AutopruneError],
) -> None:
    problems = [
        Problem("/budget/atom", "unknown atom 'x'", "use 'y'"),
        Problem("", "empty", "add"),
    ]
    sent = error("state s.json", problems)
    assert str(sent).splitlines() == [
        "state s.json: 2 problems",
        "  - /budget/atom: unknown atom 'x' -> use 'y'",
        "  - /: empty -> add",
    ]
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error and str(received) == str(sent)
    assert received.problems == tuple(problems) and received.subject == "state s.json"

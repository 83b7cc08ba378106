"""Compare what every state and atom selects in this working tree with an earlier revision.

``python scripts/compare_states.py REVISION`` runs the selection of both source trees on the same
seeded synthetic images and compares the digests of the shipped states, the indices they keep, the
bytes of the rows they return, and the JSON Schema of a state (without its descriptions). It prints
every difference and exits with status 1 if there is one.

Each source tree is read by a process of its own: ``--record SOURCE`` prints the record of one tree.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUDGETS = (8, 16, 64)

MODULES = {
    "probes": ("vllm_autoprune.tpdsl.executor.probes", "vllm_autoprune.tpdsl.probes"),
    "catalogue": ("vllm_autoprune.tpdsl.states.catalogue", "vllm_autoprune.tpdsl.catalogue"),
    "load": ("vllm_autoprune.tpdsl.states.load", "vllm_autoprune.tpdsl.load"),
}
"""Modules that are not part of the public interface, by their present and their earlier path."""


def main() -> int:
    """Compare with a revision, or print the record of one source tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="git revision to compare with")
    parser.add_argument("--record", type=Path, metavar="SOURCE", help="print one tree's record")
    options = parser.parse_args()
    if options.record is not None:
        print(json.dumps(record()))
        return 0
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(root), "archive", options.revision], capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        before, after = record_of(Path(folder)), record_of(root)
    names = sorted(before.keys() | after.keys())
    differences = [name for name in names if before.get(name) != after.get(name)]
    for name in differences:
        print(f"{name}: {before.get(name, 'absent')} before, {after.get(name, 'absent')} now")
    print(f"{len(names)} values compared with {options.revision}, {len(differences)} differ")
    return 1 if differences else 0


def record_of(source: Path) -> dict[str, str]:
    """The record of a source tree, made by a process that imports it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(source)]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=source, capture_output=True, check=True)
    values: dict[str, str] = json.loads(ran.stdout)
    return values


def record() -> dict[str, str]:
    """Name -> value of everything that is compared, for the source tree on the import path."""
    from vllm_autoprune import PruningState, load_state

    values = {"schema": digest(without_descriptions(PruningState.model_json_schema()))}
    for name in module("load").shipped_states():
        state = load_state(name)
        values[f"{name}: digest"] = state.digest
        for budget in BUDGETS:
            values.update(selections(f"{name} at K = {budget}", state, budget))
    whole = json.loads(load_state("autoprune").dumps())
    for place in module("catalogue").PLACES:
        if place.pointer == "/budget":
            continue
        for atom in place.names:
            state = load_state(json.dumps(with_atom(whole, place.pointer, atom, many=place.many)))
            values.update(selections(f"{place.pointer} {atom}", state, 16))
    return values


def selections(name: str, state: Any, budget: int) -> dict[str, str]:
    """What a state selects from each synthetic image, as digests."""
    from vllm_autoprune import materialize, refine

    values = {}
    policy = materialize(state.model_copy(update={}), budget)
    for index, tokens in enumerate(module("probes").synthetic_probes(budget)):
        result = refine(policy, tokens)
        parts = [result.indices, result.reference, result.features, result.fallback]
        values[f"{name}: image {index}"] = digest([part.tolist() for part in parts])
    return values


def with_atom(state: Any, pointer: str, atom: str, *, many: bool) -> Any:
    """A copy of a state that names this atom in one field, active where its default is not."""
    data = json.loads(json.dumps(state))
    *path, last = pointer.split("/")[1:]
    parent = data
    for step in path:
        parent = parent[step]
    call: dict[str, Any] = {"atom": atom}
    if pointer == "/reassembly":
        call |= {"margin": 0.1} if "exchange" in atom else {"strength": 0.3}
    parent[last] = [call] if many else call
    return data


def module(name: str) -> Any:
    """A module by its present path, or by the one it had before."""
    for path in MODULES[name]:
        try:
            if find_spec(path) is not None:
                return import_module(path)
        except ModuleNotFoundError:  # the package that would hold it is not there either
            continue
    raise ModuleNotFoundError(name)


def without_descriptions(schema: Any) -> Any:
    """A JSON Schema without the texts that are for people."""
    if isinstance(schema, list):
        return [without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may be called "description"; its schema is an object, and a text is not.
    return {
        key: without_descriptions(value)
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str))
    }


def digest(value: Any) -> str:
    """The first digits of the SHA-256 of a value's JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())

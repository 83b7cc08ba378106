"""Build the last commit twice, compare the bytes, check the wheel, and write what is published.

``make release`` runs it in the environment of requirements/release.txt. It writes out/release:
``dist`` with wheel and sdist, an SBOM for each supported minor version of vLLM, ``SHA256SUMS``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.setup_env import LOCK, TORCH_CPU_INDEX  # noqa: E402

OUT = ROOT / "out/release"
TOOLS = Path(sys.executable).parent

VLLM_IMAGE = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
"""Python and platform of vLLM's image, for which dependencies are resolved."""

BROUGHT_BY_VLLM = (
    "cachetools",
    "httpx",
    "msgspec",
    "numpy",
    "packaging",
    "pillow",
    "prometheus_client",
    "tqdm",
)
"""What the wheel imports and leaves to vLLM to declare (pyproject.toml)."""


class _Surroundings(NamedTuple):
    """What differs between the two builds and must not show in their bytes."""

    folder: str
    umask: int
    time_zone: str
    modified: int
    """Date of all files, in seconds."""


SURROUNDINGS = (
    _Surroundings("first", 0o022, "UTC", 1_700_000_000),
    _Surroundings("the second one", 0o077, "Pacific/Kiritimati", 1_000_000_000),
)


def _run(
    *command: str | Path, umask: int = -1, variables: Mapping[str, str] | None = None
) -> str:
    """Run a command in the repository and return what it prints; ends the release if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        umask=umask,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout.strip()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Wheel:
    """A wheel and what its metadata say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (self._metadata,) = distributions(path=[str(path)])
        self.version = self._metadata.version
        self.extras = self._metadata.metadata.get_all("Provides-Extra") or []

    @cached_property
    def requirements(self) -> dict[str, Requirement]:
        """What it requires without extras, by name."""
        lines = [Requirement(line) for line in self._metadata.requires or []]
        return {line.name: line for line in lines if not line.marker}

    def supported_vllm(self) -> list[str]:
        """Minor versions of vLLM that it allows, lowest first."""
        bounds = re.fullmatch(
            r"vllm<0\.(\d+),>=0\.(\d+)", str(self.requirements["vllm"])
        )
        if bounds is None:
            raise SystemExit(
                f"{self.path.name}: requires {self.requirements['vllm']}; say the range of vLLM as"
                " vllm>=0.X,<0.Y in pyproject.toml"
            )
        below, lowest = map(int, bounds.groups())
        return [f"0.{minor}" for minor in range(lowest, below)]


def build(folder: Path, surroundings: _Surroundings) -> dict[str, Path]:
    """Build the sdist, and the wheel from it, of a copy of the last commit; returns them by name.

    Their entries are dated as the commit, not as the files.
    """
    source = folder / surroundings.folder
    built = folder / f"{surroundings.folder} built"
    export = ("git", "checkout-index", "--all", f"--prefix={source}/")
    _run(*export, umask=surroundings.umask)
    for path in source.rglob("*"):
        os.utime(path, (surroundings.modified, surroundings.modified))
    _run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source),
        umask=surroundings.umask,
        variables={
            "TZ": surroundings.time_zone,
            "SOURCE_DATE_EPOCH": _run("git", "log", "-1", "--format=%ct"),
        },
    )
    return {path.name: path for path in sorted(built.iterdir())}


def require_equal(*builds: Mapping[str, Path]) -> None:
    """Refuse builds that differ in names or bytes."""

    def digest(archives: Mapping[str, Path], name: str) -> str:
        return _digest(archives[name]) if name in archives else "missing"

    names = sorted({name for archives in builds for name in archives})
    differ = [
        name
        for name in names
        if len({digest(archives, name) for archives in builds}) > 1
    ]
    if differ:
        raise SystemExit(
            f"{', '.join(differ)}: differs between builds of one commit; compare the archives'"
            " entries: what a build reads beside the commit must not show in it"
        )


def _uv(*arguments: str | Path) -> str:
    """Run uv with the package indexes that pip is told to use."""
    names = {
        "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
        "PIP_EXTRA_INDEX_URL": "UV_INDEX",
        "PIP_FIND_LINKS": "UV_FIND_LINKS",
    }
    indexes = {
        name: os.environ[pip] for pip, name in names.items() if pip in os.environ
    }
    return _run(TOOLS / "uv", "--quiet", *arguments, variables=indexes)


def resolve(pins: Path, *requirements: str) -> None:
    """Resolve requirements by metadata alone, without fetching vLLM, and write the pins.

    Releases later than the commit are passed over, so that another day writes the same.
    """
    commit_date = _run("git", "log", "-1", "--format=%cI")
    source = pins.with_suffix(".in")
    source.write_text("\n".join(requirements))
    _uv(
        "pip",
        "compile",
        *VLLM_IMAGE,
        "--no-annotate",
        "--no-header",
        "--generate-hashes",
        "--no-emit-package",
        "vllm-autoprune",
        "--exclude-newer",
        commit_date,
        "--output-file",
        pins,
        source,
    )


def resolve_beside_vllm(wheel: Wheel, minor: str, folder: Path) -> Path:
    """Resolve the wheel beside a minor version of vLLM, with and without its extras; returns the
    pins without.

    Ends the release where a range excludes vLLM's.
    """
    extras = f"{wheel.path}[{','.join(wheel.extras)}]"
    resolve(folder / f"extras-{minor}.txt", extras, f"vllm=={minor}.*")
    pins = folder / f"vllm-{minor}.txt"
    resolve(pins, str(wheel.path), f"vllm=={minor}.*")
    return pins


def write_sbom(wheel: Wheel, pins: Path) -> Path:
    """Write what was resolved as an SBOM whose subject is the wheel."""
    (vllm,) = re.findall(r"^vllm==(\S+)", pins.read_text(), re.MULTILINE)
    path = OUT / f"vllm_autoprune-{wheel.version}-vllm-{vllm}.cdx.json"
    _run(
        *(TOOLS / "cyclonedx-py", "requirements", "--output-reproducible"),
        "--pyproject",
        "pyproject.toml",
        "--mc-type",
        "library",
        "-o",
        path,
        pins,
    )
    # The tool knows neither the version, which is dynamic, nor what the wheel itself requires.
    bom = json.loads(path.read_text())
    subject = bom["metadata"]["component"]
    subject["version"] = wheel.version
    subject["purl"] = f"pkg:pypi/vllm-autoprune@{wheel.version}"
    subject["hashes"] = [{"alg": "SHA-256", "content": _digest(wheel.path)}]
    direct = [
        component["bom-ref"]
        for component in bom["components"]
        if component["name"] in wheel.requirements
    ]
    for part in bom["dependencies"]:
        if part["ref"] == subject["bom-ref"]:
            part["dependsOn"] = direct
    path.write_text(json.dumps(bom, indent=2) + "\n")
    return path


def install_alone(wheel: Wheel, environment: Path) -> None:
    """Install the wheel into an empty environment, with what it imports and without vLLM."""
    _uv("venv", "--python", sys.executable, environment)
    declared = [
        str(line) for name, line in wheel.requirements.items() if name != "vllm"
    ]
    install = ("pip", "install", "--python", str(environment / "bin/python"))
    imported = ("--constraint", str(LOCK), *declared, *BROUGHT_BY_VLLM)
    try:
        _uv(*install, *imported)
    except SystemExit:  # as in setup_env.py, of torch
        index = ("--index", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match")
        _uv(*install, *index, *imported)
    _uv(*install, "--no-deps", wheel.path)


def require_answers(wheel: Wheel, folder: Path) -> None:
    """Refuse a wheel whose command misses anything but vLLM in an environment of its own."""
    install_alone(wheel, folder / "empty")

    def ask(*words: str) -> str:
        done = subprocess.run(
            [folder / "empty/bin/vllm-autoprune", *words],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder)},
            text=True,
            capture_output=True,
        )
        if not done.stdout:
            raise SystemExit(f"vllm-autoprune {' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    findings = json.loads(ask("doctor", "--json"))["findings"]
    answers = {
        "version": ask("--version"),
        "states": len(json.loads(ask("list", "--all", "--json"))),
        "missing": {part["what"] for part in findings if part["status"] == "fail"},
    }
    expected = {
        "version": wheel.version,
        "states": len([*(ROOT / "policies").glob("*.json")]),
        "missing": {"vllm", "hooks"},
    }
    if answers != expected:
        raise SystemExit(f"{wheel.path.name}: answers {answers}, not {expected}")


def require_released(wheel: Wheel) -> None:
    """Refuse a commit that is tagged as another version, or whose changes are not written yet."""
    tag = f"v{wheel.version}"
    tags = _run("git", "tag", "--points-at", "HEAD", "--list", "v*").split()
    if not tags:
        print(f"release: a rehearsal, for the commit has no tag {tag}")
        return
    if tags != [tag]:
        raise SystemExit(f"{' '.join(tags)}: the version is {wheel.version}; tag {tag}")
    if f"\n## {wheel.version} (" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(
            f"CHANGELOG.md: has no {wheel.version}; run towncrier (RELEASING.md) and tag anew"
        )


def main() -> None:
    """Build, check and write the release; prints how to publish it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if changes := _run("git", "status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(
            f"{changes}\nnot committed: the last commit is what is released; commit or stash"
        )
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print("release: building twice", flush=True)
        require_equal(*(build(folder, surroundings) for surroundings in SURROUNDINGS))
        shutil.copytree(folder / f"{SURROUNDINGS[0].folder} built", OUT / "dist")
        archives = sorted((OUT / "dist").iterdir())
        _run(sys.executable, "-m", "twine", "check", "--strict", *archives)
        (wheel,) = (Wheel(path) for path in archives if path.suffix == ".whl")
        require_released(wheel)
        boms = []
        for minor in wheel.supported_vllm():
            print(f"release: resolving beside vLLM {minor}", flush=True)
            boms.append(write_sbom(wheel, resolve_beside_vllm(wheel, minor, folder)))
        print("release: trying the wheel in an empty environment", flush=True)
        require_answers(wheel, folder)
    sums = [
        f"{_digest(path)}  {path.relative_to(OUT)}\n" for path in [*archives, *boms]
    ]
    (OUT / "SHA256SUMS").write_text("".join(sums))
    print(f"release: out/release has\n{''.join(sums)}")
    _, _, steps = (ROOT / "RELEASING.md").read_text().partition("## Publish\n\n")
    print(f"To publish it:\n\n{steps.replace('VERSION', wheel.version)}")


if __name__ == "__main__":
    main()

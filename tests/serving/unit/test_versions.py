"""Compatibility with supported vLLM releases that are not installed: every hook, as called."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from tests.serving.versions import __main__ as command
from tests.serving.versions.release import Release, file_of, kept, names, read, symbols_of
from tests.serving.versions.sources import Sources, installed
from tests.serving.versions.symbols import Symbol, look_up
from vllm_autoprune.serving.compat import BELOW, LOWEST
from vllm_autoprune.serving.hooks import HOOKS, Hook, find_missing_names

LOOKED_AT: Mapping[str, str] = {
    "vllm.engine.arg_utils.EngineArgs.add_cli_args": "flags of vLLM's own came; ours are added "
    "to what it returns",
    "vllm.engine.arg_utils.EngineArgs.create_model_config": "one more field is set; ours is added "
    "to what it returns",
    "vllm.v1.core.encoder_cache_manager.EncoderCacheManager.allocate": "references of a request "
    "are counted by image as well; what is allocated, and when it is asked, are what they were",
    "vllm.renderers.hf.HfRenderer.render_messages": "prompt embeddings that the chat template "
    "leaves out are dropped; messages and the prompt that is returned are what they were",
    "vllm.renderers.hf.HfRenderer.render_messages_async": "as render_messages",
    "vllm.renderers.online_renderer.OnlineRenderer.preprocess_chat": "reasoning effort and the "
    "token ids of the prompt are handed on; we read the request and change nothing",
    "vllm.entrypoints.anthropic.serving.AnthropicServingMessages": "no prompt of its own is "
    "rendered within a client's request; the wrapper of that method is left out",
    "vllm.model_executor.models.interfaces.SupportsMultiModal.get_language_model": "a child is "
    "the language model by its methods, `embed_input_ids` among them, no longer by a protocol; "
    "no tower here has that one",
    "vllm.v1.worker.gpu_worker.Worker.update_weights": "quantized heads of a draft model are "
    "restored besides; features are cleared after it all the same",
    "vllm.v1.worker.gpu_worker.Worker.finish_weight_update": "as update_weights",
}
"""Hooks whose code differs between the installed release and one that is kept, and why each will
do. A name that is not here has the same code in both, or the test below fails."""

RELEASES = kept()


@cache
def here() -> Sources:
    spec = importlib.util.find_spec("vllm")  # not imported: that takes ten seconds
    assert spec is not None and spec.origin is not None
    return installed(Path(spec.origin).parent)


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    value: Release = request.param
    return value


def test_every_supported_minor_version_is_recorded() -> None:
    from vllm_autoprune.serving.compat import vllm_version

    seen = {vllm_version(), *(Version(release.version) for release in RELEASES)}
    assert all(LOWEST <= version < BELOW for version in seen)
    minor_versions = {(LOWEST.major, minor) for minor in range(LOWEST.minor, BELOW.minor)}
    assert {(version.major, version.minor) for version in seen} == minor_versions


def test_a_release_has_every_hook(release: Release) -> None:
    listed = {f"{module}.{name}" for module, name in names()}
    again = f"python -m tests.serving.versions {release.version}"
    assert release.symbols.keys() == listed, f"hooks were added or removed: run `{again}`"
    assert [name for name, symbol in release.symbols.items() if symbol is None] == []


@pytest.mark.compat
def test_hooks_of_a_release_have_the_installed_signatures(release: Release) -> None:
    """Same kind, parameters and defaults; differing code needs a recorded reason."""
    installed_symbols = symbols_of(here())
    other: dict[str, tuple[Symbol | None, Symbol | None]] = {}
    for name, symbol in release.symbols.items():
        mine = installed_symbols[name]
        assert mine is not None and symbol is not None
        assert (symbol.kind, symbol.called) == (mine.kind, mine.called), name
        if symbol.code != mine.code:
            other[name] = (mine, symbol)
    assert other.keys() <= LOOKED_AT.keys()


def test_record_of_a_release_equals_its_wheel(release: Release) -> None:
    """Reads the wheel's sources in place, by ranges: about ten seconds, a few megabytes."""
    try:
        fetched = command.fetched(release.version)
    except OSError as error:
        pytest.skip(f"NOT RUN, the wheel of vLLM {release.version} is out of reach: {error}")
    assert fetched == release


@pytest.mark.compat
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.names[0]}")
def test_source_lookup_agrees_with_importing(hook: Hook) -> None:
    """For existing names, and for the same names misspelt."""
    misspelt = tuple(f"{name}_gone" for name in hook.names)
    assert [look_up(here(), hook.module, name) for name in misspelt] == [None] * len(misspelt)
    assert None not in [look_up(here(), hook.module, name) for name in hook.names]
    assert find_missing_names(hook) == ()


PACKAGE = {
    "p/__init__.py": "from .a import *\nfrom . import b as other\n",
    "p/a.py": '''
from typing import TYPE_CHECKING
from p.b import Base as Parent
if TYPE_CHECKING:
    from p.b import unseen
try:
    from p.b import fast
except ImportError:
    fast = None
class Child(Parent["int"]):
    """Docstring."""
    one: int
    def method(self, x: int, *, y: str = "s") -> int:
        """Docstring."""
        # a comment
        return x
    async def later(self): ...
    def __init__(self): self.held = {}
registry = Child()
_hidden = 1
''',
    "p/b.py": """
def __getattr__(name):
    if name == "lazy": return 1
class Base:
    def inherited(self, a, /, b=(1, 2)): return a
    two = 2
def unseen(): ...
def fast(x): ...
""",
    "p/circle.py": "from p.round import nothing\n",
    "p/round.py": "from p.circle import nothing\n",
}


def find_symbol(name: str, module: str = "p.a") -> Symbol | None:
    return look_up(PACKAGE.get, module, name)


@pytest.mark.parametrize(
    ("name", "kind", "where", "called"),
    [
        ("Child", "class", "p.a", "(Parent['int'])"),
        ("Child.method", "function", "p.a", "(self, x, *, y='s')"),
        ("Child.later", "function", "p.a", "async (self)"),
        ("Child.one", "value", "p.a", ""),
        ("Child.held", "value", "p.a", ""),
        ("Child.two", "value", "p.b", ""),
        ("Child.inherited", "function", "p.b", "(self, a, /, b=(1, 2))"),
        ("registry.method", "function", "p.a", "(self, x, *, y='s')"),
        ("registry.held", "value", "p.a", ""),
        ("fast", "function", "p.b", "(x)"),
    ],
)
def test_find_symbol(name: str, kind: str, where: str, called: str) -> None:
    symbol = find_symbol(name)
    assert symbol is not None
    assert (symbol.kind, symbol.where, symbol.called) == (kind, where, called)


def test_find_symbol_through_packages() -> None:
    assert find_symbol("Child", "p") == find_symbol("Child")
    assert find_symbol("lazy", "p.b") == Symbol("value", "p.b")
    assert find_symbol("other.fast", "p") == find_symbol("fast")
    assert find_symbol("b", "p") == Symbol("module", "p.b")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Child.gone", "p.a"),
        ("unseen", "p.a"),  # for type checkers alone
        ("_hidden", "p"),  # not imported by a star
        ("slow", "p.b"),
        ("anything", "p.c"),
        ("nothing", "p.circle"),
    ],
)
def test_missing_symbol(name: str, module: str) -> None:
    assert find_symbol(name, module) is None


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("        # a comment\n", "\n\n        # another\n", True),
        (
            '"""Docstring."""\n        # a',
            '"""Other words,\n        two lines."""\n        # a',
            True,
        ),
        ("return x\n", "return x + 1\n", False),
    ],
)
def test_digest_ignores_comments_and_docstrings(old: str, new: str, same: bool) -> None:
    edited = {**PACKAGE, "p/a.py": PACKAGE["p/a.py"].replace(old, new)}
    assert edited["p/a.py"] != PACKAGE["p/a.py"]
    before, after = find_symbol("Child.method"), look_up(edited.get, "p.a", "Child.method")
    assert before is not None and after is not None
    assert (before.code == after.code) is same


def test_the_command_writes_and_compares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbols = {"p.a": Symbol("value", "p"), "p.gone": None}
    release_record = Release(version="9.9", wheel="vllm-9.9.whl", sha256="0", symbols=symbols)
    monkeypatch.setattr("tests.serving.versions.release.FOLDER", tmp_path)
    monkeypatch.setattr(command, "fetched", lambda version: release_record)
    assert command.main(["9.9", "--check"]) == 1
    assert command.main(["9.9"]) == 0
    assert "1 of 2 names\nnot there: p.gone\n" in capsys.readouterr().out
    assert read(file_of("9.9")) == release_record
    assert command.main(["9.9", "--check"]) == 0

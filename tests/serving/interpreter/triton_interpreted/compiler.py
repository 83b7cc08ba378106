"""Compiler of the backend, which the interpreter never calls."""

from __future__ import annotations

from types import ModuleType

from triton.backends import compiler


class InterpretedBackend(compiler.BaseBackend):
    """Compiler without stages; Triton requires a concrete class."""

    @staticmethod
    def supports_target(target: compiler.GPUTarget) -> bool:
        """Whether the target is the interpreter's."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Constant, because nothing is compiled."""
        return "interpreted"

    def parse_options(self, options: dict[str, object]) -> object:
        """Return the options unchanged."""
        return options

    def add_stages(self, stages: dict[str, object], options: object, language: object) -> None:
        """Nothing to do."""

    def load_dialects(self, context: object) -> None:
        """Nothing to do."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Nothing to do."""
        return {}

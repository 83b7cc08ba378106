"""The half of a Triton backend that the interpreter never calls."""

from __future__ import annotations

from types import ModuleType

from triton.backends import compiler


class InterpretedBackend(compiler.BaseBackend):
    """Concrete, because Triton looks for a concrete class."""

    @staticmethod
    def supports_target(target: compiler.GPUTarget) -> bool:
        """Only the one that the driver names."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Of nothing."""
        return "interpreted"

    def parse_options(self, options: dict[str, object]) -> object:
        """Taken as they are."""
        return options

    def add_stages(self, stages: dict[str, object], options: object, language: object) -> None:
        """None."""

    def load_dialects(self, context: object) -> None:
        """None."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """None."""
        return {}

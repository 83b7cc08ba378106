"""A Python environment with the packages of the running one, but without the plugin."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.common import BenchmarkError

_PLUGIN = "vllm_autoprune"
_CHECK = f"""
from importlib.metadata import entry_points
from importlib.util import find_spec
import vllm
plugins = entry_points(group="vllm.general_plugins")
assert find_spec("{_PLUGIN}") is None and "autoprune" not in plugins.names
"""


def build_bare_environment(folder: Path) -> Path:
    """Path of its ``vllm`` command; run it without ``PYTHONPATH``.

    Every package of the running environment is a symbolic link there, but for the plugin's package
    and metadata, editable or not. Raises :class:`BenchmarkError` where the plugin is found all the
    same, or vLLM is not.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if _PLUGIN not in entry.name:
            (packages / entry.name).symlink_to(entry)
    script = Path(sys.executable).with_name("vllm").read_text()
    command = folder / "bin" / "vllm"
    command.write_text(f"#!{python}\n{script.partition(chr(10))[2]}")
    command.chmod(0o755)
    checked = subprocess.run(
        [python, "-I", "-c", _CHECK], capture_output=True, text=True, check=False
    )
    if checked.returncode:
        raise BenchmarkError(f"no environment without the plugin: {checked.stderr}")
    return command

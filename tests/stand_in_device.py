"""Tensors of torch's meta device in place of a GPU's: whatever would wait for a GPU raises.

The meta device has no values, so reading one raises by itself, and so does most mixing of devices.
:func:`forbid_waiting` refuses what it lets pass: uploads of host data that is not staged, which a
GPU finishes all its work for, and indices that lie on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")

_aten = torch.ops.aten
_FROM_DATA = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class WaitsForDevice(AssertionError):
    """A call that would wait for a GPU, or mix its tensors with the host's."""


class _NoUploadOfPythonData(TorchFunctionMode):
    """Python data, as a tensor or an index, is copied from memory that is not pinned."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                raise WaitsForDevice("a list as an index")
        result = func(*args, **(kwargs or {}))
        if func in _FROM_DATA and result.is_meta:
            data = args[1] if func is Tensor.new_tensor else args[0]
            if not (isinstance(data, Tensor) and data.is_meta):
                raise WaitsForDevice(f"{func.__name__}() of host data on the device")
        return result


class _NoWaitingCopies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        tensors = [
            part for part in tree_leaves((args, named)) if isinstance(part, Tensor)
        ]
        if func is _aten.copy_.default:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else named.get("non_blocking", False))
            if target.is_meta != source.is_meta:
                if waits:
                    raise WaitsForDevice(
                        "a copy between host and device that is waited for"
                    )
                return target  # no data to copy
        elif func is _aten._to_copy.default:
            (source,) = args
            target = torch.device(named.get("device") or source.device)
            if source.is_meta and target.type != "meta":
                raise WaitsForDevice("a tensor of the device as a new one of the host")
            if (
                not source.is_meta
                and target.type == "meta"
                and not named.get("non_blocking")
            ):
                raise WaitsForDevice("an upload that is waited for")
        else:
            # Tensors without dimensions are numbers, which kernels take as arguments.
            kinds = {part.is_meta for part in tensors if part.dim()}
            if len(kinds) > 1:
                raise WaitsForDevice(f"{func} mixes tensors of host and device")
        return _run_once(func, args, named)


@cache
def _returns_new_tensors(func: Any) -> bool:
    """Whether an operator writes to no argument, and returns none and no view of one."""
    schema = func._schema
    return all(part.alias_info is None for part in (*schema.arguments, *schema.returns))


def _describe(part: Any) -> object:
    """What a meta kernel reads of its arguments, as a key."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.is_meta
    if isinstance(part, list | tuple):
        return tuple(map(_describe, part))
    if isinstance(part, dict):
        return tuple((name, _describe(value)) for name, value in part.items())
    return type(part), part


_RESULTS: dict[object, Any] = {}
"""Results of operators by their arguments: torch's meta kernels take 0.2 ms each in Python."""


def _run_once(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The result of an operator, whose kernel runs once; one that raises does so every time."""
    if not _returns_new_tensors(func):
        return func(*args, **named)
    key = (func, _describe(args), _describe(named))
    if key not in _RESULTS:
        result = func(*args, **named)
        parts = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(part, Tensor) and part.is_meta for part in parts):
            return result
        _RESULTS[key] = result
    result = _RESULTS[key]
    return _renew(result) if isinstance(result, Tensor) else (*map(_renew, result),)


def _renew(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE
    )


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Within it, work on the meta device may neither read its tensors nor wait for them."""
    with _NoUploadOfPythonData(), _NoWaitingCopies():
        yield

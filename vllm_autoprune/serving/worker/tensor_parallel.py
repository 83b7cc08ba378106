"""Collectives over tensor-parallel ranks; every rank has to call them at the same point."""

from __future__ import annotations

from torch import Tensor


def world_size() -> int:
    """How many ranks share the model; 1 where nothing is distributed."""
    from vllm.distributed import get_tp_group, model_parallel_is_initialized

    return int(get_tp_group().world_size) if model_parallel_is_initialized() else 1


def is_rank_zero() -> bool:
    """True on rank 0, and where nothing is distributed."""
    from vllm.distributed import get_tp_group

    return world_size() == 1 or int(get_tp_group().rank_in_group) == 0


def sum_over_ranks(part: Tensor) -> Tensor:
    """Sum the tensors of all ranks; bit-identical on every rank."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    total: Tensor = tensor_model_parallel_all_reduce(part)
    return total


def gather_over_ranks(part: Tensor, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks along ``dim``, in rank order."""
    from vllm.distributed import tensor_model_parallel_all_gather

    gathered: Tensor = tensor_model_parallel_all_gather(part.contiguous(), dim)
    return gathered


def broadcast_rank_zero(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor to every rank."""
    from vllm.distributed import get_tp_group

    broadcast: Tensor = get_tp_group().broadcast(tensor, src=0)
    return broadcast

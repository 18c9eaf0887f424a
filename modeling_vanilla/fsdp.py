"""Weights, gradients and Adam's moments shared out to the devices (FSDP2, PyTorch's `fully_shard`).

Tensors of a sharded model are DTensors, of which every device holds some rows. All devices have to call these
functions together, in the same order. With mixed precision the layers' half-precision copies stay until the backward
pass: what is saved are gradients, moments and float32 weights.
"""

import copy
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


KNOWS_CPUS = hasattr(torch.cpu.Stream, "record_event")  # which `fully_shard` calls; PyTorch 2.6 lacks it


def shard(model: PreTrainedModel, device_type: str, devices: int) -> PreTrainedModel:
    """Return a copy of a model, shared out to devices, which gather its layers one at a time to compute."""
    mesh, sharded = init_device_mesh(device_type, (devices,)), copy.deepcopy(model)
    for module in (*sharded.get_encoder().layers, *sharded.get_decoder().layers, sharded):
        fully_shard(module, mesh=mesh)
    overwrite(sharded.parameters(), model.parameters())  # those of the first process, should they differ
    return sharded


def part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows that this device holds; of a tensor that is not sharded, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows, on the CPU; a tensor that is not sharded as it is."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor as one that is sharded if the other one is."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)


@torch.no_grad()
def overwrite(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy tensors onto others, each of them whole or sharded, one at a time as memory may be short."""
    for target, source in zip(targets, sources, strict=True):
        part(target).copy_(part(like(whole(source), target)))

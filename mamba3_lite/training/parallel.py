"""One model over several processes: applied from outside, in one function.

The model's files know one device. What is wrapped is the model together with its loss
(:class:`~mamba3_lite.training.losses.LossModel`), because the loss reads the head's weight, which
under FSDP exists as a whole only inside the forward pass of its owner.

- ``ddp``: every rank holds everything; gradients are averaged while the backward pass goes on.
- ``fsdp``: FSDP2. Weights, gradients and moments are cut by rows; each block is gathered when it
  is needed, and the embedding, the final norm and the tied head form one group of their own.
- ``hsdp``: cut among the ranks of a host, repeated on every host.

A is complex and tiny, and FSDP wants one dtype in a group: every rank holds it whole, and its
gradients are averaged here (:func:`gradient_sync`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.losses import LossModel

# float32 weights, gradients and two moments.
_BYTES_PER_PARAMETER = 16
_SHARE_OF_MEMORY = 0.4


def chosen_mode(mode: str, model: nn.Module, world: World) -> str:
    """What ``auto`` is here: ddp as long as weights and moments leave room for activations."""
    if mode != "auto":
        return mode
    if world.device.type != "cuda":
        return "ddp"
    needed = _BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    memory = torch.cuda.get_device_properties(world.device).total_memory
    if needed <= _SHARE_OF_MEMORY * memory:
        return "ddp"
    return "hsdp" if world.size > world.local_size else "fsdp"


def parallelize(model: Mamba3Transformer, mode: str, world: World, *, shard_ranks: int = 0):
    """The model, already on its device, as every rank trains it; compile its blocks before.

    Args:
        mode: ddp, fsdp or hsdp.
        shard_ranks: ranks that share one copy under hsdp; 0: those of a host.

    Returns:
        What :func:`~mamba3_lite.training.losses.next_token_loss` takes in the model's place. The
        model itself is changed in place under fsdp and hsdp: its parameters become shards.

    Raises:
        UserError: the ranks cannot be divided so.
    """
    whole = LossModel(model)
    if mode == "ddp":
        return DistributedDataParallel(whole, gradient_as_bucket_view=True)
    if world.size == 1:
        # Nothing to cut, and FSDP's work around each block would cost a quarter of the speed.
        return whole
    mesh = _mesh(mode, world, shard_ranks)
    own = set()
    for layer in model.layers:
        kept = {p for p in layer.parameters(recurse=False) if p.is_complex()}
        fully_shard(layer, mesh=mesh, ignored_params=kept)
        own |= kept
    fully_shard(whole, mesh=mesh, ignored_params=own)
    return whole


def _mesh(mode: str, world: World, shard_ranks: int) -> DeviceMesh:
    if mode == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shard_ranks = shard_ranks or world.local_size
    if world.size % shard_ranks:
        raise UserError(
            f"parallel.shard_ranks: {world.size} ranks cannot be divided into groups of "
            f"{shard_ranks}; choose a divisor."
        )
    shape = (world.size // shard_ranks, shard_ranks)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one forward and backward pass: ranks exchange gradients only in the last of a window.

    A plain model needs nothing.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield
    if isinstance(model, FSDPModule) and last:
        _average([p for p in model.parameters() if p.is_complex()])


def _average(parameters: list[nn.Parameter]) -> None:
    """Of the gradients of what every rank holds whole, in one exchange."""
    gradients = [torch.view_as_real(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))

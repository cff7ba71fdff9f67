"""The tensors of a model: under plain names, tied ones once, whole or as the shards of a rank."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mamba3_lite.errors import UserError


def raw_module(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers: its keys carry no prefix."""
    for attribute in ("_orig_mod", "module", "_orig_mod"):  # either may wrap the other
        module = getattr(module, attribute, module)
    return module


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The state dict of a model, sharded tensors gathered; tied names share one tensor object.

    Every rank must ask; those that do not ``keep`` get nothing, and need no memory for it.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole: dict[int, Tensor] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            which = id(parameters[name])
            if which not in whole:
                whole[which] = gathered(tensor.to_local(), tensor, keep=keep)
            tensor = whole[which]
        found[name] = tensor
    return found if keep else {}


def gathered(held: Tensor, like: DTensor, *, keep: bool) -> Tensor:
    """The whole of which every rank holds what it holds of ``like``, on the CPU of those that keep.

    The others get an empty tensor.
    """
    whole = as_spread(held, like).full_tensor()
    return whole.cpu() if keep else whole.new_empty(0)


def as_spread(held: Tensor, like: DTensor) -> DTensor:
    """What this rank holds of a tensor that is cut as ``like``, as its part of the whole."""
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip


def as_held(whole: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, which every rank has, sharded as ``like``; nothing is sent."""
    on_device = whole.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into ``model`` in place, strictly: nothing is skipped, tied stays tied.

    A compiled or data-parallel model is unwrapped first, and of a sharded parameter each rank takes
    its rows. Raises ``UserError`` naming the keys that are missing, unexpected, of another shape or
    dtype, or that differ although the model ties them; the model is then unchanged.
    """
    model = raw_module(model)
    wanted = model.state_dict()
    shared = wanted.keys() & tensors.keys()
    mismatched = [
        f"{key} (model {tuple(wanted[key].shape)} {wanted[key].dtype}, "
        f"checkpoint {tuple(tensors[key].shape)} {tensors[key].dtype})"
        for key in sorted(shared)
        if wanted[key].shape != tensors[key].shape or wanted[key].dtype != tensors[key].dtype
    ]
    untied = [
        f"{alias} and {name}"
        for alias, name in ties(model).items()
        if alias in tensors and name in tensors and not torch.equal(tensors[alias], tensors[name])
    ]
    problems = [
        name_some("missing", sorted(wanted.keys() - tensors.keys())),
        name_some("unexpected", sorted(tensors.keys() - wanted.keys())),
        name_some("of another shape or dtype", mismatched),
        name_some("tied in the model but different", untied),
    ]
    if any(problems):
        raise UserError(
            f"weights do not fit the model: {'; '.join(filter(None, problems))}; "
            "load them with the model configuration they were trained with"
        )
    held = {
        name: as_held(tensor, like) if isinstance(like := wanted[name], DTensor) else tensor
        for name, tensor in tensors.items()
    }
    model.load_state_dict(held, strict=True)


def ties(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several: alias -> first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def store_once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to write, each memory once and contiguous, and the other names: alias -> name."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        view = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.data_ptr() and view in first:
            aliases[name] = first[view]
            continue
        first[view] = name
        # The format refuses tensors that overlap in memory; a view of a larger storage may.
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        unique[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    return unique, aliases


def name_some(what: str, keys: list[str], limit: int = 3) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return f"{len(keys)} {what}: {', '.join(keys[:limit])}{more}"

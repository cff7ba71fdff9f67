"""The data of a checkpoint that every rank writes a part of: torch's distributed checkpoints.

A folder holds the tensors of the model (``model.NAME``) and of the optimizer (``optim.INDEX.NAME``)
as torch.distributed.checkpoint cuts them, and ``rest.pt`` with what is no such tensor: the
optimizer's groups and the generators. What was written by any number of ranks, sharded or not, is
read by any other.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mamba3_lite.utils.weights import ties

_REST = "rest.pt"


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, of a sharded tensor this rank's part: training may go on."""
    return {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in tensors.items()
    }


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, tied tensors once."""
    aliases = ties(model)
    return {f"model.{n}": t for n, t in model.state_dict().items() if n not in aliases}


def write(
    folder: Path, tensors: dict[str, Tensor], rest: dict[str, Any] | None, group: Any
) -> list[Path]:
    """This rank's part; every rank must write at once.

    Args:
        rest: what the leader alone writes; None on the others.
        group: of all ranks on their CPUs, used by nobody else meanwhile; None: a process alone.

    Returns:
        The files that this rank has written, durable.
    """
    # Nothing that can fail comes before the exchange: one rank alone would leave the others in it.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _no_word_of_being_alone():
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    rank = 0 if group is None else torch.distributed.get_rank(group)
    if rest is not None:
        with (folder / _REST).open("wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
    own = {folder / ".metadata", folder / _REST} if rest is not None else set()
    found = (p for p in folder.iterdir() if p.name.startswith(f"__{rank}_") or p in own)
    return sorted(found)


@contextmanager
def _no_word_of_being_alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
        yield


def read_whole(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights under the model's names, training state) of a folder, on the CPU of one process.

    Tied names share one tensor object, as the ``rest`` says.
    """
    reader = dcp.FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with _no_word_of_being_alone():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    rest = torch.load(folder / _REST, map_location="cpu", weights_only=True)
    model = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    for alias, name in rest.pop("aliases").items():
        model[alias] = model[name]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optim."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimizer = {**rest.pop("optimizer"), "state": state}
    return model, {**rest, "optimizer": optimizer}

"""The command `convert`: a checkpoint in the other of its two layouts."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mamba3_lite.errors import UserError
from mamba3_lite.utils import sharded
from mamba3_lite.utils.checkpoint import Checkpoint, CheckpointManager, fingerprint


def convert(source: Path, target: Path, *, to: str, opt_step: int | None = None) -> int:
    """Copies one checkpoint into another folder, every number of it, in the layout ``to``.

    Args:
        to: ``files`` (model, optimizer and record) or ``sharded`` (parts, for many ranks).
        opt_step: which; None takes the newest intact one.

    Returns:
        Its optimizer step.

    Raises:
        UserError: there is none, or ``target`` holds that step already.
    """
    checkpoint = CheckpointManager(source).load(opt_step)
    if checkpoint is None:
        raise UserError(f"{source} holds no checkpoint; name a folder that a run saved to.")
    manager = CheckpointManager(target)
    if checkpoint.opt_step in manager.steps():
        raise UserError(
            f"{target} holds a checkpoint of step {checkpoint.opt_step} already; name another "
            "folder."
        )
    if to == "files":
        manager.save(checkpoint.opt_step, checkpoint.model, checkpoint.training, checkpoint.meta)
    else:
        _write_sharded(manager, checkpoint)
    return checkpoint.opt_step


def _write_sharded(manager: CheckpointManager, checkpoint: Checkpoint) -> None:
    first: dict[int, str] = {}
    aliases = {
        name: first[id(tensor)]
        for name, tensor in checkpoint.model.items()
        if first.setdefault(id(tensor), name) != name
    }
    rest: dict[str, Any] = {**checkpoint.training, "aliases": aliases}
    optimizer = dict(rest["optimizer"])
    state = optimizer.pop("state")
    tensors = {f"model.{n}": t for n, t in checkpoint.model.items() if n not in aliases}
    for index, moments in state.items():
        tensors |= {f"optim.{index}.{name}": tensor for name, tensor in moments.items()}
    folder = manager.sharded_folder(checkpoint.opt_step)
    files = sharded.write(folder, tensors, {**rest, "optimizer": optimizer}, None)
    found = {path.name: fingerprint(path) for path in files}
    manager.publish_sharded(checkpoint.opt_step, found, checkpoint.meta)


def convert_command(
    run_dir: Annotated[Path, typer.Argument(help="Run folder with checkpoints.")],
    out: Annotated[Path, typer.Option(help="Folder of the copy.")],
    to: Annotated[
        Literal["files", "sharded"], typer.Option(help="The layout of the copy.")
    ] = "files",
    opt_step: Annotated[int | None, typer.Option(help="Checkpoint; default: the newest.")] = None,
) -> None:
    """Copy a checkpoint in the other layout: three files, or a part for each rank.

    A run goes on with either; this is for tools that want the files.

    Examples:

    mamba3-lite convert runs/big --out runs/big-files

    mamba3-lite convert runs/small --out runs/small-sharded --to sharded
    """
    step = convert(run_dir, out, to=to, opt_step=opt_step)
    print(f"step {step}: {run_dir} -> {out} ({to})")

"""The command ``import``: a published Mamba-3-Lite checkpoint becomes a run folder.

Published checkpoints have our three-file layout and our state-dict keys, but no hashes, and their A
is the decay itself, of either sign. Ours goes through ``stable_decay``, so the import stores the
parameter that gives the same decay. Sizes are read off the tensors; what tensors do not tell comes
from the metadata, or is assumed with a line that says so.
"""

import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mamba3_lite.data.files import atomic_folder
from mamba3_lite.errors import UserError, reading
from mamba3_lite.models.mamba_block import stable_decay
from mamba3_lite.models.pretrained import CONFIG_FILE, Weights, build_model, is_foreign
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.utils.checkpoint import (
    CheckpointManager,
    CheckpointWriteError,
    NonFiniteWeights,
)

_MODEL_FILE = re.compile(r"model_step_(\d+)\.(safetensors|pt)")
_WRAPPERS = {"_orig_mod", "module"}  # of torch.compile and of data parallelism
_NESTED = ("model", "model_state_dict", "state_dict")  # where a .pt may keep the tensors
_UNTOLD = ("rms_norm_eps", "chunk_size", "max_seq_len", "init_std")  # by the tensors
_SHOWN = 5


def import_checkpoint(
    source: str | Path,
    run_dir: str | Path,
    *,
    opt_step: int | None = None,
    clamp: bool = False,
    log: Callable[[str], None] = print,
) -> Path:
    """Writes a run folder with one checkpoint, whole or not at all.

    Args:
        source: a folder with ``model_step_N.safetensors`` or ``model_step_N.pt`` (where there are
            both, their tensors are joined), or a single such file of any name.
        run_dir: must not exist or be empty.
        opt_step: which N; None takes the newest.
        clamp: give heads whose decay our block cannot have the slowest that it can.
        log: is told what was found and assumed.

    Raises:
        UserError: nothing to import, a file that holds more than tensors, keys that are missing,
            unexpected or of a wrong shape, a decay out of reach without ``clamp``.
    """
    with reading(str(source), "mend its permissions or name another folder"):
        step, files, meta = _find(Path(source), opt_step)
        tensors = _read_tensors(files)
    model = _model_config(tensors, meta, files[0], log)
    _store_decays(tensors, model.n_layers, clamp, files[0], log)
    weights = Weights(tensors, model, step, files[0], meta)
    filled = build_model(weights)
    origin = {"source": str(source), "sha256": weights.sha256(), "opt_step": step}
    record = {"model": dataclasses.asdict(model), "imported": origin}
    run_dir = Path(run_dir)
    with atomic_folder(run_dir) as partial:
        try:
            CheckpointManager(partial, log=log).save(step, filled.state_dict(), {}, record)
        except (NonFiniteWeights, CheckpointWriteError) as problem:
            raise UserError(f"{files[0]}: cannot be imported: {problem}") from problem
    log(f"[import] {', '.join(str(file) for file in files)} -> {run_dir}, opt_step {step}")
    return run_dir


def _find(source: Path, opt_step: int | None) -> tuple[int, list[Path], dict[str, Any]]:
    """(opt_step, files with tensors, metadata)."""
    if source.is_file():
        named = _MODEL_FILE.fullmatch(source.name)
        if named is None:
            return opt_step or 0, [source], {}
        source, opt_step = source.parent, int(named[1])
    if not source.is_dir():
        raise UserError(f"{source} does not exist; name a folder with model_step_N.safetensors.")
    steps: dict[int, list[Path]] = {}
    for path in sorted(source.iterdir(), reverse=True):
        if named := _MODEL_FILE.fullmatch(path.name):
            steps.setdefault(int(named[1]), []).append(path)
    if not steps:
        what = "is an exported folder, which every command reads as it is"
        if not (source / CONFIG_FILE).is_file():
            what = "holds no model_step_N.safetensors or model_step_N.pt"
        raise UserError(f"{source} {what}; name the folder of a published checkpoint.")
    step = max(steps) if opt_step is None else opt_step
    if step not in steps:
        raise UserError(f"{source} has no step {step}, only {', '.join(map(str, sorted(steps)))}.")
    return step, steps[step], _read_meta(source / f"meta_step_{step}.json")


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path} is damaged (not JSON); fetch it again, or remove it.") from None
    if not is_foreign(meta):
        raise UserError(
            f"{path.parent} is a run folder of this project already; every command reads it as it "
            "is."
        )
    return meta if isinstance(meta, dict) else {}


def _read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of the files: no wrapper in their names, float32, A complex64, both tied ends."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        for key, tensor in _read_file(file).items():
            name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
            tensor = _as_ours(name, tensor)
            if name in tensors and not torch.equal(tensors[name], tensor):
                raise UserError(f"{file}: {name} is there twice with different values; remove one.")
            tensors[name] = tensor
    for one, other in (("embed.weight", "lm_head.weight"), ("lm_head.weight", "embed.weight")):
        if one in tensors:
            tensors.setdefault(other, tensors[one])
    return tensors


def _as_ours(name: str, tensor: Tensor) -> Tensor:
    if name.rpartition(".")[2] != "A":
        return tensor.float()
    if tensor.is_complex():
        return tensor.to(torch.complex64)
    if tensor.dim() == 2 and tensor.shape[1] == 2:
        return torch.view_as_complex(tensor.float().contiguous())
    return tensor


def _read_file(file: Path) -> Mapping[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as problem:
            raise UserError(f"{file} is damaged ({problem}); fetch it again.") from None
    try:
        # Never without weights_only: unpickling anything else can run whatever the file says.
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} holds objects other than tensors and is not opened: unpickling them could run "
            "any code. Save its state_dict() alone, with the version that wrote it."
        ) from None
    except (RuntimeError, EOFError, OSError) as problem:
        raise UserError(f"{file} is damaged ({problem}); fetch it again.") from None
    for name in _NESTED:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict) or not found:
        raise UserError(f"{file} is no state dict; save the model's state_dict().")
    if odd := [str(key) for key, value in found.items() if not isinstance(value, Tensor)]:
        raise UserError(
            f"{file} is no state dict: {', '.join(odd[:_SHOWN])} "
            f"({len(odd)} of {len(found)} entries) are no tensors; save the model's state_dict()."
        )
    return found


def _model_config(
    tensors: Mapping[str, Tensor], meta: dict[str, Any], file: Path, log: Callable[[str], None]
) -> ModelConfig:
    """Sizes off the tensors, held against the metadata, which adds what tensors do not tell."""
    sizes = _sizes(tensors, file)
    told = _described_model(meta)
    wrong = [
        f"{name}: {value!r} by the tensors, {told[name]!r} by the metadata"
        for name, value in sizes.items()
        if told.get(name, value) != value
    ]
    if wrong:
        raise UserError(f"{file}: tensors and metadata disagree: {'; '.join(wrong)}.")
    extra = {name: told[name] for name in _UNTOLD if isinstance(told.get(name), int | float)}
    model = ModelConfig(**sizes, **extra, ssd_dispatch="rotated")
    assumed = [f"{name} {getattr(model, name)}" for name in _UNTOLD[:1] if name not in extra]
    if assumed:
        log(f"[import] the checkpoint does not say: {', '.join(assumed)} assumed")
    return model


def _sizes(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    keys = {
        "embed.weight": 2, "layers.0.A": 1, "layers.0.in_proj.weight": 2,
        "layers.0.out_proj.weight": 2, "layers.0.ffn_down.weight": 2,
    }  # fmt: skip
    shapes = {name: tuple(tensors[name].shape) for name in keys if name in tensors}
    if missing := [name for name in keys if name not in shapes]:
        found = ", ".join(sorted(tensors)[:_SHOWN]) or "none"
        raise UserError(
            f"{file}: {len(missing)} keys missing that tell the model's sizes: "
            f"{', '.join(missing)}; it holds {len(tensors)} keys: {found}, ...; name the file of a "
            "Mamba-3-Lite model (its keys are listed in the model reference)."
        )
    bad = [
        f"{name} {shape}"
        for name, shape in shapes.items()
        if len(shape) != keys[name] or 0 in shape
    ]
    if bad:
        raise UserError(
            f"{file}: of a shape that no Mamba-3-Lite model has: {', '.join(bad)}; name another."
        )
    if not tensors["layers.0.A"].is_complex():
        raise UserError(
            f"{file}: layers.0.A is real with one number a head; it has lost its imaginary part in "
            "a cast. Import a file from before it, with complex A (H,) or real pairs (H, 2)."
        )
    heads = shapes["layers.0.A"][0]
    width, projected = shapes["layers.0.out_proj.weight"][1], shapes["layers.0.in_proj.weight"][0]
    head_dim = width // heads
    numbers = {named[1] for key in tensors if (named := re.match(r"layers\.(\d+)\.", key))}
    return {
        "vocab_size": shapes["embed.weight"][0],
        "d_model": shapes["embed.weight"][1],
        "n_layers": len(numbers),
        "n_heads": heads,
        "head_dim": head_dim,
        "state_dim": (projected // heads - head_dim - 1) // 4,
        "ffn_dim": shapes["layers.0.ffn_down.weight"][1],
        "weight_tying": torch.equal(tensors["embed.weight"], tensors["lm_head.weight"]),
    }


def _described_model(meta: Any) -> dict[str, Any]:
    """The dictionary in the metadata, at any depth, that names a d_model; empty without one."""
    if not isinstance(meta, dict):
        return {}
    if "d_model" in meta:
        return meta
    return next(filter(None, map(_described_model, meta.values())), {})


def raw_decay(decay: Tensor) -> Tensor:
    """The A (H,) complex that ``stable_decay`` turns into ``decay``; NaN where none does.

    The identity up to Re = -1, and the inverse of the tail above it, down to the slowest rate.
    """
    rate = -decay.real.double()
    slowest = slowest_decay()
    tail = (rate - slowest) / (1 - slowest)
    slow = 1 - 4 * (tail.clamp_min(0) ** -0.25 - 1)
    raw = torch.where(rate >= 1, rate, torch.where(tail > 0, slow, torch.nan))
    return torch.complex(-raw, decay.imag.double()).to(decay.dtype)


def slowest_decay() -> float:
    """The rate that ``stable_decay`` approaches and never reaches."""
    limit = stable_decay(torch.tensor([complex(torch.inf, 0)], dtype=torch.complex128))[0]
    return -float(limit)


def _store_decays(
    tensors: dict[str, Tensor], layers: int, clamp: bool, file: Path, log: Callable[[str], None]
) -> None:
    """Replaces every A by the parameter that has the same effect."""
    slowest = slowest_decay()
    # Just above what cannot be reached; at that rate a state halves in some 7,000 units of s.
    nearest = 1.001 * slowest
    out_of_reach, largest, off = [], -torch.inf, 0.0
    for layer in range(layers):
        name = f"layers.{layer}.A"
        decay = tensors.get(name)
        if decay is None or not decay.is_complex() or decay.dim() != 1:
            continue  # for the strict load to name
        largest = max(largest, float(decay.real.max()))
        for head in (decay.real > -nearest).nonzero().flatten().tolist():
            out_of_reach.append(f"layer {layer} head {head}: {float(decay.real[head]):+.3g}")
        reached = torch.complex(decay.real.clamp_max(-nearest), decay.imag)
        tensors[name] = raw_decay(reached)
        off = max(off, float((stable_decay(tensors[name])[0] / reached.real - 1).abs().max()))
    shown = ", ".join(out_of_reach[:_SHOWN]) + (", ..." if len(out_of_reach) > _SHOWN else "")
    heads = "1 head" if len(out_of_reach) == 1 else f"{len(out_of_reach)} heads"
    if out_of_reach and not clamp:
        raise UserError(
            f"{file}: Re(A) of {heads} is above {-nearest:.4g}, where a state hardly decays, or "
            f"grows, and where the block here cannot have it: {shown}. --clamp takes "
            f"{-nearest:.4g} for these, which changes the model."
        )
    if out_of_reach:
        log(f"[import] Re(A) set to {-nearest:.4g} in {heads}: {shown}")
    kept = f"to {off:.0e} (relative)" if off else "exactly"
    which = "the other decays" if out_of_reach else "all decays"
    log(f"[import] Re(A) at most {largest:+.4g}; {which} kept {kept}")


def import_command(
    source: Annotated[str, typer.Argument(help="Folder or file of a published checkpoint.")],
    out: Annotated[str, typer.Option(help="Run folder to write; new or empty.")],
    opt_step: Annotated[int | None, typer.Option(help="Which step; default: the newest.")] = None,
    clamp: Annotated[
        bool, typer.Option("--clamp", help="Give heads that do not decay the slowest decay.")
    ] = False,
) -> None:
    """Turn a published Mamba-3-Lite checkpoint into a run folder.

    Examples:

    mamba3-lite import downloaded/checkpoints --out runs/published

    mamba3-lite import model_step_4000.safetensors --out runs/published --clamp
    """
    run_dir = import_checkpoint(source, out, opt_step=opt_step, clamp=clamp)
    print(f'next: mamba3-lite generate {run_dir} --prompt "Once upon"')

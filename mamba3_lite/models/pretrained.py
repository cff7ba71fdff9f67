"""Trained weights, wherever they lie: a run folder, one of its checkpoints, or an exported folder.

An exported folder holds ``config.json`` and ``model.safetensors`` as transformers expects them.
Its tensors have the keys of our state dict; what differs is put right here: the complex A is a
real pair (H, 2), a tied head is stored once, a folded head mixer is left out, and the dtype may be
a narrow one.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mamba3_lite.errors import UserError, reading
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.utils.checkpoint import FORMAT, CheckpointManager
from mamba3_lite.utils.weights import load_weights

MODEL_TYPE = "mamba3_lite"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# How the model is computed is no property of an export; only its tie has another name there.
EXPORTED_FIELDS = tuple(
    f.name
    for f in fields(ModelConfig)
    if f.name not in ("ssd_dispatch", "grad_checkpoint", "weight_tying")
)
_CHECKPOINT_FILE = re.compile(r"(?:model|optim|meta)_step_(\d+)\.(?:safetensors|pt|json)")


@dataclass(frozen=True)
class Weights:
    """A model's weights on the CPU, under the keys of its state dict, and what is known of them.

    Attributes:
        tensors: float32, A complex64.
        opt_step: None where nobody said.
        file: where the tensors were read from; of a sharded checkpoint its record, whose hashes
            cover every part.
        meta: a checkpoint's metadata; of an export, what it says of its origin.
    """

    tensors: dict[str, Tensor]
    model: ModelConfig
    opt_step: int | None
    file: Path
    meta: dict[str, Any]

    def sha256(self) -> str:
        """Of the file, 64 hex digits; reads it whole."""
        with self.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(
    source: str | Path, opt_step: int | None = None, *, log: Callable[[str], None] = print
) -> Weights:
    """Reads weights of this project's making.

    Args:
        source: a run folder, a file of one of its checkpoints, or an exported folder.
        opt_step: exactly this checkpoint; None takes the newest intact one.
        log: is told which checkpoint was loaded or passed over.

    Raises:
        UserError: nothing usable there, or a checkpoint that another program wrote.
    """
    folder = Path(source)
    with reading(str(source), "mend its permissions or name another folder"):
        if folder.is_file():
            named = _CHECKPOINT_FILE.fullmatch(folder.name)
            if named is None or opt_step not in (None, int(named[1])):
                problem = "is no file of a checkpoint" if named is None else "is of another step"
                raise UserError(f"{source} {problem}; name a run folder or an exported folder.")
            folder, opt_step = folder.parent, int(named[1])
        if not folder.is_dir():
            raise UserError(f"{source} is not a folder; name a run folder or an exported folder.")
        if (folder / CONFIG_FILE).is_file():
            if opt_step is not None:
                raise UserError(
                    f"{source} is an exported folder and holds one set of weights, not opt_step "
                    f"{opt_step}; leave the step out."
                )
            return _read_exported(folder)
        return _read_checkpoint(folder, opt_step, log)


def build_model(weights: Weights) -> Mamba3Transformer:
    """A float32 model on the CPU with these weights; ``UserError`` names every key amiss."""
    model = Mamba3Transformer(weights.model)
    fill(model, weights)
    return model


def fill(model: torch.nn.Module, weights: Weights) -> None:
    """Copies the weights into a model, strictly; ``UserError`` names the file and the keys."""
    try:
        load_weights(model, weights.tensors)
    except UserError as problem:
        raise UserError(f"{weights.file}: {problem}") from None


def is_foreign(record: Any) -> bool:
    """Whether the content of a ``meta_step_N.json`` is none of this project's, of any version."""
    project = FORMAT.rpartition(" ")[0]
    return not isinstance(record, dict) or not str(record.get("format")).startswith(project)


def _read_checkpoint(folder: Path, opt_step: int | None, log: Callable[[str], None]) -> Weights:
    asked = "*" if opt_step is None else str(opt_step)
    for path in folder.glob(f"meta_step_{asked}.json"):
        try:
            record = json.loads(path.read_bytes())
        except ValueError:
            continue  # a damaged one is for the manager to judge
        if is_foreign(record):
            raise UserError(
                f"{path} was not written by this project; turn the checkpoint into a run folder "
                f"first: mamba3-lite import {folder} --out RUN_DIR"
            )
    checkpoint = CheckpointManager(folder, log=log).load(opt_step)
    if checkpoint is None:
        raise UserError(
            f"{folder} holds no checkpoint; name a folder that a training run saved to, or an "
            "exported folder."
        )
    named = f"meta_step_{checkpoint.opt_step}.json in {folder}"
    model = _model_config(checkpoint.meta.get("model"), named)
    file = folder / f"model_step_{checkpoint.opt_step}.safetensors"
    if not file.is_file():
        file = folder / f"meta_step_{checkpoint.opt_step}.json"
    return Weights(checkpoint.model, model, checkpoint.opt_step, file, checkpoint.meta)


def _model_config(values: Any, where: str) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except TypeError as problem:
        raise UserError(
            f"{where} does not describe a model of this version ({problem}); "
            "load it with the version that wrote it."
        ) from None


def _read_exported(folder: Path) -> Weights:
    config = _read_config(folder / CONFIG_FILE)
    values = {name: config[name] for name in EXPORTED_FIELDS if name in config}
    tied = config.get("tie_word_embeddings", True)
    values |= {"weight_tying": tied, "ssd_dispatch": "rotated"}
    model = _model_config(values, str(folder / CONFIG_FILE))
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing: the export is not whole; export again.")
    try:
        stored = load_file(file)
    except SafetensorError as problem:
        raise UserError(f"{file} is damaged ({problem}); export again.") from None
    tensors = {name: _as_ours(name, tensor) for name, tensor in stored.items()}
    if model.weight_tying and "embed.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["embed.weight"])
    if config.get("mimo_folded"):
        identity = torch.eye(model.n_heads * model.head_dim)
        tensors |= {f"layers.{i}.mimo.mix.weight": identity for i in range(model.n_layers)}
    said = config.get(MODEL_TYPE)
    origin = said if isinstance(said, dict) else {}
    return Weights(tensors, model, origin.get("opt_step"), file, origin)


def _as_ours(name: str, tensor: Tensor) -> Tensor:
    tensor = tensor.float()
    is_pair = name.rpartition(".")[2] == "A" and tensor.dim() == 2 and tensor.shape[1] == 2
    return torch.view_as_complex(tensor) if is_pair else tensor


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path} is damaged (not JSON); export again.") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != MODEL_TYPE:
        raise UserError(f"{path} describes a model of type {kind!r}, not {MODEL_TYPE!r}.")
    return config

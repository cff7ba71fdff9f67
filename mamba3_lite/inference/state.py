"""What a model knows of a text that it has read: of constant size, to keep, fork and store.

Legend: B batch, V vocabulary, H heads, N complex state width, D channels of a head.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.models.transformer import Mamba3Transformer

_FORMAT = "mamba3-lite state 1"
# Fields that change how the model is computed or trained, not what it computes.
_NOT_THE_MODEL = ("chunk_size", "ssd_dispatch", "max_seq_len", "init_std", "grad_checkpoint")


def fingerprint(model: Mamba3Transformer) -> str:
    """A hash of the configuration and of a few weights: a state fits no other model.

    The weights are hashed in bfloat16, so that a model and its copy in bfloat16 are the same.
    """
    fields = dataclasses.asdict(model.cfg)
    text = json.dumps({k: v for k, v in fields.items() if k not in _NOT_THE_MODEL}, sort_keys=True)
    weights = model.norm_f.weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(text.encode() + weights.view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class State:
    """After some text: ``layers``, one (B, H, 2N, D) each, and the ``logits`` (B, V) that follow.

    Generating from a state leaves it as it was, so one prefix serves many continuations.
    """

    layers: list[Tensor]
    logits: Tensor
    model: str  # its fingerprint

    @property
    def batch_size(self) -> int:
        return self.logits.shape[0]

    def clone(self) -> "State":
        """A copy with memory of its own."""
        return State([t.clone() for t in self.layers], self.logits.clone(), self.model)

    def repeat(self, times: int) -> "State":
        """Each row ``times`` times, one after the other."""
        layers = [t.repeat_interleave(times, 0) for t in self.layers]
        return State(layers, self.logits.repeat_interleave(times, 0), self.model)

    def check(self, model: Mamba3Transformer) -> None:
        """``UserError`` unless this is a state of ``model``."""
        if self.model != fingerprint(model):
            raise UserError(
                "The state belongs to another model: its configuration or its weights differ. "
                "Read the text again with this one."
            )

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        tensors = {f"layers.{i}": t.contiguous() for i, t in enumerate(self.layers)}
        metadata = {"format": _FORMAT, "model": self.model}
        try:
            try:
                save_file(tensors | {"logits": self.logits.contiguous()}, temporary, metadata)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except (OSError, SafetensorError) as problem:
            raise UserError(
                f"{path}: the state cannot be written ({problem}); choose another path."
            ) from problem

    @classmethod
    def load(cls, path: str | Path, model: Mamba3Transformer) -> "State":
        """The state of a file, on the model's device.

        Raises:
            UserError: no such file, no state, or one of another model.
        """
        try:
            with safe_open(path, framework="pt", device=str(model.embed.weight.device)) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise UserError(f"{path}: holds no state of a model; name a saved state.")
                names = [f"layers.{i}" for i in range(len(file.keys()) - 1)]
                layers = [file.get_tensor(name) for name in names]
                state = cls(layers, file.get_tensor("logits"), metadata["model"])
        except (OSError, SafetensorError) as problem:
            raise UserError(
                f"{path}: the state cannot be read ({problem}); name a saved state."
            ) from problem
        state.check(model)
        return state

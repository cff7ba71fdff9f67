"""Small real runs for the trainer's tests: structured data, a tiny model, the whole code path."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba3_lite.training.pretrain import Pretrainer, TrainingConfig
from mamba3_lite.utils.checkpoint import CheckpointManager
from mamba3_lite.utils.logging import read_metrics

VOCAB = 97
MODEL = {
    "vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "head_dim": 8, "state_dim": 4,
    "ffn_dim": 32, "chunk_size": 8, "max_seq_len": 24, "ssd_dispatch": "rotated",
}  # fmt: skip


def tokens(n: int, seed: int = 0) -> Tensor:
    """A Markov chain with a few likely successors: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, 3, (n,), generator=generator) * 7 + 1
    return (jumps.cumsum(0) * 5) % VOCAB


def write_tokens(path: Path, n: int, seed: int = 0) -> str:
    """A ``torch.save``d int64 tensor, format (a) of the data contract."""
    torch.save(tokens(n, seed), path)
    return str(path)


def config(folder: Path, **changes: Any) -> TrainingConfig:
    """Twelve optimizer steps over 31 windows: two epoch ends on the way."""
    data = folder / "train.bin"
    if not data.exists():
        write_tokens(data, 24 * 31 + 1)
    model = {**MODEL, **changes.pop("model", {})}
    fields: dict[str, Any] = {
        "data_path": str(data), "checkpoint_dir": str(folder / "run"), "vocab_size": VOCAB,
        "max_seq_len": model["max_seq_len"], "batch_size": 3, "gradient_accumulation_steps": 2,
        "max_steps": 12, "warmup_steps": 3, "lr": 3e-3, "compile_model": False,
        "grad_checkpoint": False, "save_every": 4, "log_every": 1, "data_order": "shuffled",
        "keep_last": 0, "tensorboard": False,
    }  # fmt: skip
    return TrainingConfig(model_config=model, **{**fields, **changes})


class StoppingPretrainer(Pretrainer):
    """Sends itself a signal once ``stop_at`` micro-steps are done in this process."""

    stop_at = 0
    signal_number = signal.SIGTERM

    def _micro_step(self, tokens: Tensor, targets: Tensor) -> None:
        super()._micro_step(tokens, targets)
        self.stop_at -= 1
        if self.stop_at == 0:
            os.kill(os.getpid(), self.signal_number)


def stop_after(config: TrainingConfig, micro_steps: int, number: int = signal.SIGTERM) -> int:
    """Trains until a signal after so many micro-steps; returns the exit code."""
    trainer = StoppingPretrainer(config)
    trainer.stop_at, trainer.signal_number = micro_steps, number
    return trainer.train()


def losses(folder: str | Path) -> list[tuple[int, float, float]]:
    """(micro_step, loss, lr) of every logged training row."""
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [(r["micro_step"], r["loss"], r["lr"]) for r in rows if r["kind"] == "train"]


def final_weights(folder: str | Path) -> dict[str, Tensor]:
    """The newest checkpoint's model."""
    checkpoint = CheckpointManager(folder).load(None)
    assert checkpoint is not None
    return checkpoint.model


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert different == []

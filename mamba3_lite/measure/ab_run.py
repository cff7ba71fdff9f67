"""What the processes of a comparison do: look at an arm before any training, or train it once.

    python -m mamba3_lite.measure.ab_run check A/arm.yaml
    python -m mamba3_lite.measure.ab_run train A/0/arm.yaml backend

Only these processes touch the GPU, so that none finds the memory of another in use.
"""

import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from mamba3_lite import env, hardware
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError, user_errors_as_one_line
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.compile import compile_blocks, compile_refusal
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.training.passes import RECORDING_MODE, insist, is_recorded
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.training.run_data import open_data

# The arm itself cannot be trained: out of memory, or its loss is lost.
EXIT_ARM_FAILED = 3
# The other variables say where things are, or stand among an arm's settings.
_SWITCHES = ("ENABLE_TRITON_KERNELS", "TRITON_INTERPRET")


class ArmFailedError(Exception):
    """Why this arm has no result."""


class ArmTrainer(Pretrainer):
    """Keeps no checkpoint: a run that was stopped begins again, for its speed is of one piece."""

    def _save(self, *, at_end: bool) -> None:
        pass

    def _roll_back(self) -> bool:
        raise ArmFailedError(
            f"{self.state.strikes} windows in a row without a finite loss and gradient, at "
            f"opt_step {self.state.opt_step}"
        )


def backend_asked_for(config: TrainingConfig, device: torch.device) -> str:
    """Name of the SSD backend; ``UserError`` where a run would take another than it names."""
    cfg = config.model()
    if cfg.ssd_dispatch == "triton" and env.read("ENABLE_TRITON_KERNELS") != "1":
        raise UserError(
            "ssd_dispatch='triton' needs ENABLE_TRITON_KERNELS=1; without it the run would measure "
            "'pytorch'."
        )
    shape = ssd_backends.Shape(
        cfg.head_dim, cfg.state_dim, cfg.chunk_size, device, heads=cfg.n_heads
    )
    return ssd_backends.resolve(cfg.ssd_dispatch, shape).name


def compile_mode_in_effect(config: TrainingConfig, device: torch.device) -> str | None:
    """None: not asked for. ``UserError`` where it is asked for and would be left out."""
    if not config.compile_model:
        return None
    refusal = compile_refusal(device)
    if refusal is not None:
        raise UserError(f"training.compile cannot be met here: {refusal}; set it to false.")
    tiny = {
        "vocab_size": 8, "d_model": 8, "n_layers": 1, "n_heads": 1, "head_dim": 8, "state_dim": 8,
        "ffn_dim": 8,
    }  # fmt: skip
    blocks = compile_blocks(Mamba3Transformer(tiny), config.compile_mode)
    return RECORDING_MODE if is_recorded(config, World(device)) else blocks


def check(path: str) -> dict[str, Any]:
    """What an arm would run, its data, and all else that its numbers depend on.

    Raises:
        UserError: it would not run as it says.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, _ = load_training_config(path)
    return {
        "effect": {
            "backend": backend_asked_for(config, device),
            "compile": compile_mode_in_effect(config, device),
        },
        "data_fingerprint": open_data(config, stand_in=0, log=print).train.fingerprint,
        "environment": {**hardware.environment_record(), **_more_environment()},
    }


def _more_environment() -> dict[str, Any]:
    """What the environment record of a run leaves out: the exact code, and the switches."""
    package = Path(hardware.__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.relative_to(package).as_posix().encode() + b"\0" + source.read_bytes())
    return {
        "code": digest.hexdigest()[:12],
        "variables": {name: env.read(name) for name in _SWITCHES},
        "threads": torch.get_num_threads(),
    }


def train(path: str, backend: str) -> None:
    """One run, whose folder then holds the log.

    Raises:
        ArmFailedError: out of memory, or the loss is not finite.
    """
    trainer = ArmTrainer(load_training_config(path)[0])
    try:
        code = trainer.train()
    except torch.OutOfMemoryError as problem:
        raise ArmFailedError(f"out of memory ({str(problem).split('. ')[0]})") from problem
    if code:
        raise SystemExit(code)
    blocks = [layer for layer in trainer.model.layers if isinstance(layer, Mamba3Block)]
    ran = {block._backend(trainer.device).name for block in blocks}
    if ran != {backend}:
        raise UserError(f"asked for the path {backend!r}, but {sorted(ran)} ran: no result.")
    insist(trainer._window.recording)


def _end_with_parent() -> None:
    """Standard input is a pipe that only the parent holds: its end is the parent's."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main(argv: list[str]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with user_errors_as_one_line():
        match argv:
            case ["check", path]:
                print(json.dumps(check(path)))
            case ["train", path, backend]:
                try:
                    train(path, backend)
                except ArmFailedError as reason:
                    print(reason)
                    raise SystemExit(EXIT_ARM_FAILED) from None


if __name__ == "__main__":
    main(sys.argv[1:])

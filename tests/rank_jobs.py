"""What one rank of a test does: ``python -m tests.rank_jobs FOLDER JOBS``, JOBS as JSON.

A job is ``[name, changes]``: changes of the configuration of :func:`tests.runs.config`, and under
``_`` what the job itself is told to break. Every rank writes ``FOLDER/NAME/rank_R.json``. With
``--cli`` errors end the process as they do on the command line.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba3_lite.distributed.world import World, join_world
from mamba3_lite.errors import user_errors_as_one_line
from mamba3_lite.training.losses import IGNORE_INDEX
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils.weights import whole_weights
from tests import runs


class Watched(Pretrainer):
    """Keeps what it sees; hides targets by their content, so that ranks count unlike many."""

    told: dict[str, Any]
    seen: list[str]

    def _terminate(self, moment: str) -> None:
        """SIGTERM to this rank the ``term_at``-th time that it comes to this moment."""
        if self.told.get("term_in") == moment and self.world.rank == self.told["rank"]:
            self.told["term_at"] -= 1
            if self.told["term_at"] == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def _validate(self) -> None:
        self._terminate("validation")
        super()._validate()

    def _save(self, *, at_end: bool) -> None:
        self._terminate("saving")
        super()._save(at_end=at_end)

    def _holds_poison(self, tokens: Tensor) -> bool:
        windows = [self.order.window(sample) for sample in self.told.get("nan_samples", ())]
        bad = [self.dataset[window][0] for window in windows]
        return any(torch.equal(row, other) for row in tokens for other in bad)

    def _micro_step(self, *batch: Tensor) -> None:
        tokens, targets = batch[:2]
        self.seen += [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in tokens]
        # A third of what follows an odd first token does not count.
        hidden = (tokens[:, :1] % 2 == 1) & (targets % 3 == 0)
        mine = self.world.rank == self.told.get("rank", self.world.size - 1)
        now = self.state.micro_step
        hook = None
        inside = self.state.window_micro_step % self.config.gradient_accumulation_steps
        self._terminate("accumulation" if inside else "training")
        if (mine and now == self.told.get("nan_loss_at", -1)) or self._holds_poison(tokens):
            hook = self.model.norm_f.register_forward_hook(lambda m, i, out: out * math.nan)
        if mine and now in self.told.get("nan_gradient_at", ()):
            hook = self.model.layers[0].register_full_backward_hook(
                lambda m, i, out: tuple(g if g is None else g * math.nan for g in i)
            )
        super()._micro_step(tokens, targets.masked_fill(hidden, IGNORE_INDEX), *batch[2:])
        if hook is not None:
            hook.remove()
        if mine and self.state.micro_step == self.told.get("signal_at", -1):
            os.kill(os.getpid(), signal.SIGTERM)


def fill_disk(told: dict[str, Any], world: World) -> None:
    """What makes one file durable fails, the ``full_at``-th time."""
    left = told["full_at"]

    def failing(function: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args)

        return wrapped

    if world.rank == told["rank"]:
        os.fsync = failing(os.fsync)


def train(world: World, folder: Path, told: dict[str, Any], changes: dict[str, Any]) -> dict:
    """Trains (or goes on) in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = runs.config(folder.parent, **{"checkpoint_dir": str(folder / "run"), **changes})
    trainer = Watched(settings, world=world)
    trainer.told, trainer.seen = told, []
    gradients: list[Any] = []
    if told.get("float32"):
        trainer.amp_context = contextlib.nullcontext()
    if told.get("keep_gradients"):
        trainer.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(_complex_gradients(trainer))
        )
    if "full_at" in told:
        fill_disk(told, world)
    code = trainer.train()
    weights = {k: w.cpu() for k, w in whole_weights(trainer.model, keep=True).items()}
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(torch.view_as_real(w).numpy().tobytes() if (w := weights[name]).is_complex()
                      else w.numpy().tobytes())  # fmt: skip
    return {
        "code": code, "seen": trainer.seen, "weights": digest.hexdigest(),
        "tied": trainer.model.lm_head.weight is trainer.model.embed.weight,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "state": trainer.state.to_dict(), "complex_gradients": gradients,
    }  # fmt: skip


def _complex_gradients(trainer: Pretrainer) -> list[list[float]]:
    """Of every layer's A, as real numbers: what the update is about to take."""
    found = [p.grad for p in trainer.model.parameters() if p.is_complex()]
    return [torch.view_as_real(g).flatten().tolist() for g in found if g is not None]


def main(folder: Path, jobs: list, *, cli: bool) -> None:
    torch.set_num_threads(1)
    with user_errors_as_one_line(), join_world(60) as world:
        for name, changes in jobs:
            told = changes.pop("_", {})
            world.gather(None)  # a folder that another rank has not left yet
            try:
                found = train(world, folder / name, told, changes)
            except RuntimeError as problem:
                if cli:
                    raise
                found = {"error": str(problem)}
            path = folder / name / f"rank_{world.rank}.json"
            path.write_text(json.dumps(found), encoding="utf-8")
            if cli and found["code"]:
                sys.exit(found["code"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), cli="--cli" in sys.argv)

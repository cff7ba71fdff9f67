"""Writes and finds the checkpoints of a run: three files by the leader, or a part by each rank.

Sharded, the loop only waits for a copy of each rank's part: a thread with a process group of its
own writes, hashes and publishes it. One save is under way at a time.
"""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mamba3_lite.distributed.world import World
from mamba3_lite.training.optim import spread_state, whole_state
from mamba3_lite.utils import sharded
from mamba3_lite.utils.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointWriteError,
    NonFiniteWeights,
    fingerprint,
)
from mamba3_lite.utils.weights import ties, whole_weights


class Saver:
    """Every rank has one, and all call the same methods at the same boundaries."""

    def __init__(self, manager: CheckpointManager, world: World, *, checkpoint_format: str) -> None:
        self._manager, self._world = manager, world
        self.sharded = checkpoint_format == "sharded"
        self._group = dist.new_group(backend="gloo") if self.sharded and world.grouped else None
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._under_way = False

    def load(self, opt_step: int | None) -> Checkpoint | None:
        """The checkpoint to go on from, the same on every rank: the leader finds and mends it.

        Raises:
            UserError: as :meth:`mamba3_lite.utils.checkpoint.CheckpointManager.load`.
        """
        checkpoint, world = None, self._world
        with world.same_fate():
            if world.leads:
                checkpoint = self._manager.load(opt_step)
        found = world.from_leader(None if checkpoint is None else checkpoint.opt_step)
        with world.same_fate():
            if found is not None and checkpoint is None:
                checkpoint = self._manager.load(found)
        return checkpoint

    def start(
        self, opt_step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
        random: dict[str, Tensor], meta: dict[str, Any],
    ) -> None:  # fmt: skip
        """Begins a save, or does all of it; :meth:`finish` tells what came of it.

        Raises:
            NonFiniteWeights: on all ranks, and nothing older is touched.
        """
        assert not self._under_way, "the save before has not been finished"
        self._under_way = True
        if self.sharded:
            self._start_sharded(opt_step, model, optimizer, random, meta)
            return
        leads = self._world.leads
        weights = whole_weights(model, keep=leads)
        moments = whole_state(optimizer, keep=leads)
        if leads:
            training = {"optimizer": moments, "random": random}
            try:
                self._manager.save(opt_step, weights, training, meta)
            except CheckpointWriteError as problem:
                self._problem = str(problem)

    def finish(self) -> tuple[bool, str | None]:
        """Waits for the save under way: whether there was one, and why it failed, or None."""
        if self._thread is not None:
            self._thread.join()
        was, self._under_way, self._thread = self._under_way, False, None
        problem, self._problem = self._problem, None
        return was, self._world.from_leader(problem) if was else None

    def _start_sharded(self, opt_step, model, optimizer, random, meta) -> None:
        world, folder = self._world, None
        bad = [n for n, p in model.named_parameters() if not bool(torch.isfinite(_held(p)).all())]
        if world.largest(len(bad)):
            raise NonFiniteWeights(
                f"checkpoint of step {opt_step} not written: NaN or Inf in {bad}"
            )
        if world.leads:
            try:
                folder = self._manager.sharded_folder(opt_step)
            except CheckpointWriteError as problem:
                self._problem = str(problem)
        folder = world.from_leader(folder)
        if folder is None:
            return
        moments, groups = spread_state(optimizer)
        tensors = sharded.staged({**sharded.model_tensors(model), **moments})
        rest = {"optimizer": groups, "random": random, "aliases": ties(model)}
        self._thread = threading.Thread(
            target=self._write, daemon=True,
            args=(opt_step, folder, tensors, rest if world.leads else None, meta),
        )  # fmt: skip
        self._thread.start()

    def _write(self, opt_step, folder, tensors, rest, meta) -> None:
        """In the thread. What fails on one rank is known to all before anything is published."""
        try:
            mine = sharded.write(folder, tensors, rest, self._group)
            said: Any = {path.name: fingerprint(path) for path in mine}
        except (Exception, dist.checkpoint.CheckpointException) as problem:
            said = f"{type(problem).__name__}: {problem}"
        everyone = [said]
        if self._group is not None:
            everyone = [None] * self._world.size
            dist.all_gather_object(everyone, said, group=self._group)
        if not self._world.leads:
            return
        failed = [one for one in everyone if isinstance(one, str)]
        if failed:
            self._problem = (
                f"checkpoint of step {opt_step} could not be written to {folder.parent}: "
                f"{failed[0]}; older checkpoints are untouched; make room or mend the folder"
            )
            return
        try:
            found = {name: one for each in everyone for name, one in each.items()}
            self._manager.publish_sharded(opt_step, found, meta)
        except CheckpointWriteError as problem:
            self._problem = str(problem)


def _held(parameter: Tensor) -> Tensor:
    """What this rank has of it."""
    return parameter.to_local() if isinstance(parameter, dist.tensor.DTensor) else parameter

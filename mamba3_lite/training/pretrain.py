"""The training loop: the run around the micro-steps, and the command that starts it."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from mamba3_lite import env
from mamba3_lite.data.loader import advance, make_loader
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError, user_errors_as_one_line
from mamba3_lite.models.arithmetic import model_flops_per_token
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.compile import compile_blocks, compile_refusal
from mamba3_lite.training.config import TrainConfig, TrainingConfig, validate
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.meter import Meter
from mamba3_lite.training.optim import build_optimizer, load_optimizer
from mamba3_lite.training.parallel import chosen_mode, parallelize
from mamba3_lite.training.passes import recording_for
from mamba3_lite.training.profile import MicroStepProfiler
from mamba3_lite.training.run_data import open_data
from mamba3_lite.training.run_lock import RunLock
from mamba3_lite.training.run_record import write_run_record
from mamba3_lite.training.saver import Saver
from mamba3_lite.training.schedule import build_schedule, resume_schedule
from mamba3_lite.training.start import may_go_on, start_from
from mamba3_lite.training.step import settle, train_step
from mamba3_lite.training.stop import StopRequest
from mamba3_lite.training.train_state import Boundary, TrainState, set_random_state
from mamba3_lite.training.validation import EvaluationStopped, evaluate
from mamba3_lite.training.watchdog import Watchdog
from mamba3_lite.utils.checkpoint import (
    Checkpoint,
    CheckpointManager,
    estimate_bytes,
    require_free_space,
)
from mamba3_lite.utils.logging import TrainingLogger
from mamba3_lite.utils.weights import load_weights

__all__ = ["Pretrainer", "TrainConfig", "TrainingConfig", "main", "train_step"]

EXIT_DONE = 0
DRY_RUN_OPT_STEPS = 2


def _enforce_triton_env_var(model_config: dict[str, Any], log: Callable[[str], None]) -> None:
    """Rewrites a "triton" dispatch to "pytorch", with one line, unless ENABLE_TRITON_KERNELS=1."""
    if model_config.get("ssd_dispatch") == "triton" and env.read("ENABLE_TRITON_KERNELS") != "1":
        log(
            "[warn] ssd_dispatch='triton' requires ENABLE_TRITON_KERNELS=1; "
            "forcing ssd_dispatch='pytorch' for this run."
        )
        model_config["ssd_dispatch"] = "pytorch"


class Pretrainer:
    """One run: builds all a configuration names, resumes by itself, trains, logs, validates, saves.

    Args:
        config: validated here; never changed by the run except for the dry run's smaller shape.
        resume: exactly this optimizer step; None takes the newest intact checkpoint, if any.
        dry_run: two optimizer steps at the unmodified schedule; reads and writes no run folder.
        full_shape: keep the literal shape in a dry run on a CPU.
        profile: profile a few micro-steps into the run folder, in a dry run too, which then takes
            as many optimizer steps as the profile needs.
        sources: where each value of ``config`` came from, for the record in the run folder.
        late_guard: learn of a dropped window one optimizer step late, so that the device never
            waits; None: on a GPU. The weights are the same either way.
        world: the ranks that train together, all of which build and call their own at once; the
            leader alone writes. None: this process alone.

    Raises:
        UserError: anything wrong with configuration, data or checkpoints, before the first step.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        resume: int | None = None,
        dry_run: bool = False,
        full_shape: bool = False,
        profile: bool = False,
        sources: dict[str, str] | None = None,
        late_guard: bool | None = None,
        world: World | None = None,
    ):
        validate(config)
        self.dry_run = dry_run
        self.world = world or World.alone()
        self.device = self.world.device
        self.late_guard = self.device.type == "cuda" if late_guard is None else late_guard
        self.config = config = dataclasses.replace(config, model_config=dict(config.model_config))
        self.run_dir = None if dry_run else Path(config.checkpoint_dir)
        self._sources = sources or {}
        self._notes: list[str] = []
        _enforce_triton_env_var(config.model_config, self._notes.append)
        if dry_run and self.device.type == "cpu" and not full_shape:
            config.batch_size, config.max_seq_len = 1, min(config.max_seq_len, 256)
            shape = f"micro batch 1, {config.max_seq_len} tokens"
            hint = "--full-shape keeps the configuration's"
            self._notes.append(f"[dry-run] on a CPU: {shape} ({hint})")
        with self.world.same_fate():
            self._open_data()
        self._lock: RunLock | None = None
        self.checkpoints: CheckpointManager | None = None
        self._saver: Saver | None = None
        with self.world.same_fate():
            if self.run_dir is not None and self.world.leads:
                self._lock = RunLock(self.run_dir)
        try:
            self._prepare(resume, profile=profile)
        except BaseException:
            self._unlock()
            raise

    def _prepare(self, resume: int | None, *, profile: bool) -> None:
        """Everything behind the lock: what to go on from, the model, the log."""
        config, world = self.config, self.world
        if self.run_dir is not None:
            self.checkpoints = CheckpointManager(
                self.run_dir, keep_last=config.keep_last, keep_every=config.keep_every,
                log=self._notes.append,
            )  # fmt: skip
            self._saver = Saver(self.checkpoints, world, checkpoint_format=config.checkpoint_format)
        checkpoint = None if self._saver is None else self._saver.load(resume)
        with world.same_fate():
            if checkpoint is not None:
                data = self.dataset.fingerprint
                self._notes += may_go_on(checkpoint, config, data, ranks=world.size)
            self._make_model(checkpoint)
        self._build(checkpoint)
        with world.same_fate():
            self._open_log(checkpoint)
        if self.checkpoints is not None:
            self.checkpoints.log = self.logger.info
        self._profiler = None
        if profile and world.leads:
            self._profiler = MicroStepProfiler(
                Path(config.checkpoint_dir), accumulation=config.gradient_accumulation_steps,
                device=self.device, log=self.logger.info,
            )  # fmt: skip

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _open_data(self) -> None:
        stand_in = DRY_RUN_OPT_STEPS * self.config.samples_per_step if self.dry_run else 0
        data = open_data(self.config, stand_in=stand_in, log=self._notes.append)
        self.dataset, self.order, self.val_dataset = data

    def _make_model(self, checkpoint: Checkpoint | None) -> None:
        config = self.config
        torch.manual_seed(config.seed)
        self.model = Mamba3Transformer(config.model())
        self._init_from: dict[str, Any] | None = None
        if checkpoint is not None:
            self._init_from = checkpoint.meta.get("init_from")
        elif config.init_from:
            self._init_from = start_from(self.model, config.init_from, log=self._notes.append)
        if self.run_dir is not None:
            require_free_space(self.run_dir, 3 * estimate_bytes(self.model.state_dict()))
        self.model.to(self.device).train()

    def _build(self, checkpoint: Checkpoint | None) -> None:
        """Compiles the model, spreads it over the ranks, and fills both it and its optimizer."""
        config = self.config
        if config.compile_model:
            refusal = compile_refusal(self.device)
            if refusal is None:
                mode = compile_blocks(self.model, config.compile_mode)
                self._notes.append(f"torch.compile: each block, mode {mode}")
            else:
                self._notes.append(f"[warn] not compiled: {refusal}")
        self.trained: nn.Module = self.model
        if self.world.grouped:
            mode = chosen_mode(config.parallel_mode, self.model, self.world)
            self.trained = parallelize(self.model, mode, self.world, shard_ranks=config.shard_ranks)
            tokens = self.world.size * config.tokens_per_step
            self._notes.append(
                f"{self.world.size} ranks, {mode}: {tokens:,} tokens an optimizer step"
            )
        self.optimizer = build_optimizer(self.model, config)
        self._window = AccumulationWindow.of(self.optimizer)
        self._window.late = True  # when outcomes are read is for _settle to say
        self._window.world = self.world
        self.scheduler = build_schedule(self.optimizer, config)
        self.state = TrainState()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.amp_context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.device.type == "cuda":
            self.amp_context = torch.autocast("cuda", dtype=torch.bfloat16)
        else:
            self._notes.append("[warn] no CUDA device: training in float32 on the CPU")
        self._window.recording = recording_for(self.model, config, self.amp_context, self.world)
        if self._window.recording is not None:
            self._notes.append("micro-steps are recorded as CUDA graphs and replayed")

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Weights, moments, schedule, counters and generators from a checkpoint."""
        load_weights(self.model, checkpoint.model)
        load_optimizer(self.optimizer, checkpoint.training["optimizer"], self.config)
        self.state = TrainState.from_dict(checkpoint.meta["state"])
        resume_schedule(self.scheduler, self.state.opt_step)
        self.state.align(self.config.gradient_accumulation_steps)
        set_random_state(checkpoint.training["random"])

    def _open_log(self, checkpoint: Checkpoint | None) -> None:
        self.logger = TrainingLogger(
            self.run_dir if self.world.leads else None,
            resume_micro_step=0 if checkpoint is None else checkpoint.meta["state"]["micro_step"],
            config=dataclasses.asdict(self.config),
            wandb_id=None if checkpoint is None else checkpoint.meta["wandb_id"],
            tensorboard=self.config.tensorboard,
            console=None if self.world.leads else Console(quiet=True),
        )
        if self.run_dir is not None and self.world.leads:
            write_run_record(self.run_dir, self.config, self._sources)
        for note in self._notes:
            self.logger.info(note)
        if checkpoint is not None:
            self.logger.info(
                f"resumed from {self.config.checkpoint_dir} at opt_step {self.state.opt_step}, "
                f"sample {self.state.samples_seen:,}"
            )

    def train(self) -> int:
        """Trains to the end, or to a signal or time limit; returns the process's exit code.

        0: finished (or dry run passed); 75: out of ``max_time_sec`` or SIGUSR1, saved; 130 / 143:
        SIGINT / SIGTERM, saved.
        """
        config, state, profiler = self.config, self.state, self._profiler
        last = config.max_steps
        if self.dry_run:
            few = DRY_RUN_OPT_STEPS if profiler is None else profiler.opt_steps
            last = min(last, self.world.largest(few))
        if state.opt_step >= last:
            self.logger.info(f"already finished: opt_step {state.opt_step} of {last}")
            self.logger.close()
            self._unlock()
            return EXIT_DONE
        with (
            contextlib.ExitStack() as at_end,
            self.logger,
            StopRequest(config.max_time_sec) as stop,
            Watchdog(self.run_dir, self.world, config) as self._watchdog,
            profiler or contextlib.nullcontext(),
        ):
            at_end.callback(self._unlock)
            self._stop = stop
            self.logger.progress(last, state.opt_step)
            code = self._watchdog.ended(self._train_to(last, stop))
            if self.dry_run and code == EXIT_DONE:
                self._log_row()
                written = "nothing" if profiler is None else "nothing but the profile"
                self.logger.info(f"[dry-run] passed: {last} optimizer steps; {written} was written")
        return code

    def _train_to(self, last: int, stop: StopRequest) -> int:
        state = self.state
        self._meter = Meter(self.device)
        self._restart_meter()
        self._mark_boundary(state.samples_seen)
        batches, micro_step = self._batches(), self._micro_step
        if self._profiler is not None:
            micro_step = self._profiler.around(micro_step, self._meter.paused)
        while self.state.opt_step < last:
            micro_step(*next(batches))
            if self._after_micro_step(last):
                batches = self._batches()
            self._watchdog.beat(opt_step=self.state.opt_step, micro_step=self.state.micro_step)
            if code := self.world.largest(stop.code or 0):
                self._settle()
                self._save(at_end=True)
                self.logger.info(f"{stop.reason}: saved at opt_step {self.state.opt_step}")
                return code
        return EXIT_DONE

    def _restart_meter(self) -> None:
        """The log window that the state has left open; what it holds is of all ranks."""
        state, share = self.state, int(self.world.leads)
        self._meter.restart(loss_sum=share * state.log_loss_sum, tokens=share * state.log_tokens)

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        return make_loader(
            self.dataset,
            self.order,
            start_sample=self.state.samples_seen,
            batch_size=self.config.batch_size,
            skip_spans=self.state.skip_spans,
            num_workers=self.config.num_workers,
            pin_memory=self.device.type == "cuda",
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def _micro_step(self, *batch: Tensor) -> None:
        state = self.state
        tokens, targets, *documents = (t.to(self.device, non_blocking=True) for t in batch)
        metrics, state.opt_step = train_step(
            self.trained, self.optimizer, self.scheduler, self.config, self.amp_context,
            self._guard_line, state.opt_step, tokens, targets, state.window_micro_step,
            segment_ids=documents[0] if documents else None,
        )  # fmt: skip
        assert metrics is not None
        state.micro_step += 1
        samples = self.world.size * tokens.shape[0]
        state.samples_seen = advance(state.samples_seen, samples, state.skip_spans)
        self._meter.took(tokens.numel())
        self._meter.add(metrics["loss_sum"], metrics["tokens"])
        if "skipped" in metrics:
            self._meter.close_window(metrics["skipped"])

    def _guard_line(self, line: str) -> None:
        self.logger.event("nan-guard", line, **self._where())

    def _where(self) -> dict[str, int]:
        """The place in the log of what concerns the window that ended at the boundary."""
        return {"opt_step": self.state.opt_step, "micro_step": self._boundary.micro_step}

    def _after_micro_step(self, last: int) -> bool:
        """Outcomes, the log, validation and saving, as far as due; True after a rollback."""
        state, config = self.state, self.config
        if self._take_in():  # the window before, which train_step has read; still our boundary
            return True
        closed = state.window_micro_step % config.gradient_accumulation_steps == 0
        if closed:
            self._mark_boundary(self._boundary.samples_seen)
        row_due, counted = state.micro_step % config.log_every == 0, state.opt_step
        must_know = row_due or (closed and any(self._due(counted + 1, last)))
        if (must_know or not self.late_guard) and self._settle():
            return True
        if row_due:
            self._log_row()
            if closed:
                self._boundary.log_sums = self._meter.log_sums
        if closed and state.opt_step > counted:
            validation, save = self._due(state.opt_step, last)
            with self._meter.paused():
                if validation:
                    self._validate()
                if save:
                    self._save(at_end=state.opt_step >= config.max_steps)
        return False

    def _due(self, opt_step: int, last: int) -> tuple[bool, bool]:
        """Whether a validation, and whether a save, belongs behind this optimizer step."""
        at_end, every = opt_step >= last, self.config.eval_interval
        validation = at_end or (every > 0 and opt_step % every == 0)
        save = at_end or opt_step % self.config.save_every == 0
        return validation and self.val_dataset is not None, save

    def _mark_boundary(self, window_start: int) -> None:
        sums = self._meter.log_sums
        self._boundary = Boundary.after(self.state, window_start=window_start, log_sums=sums)

    def _settle(self) -> bool:
        """Reads the outcome of the last update if nobody has yet; True after a rollback."""
        self.state.opt_step = settle(
            self.optimizer, self.scheduler, self._guard_line, self.state.opt_step
        )
        return self._take_in()

    def _take_in(self) -> bool:
        """Puts an outcome that has been read into the books; True after a rollback.

        Its window is the one that ended at the present boundary.
        """
        state, outcome = self.state, self._window.take()
        if outcome is None:
            return False
        state.take_in(outcome, window_start=self._boundary.window_start)
        if outcome.dropped:
            return state.strikes >= self.config.nan_guard_max_consecutive and self._roll_back()
        self._meter.grad_norm = outcome.grad_norm
        alarm = state.spike.check(outcome.loss) if math.isfinite(outcome.loss) else None
        if alarm is not None:
            self.logger.event("spike", f"[spike] {alarm}", **self._where())
        self.logger.advance(state.opt_step, outcome.loss)
        return False

    def _log_row(self) -> None:
        state, meter = self.state, self._meter
        row = {
            "opt_step": state.opt_step,
            "micro_step": state.micro_step,
            "lr": self.scheduler.get_last_lr()[0],
            **meter.row(self.world, model_flops_per_token(self.model.cfg)),
            "tokens_seen": state.tokens_seen,
            "samples_seen": state.samples_seen,
            "epoch": self.order.epoch(max(0, state.samples_seen - 1)),
            "dropped_windows": state.dropped_windows,
        }
        self.logger.log(row)
        self._watchdog.beat(**row)
        if meter.first_sec is not None:
            self.logger.info(f"first micro-step took {meter.first_sec:.1f} s")
        meter.restart()

    def _validate(self) -> None:
        assert self.val_dataset is not None
        try:
            loss, tokens = evaluate(
                self.trained, self.val_dataset, batch_size=self.config.batch_size,
                max_batches=self.config.eval_batches, world=self.world,
                amp_context=self.amp_context, should_stop=self._should_stop_validating,
            )  # fmt: skip
        except EvaluationStopped:
            return
        self._watchdog.beat(val_loss=loss)
        self.logger.log_validation({**self._where(), "val_loss": loss, "val_tokens": tokens})

    def _should_stop_validating(self) -> bool:
        self._watchdog.beat("validating")
        return self._stop.code is not None

    def _save(self, *, at_end: bool) -> None:
        """Writes a checkpoint of the last boundary: an open window is replayed."""
        if self._saver is None:
            return
        state = self._boundary.rewound(self.state, self.world)
        meta = {
            "state": state.to_dict(),
            "config": dataclasses.asdict(self.config),
            "data_fingerprint": self.dataset.fingerprint,
            "model": dataclasses.asdict(self.model.cfg),
            "wandb_id": self.logger.wandb_id,
            "init_from": self._init_from,
            "ranks": self.world.size,
        }
        self._watchdog.beat("saving")
        self._told_of_save(at_end=False)
        random = self._boundary.random
        self._saver.start(state.opt_step, self.model, self.optimizer, random, meta)
        if at_end or not self._saver.sharded:
            self._told_of_save(at_end=at_end)

    def _told_of_save(self, *, at_end: bool) -> None:
        """Waits for the save under way, if there is one, and says what came of it."""
        if self._saver is None:
            return
        was, problem = self._saver.finish()
        if problem is None:
            self.state.rollbacks = 0 if was else self.state.rollbacks
            return
        # The next may succeed, and the run is worth more than one file; the last has no next.
        self.logger.event("save-failed", f"[warn] {problem}", **self._where())
        if at_end:
            with self.world.same_fate():
                raise UserError(f"The last checkpoint could not be written: {problem}")

    def _roll_back(self) -> bool:
        lost, config, span_end = self.state, self.config, self._boundary.samples_seen
        after = f"{lost.strikes} windows in a row without a finite loss and gradient"
        if lost.rollbacks >= config.max_rollbacks:
            raise RuntimeError(f"[nan-guard] {after}, after {lost.rollbacks} rollbacks: giving up.")
        self._told_of_save(at_end=False)
        checkpoint = None if self._saver is None else self._saver.load(None)
        if checkpoint is None:
            raise RuntimeError(f"[nan-guard] {after}, and there is no checkpoint to go back to.")
        self._restore(checkpoint)
        self._window.forget()
        state = self.state
        state.skip_spans = [*lost.skip_spans, (lost.first_strike_sample, span_end)]
        state.dropped_windows, state.rollbacks = lost.dropped_windows, lost.rollbacks + 1
        state.strikes = 0
        self._restart_meter()
        self._mark_boundary(state.samples_seen)
        self.logger.rewind(state.micro_step)
        self.logger.event(
            "rollback",
            f"[nan-guard] {after}: back to opt_step {state.opt_step}, skipping samples "
            f"{lost.first_strike_sample:,} to {span_end:,}",
            **self._where(),
        )
        return True


def main(argv: list[str] | None = None) -> None:
    """The seeds' command, ``python3 training/pretrain.py ...``."""
    from mamba3_lite.training.command import pretrain_command

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(pretrain_command)
    with user_errors_as_one_line():
        app(sys.argv[1:] if argv is None else argv)

"""What `bench` times: the SSD operator of one layer, optimizer steps, the loader, decoding.

A case says first what it would time, so that everything can be refused before anything is built.
The scripts in benchmarks/ are made of the same pieces.
"""

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.loader import SampleOrder, make_loader
from mamba3_lite.data.shards import ShardWriter
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.inference.decoder import decoder_for
from mamba3_lite.inference.generate import prefill
from mamba3_lite.measure import parity
from mamba3_lite.measure.ab_arms import LAUNCH_KNOBS
from mamba3_lite.measure.ab_run import backend_asked_for, compile_mode_in_effect
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training import passes
from mamba3_lite.training.compile import compile_blocks
from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.optim import build_optimizer
from mamba3_lite.training.schedule import build_schedule
from mamba3_lite.training.step import settle, train_step

WHAT = ("operator", "step", "loader", "decode")
PARITY_PROBLEM = parity.Problem(2048, None, parity.DECAYS[0], False, False)
DOCUMENT_TOKENS = 700  # mean length of a document
CORPUS_TOKENS = 2_000_000
# Two batches are read ahead, so that single ones arrive at once or late.
BATCHES_A_CALL = 8
PROMPT_TOKENS = 512
LARGE_BATCH = {"cuda": 64, "cpu": 8}
# Relative L2 of logits. One rounding to bf16 is 4e-3; a state that is lost moves the logits of the
# quickstart's model by 0.2.
LOGITS_LIMIT = 3e-2


@dataclass(frozen=True)
class Work:
    """What is called again and again: ``units`` at a call, each of so many tokens."""

    call: Callable[[], object]
    tokens: int
    units: int = 1
    on_host: bool = False  # no work for the device, whose clock would say nothing


@dataclass(frozen=True)
class Case:
    """One thing to time. Rows compare when ``name`` and ``settings`` are equal."""

    name: str
    settings: dict[str, Any]
    build: Callable[[ExitStack], Work]  # what it opens is closed by the stack


def milliseconds(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Of each call, one after the other as in a loop; on a GPU between events on the device."""
    if device.type != "cuda":
        seconds = [time.perf_counter()]
        for _ in range(calls):
            call()
            seconds.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(seconds)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def parity_errors(
    backend: str, device: torch.device, chunk_size: int = 64
) -> dict[str, dict[str, float]]:
    """Errors of a path against the oracle, by precision and tensor.

    Raises:
        UserError: they exceed their limits; a number from a wrong path is worth nothing.
    """
    shown = {}
    for dtype in parity.PRECISIONS.get(backend, (torch.float32,)):
        if device.type == "cpu" and dtype == torch.bfloat16:
            continue  # Triton's interpreter multiplies the bit patterns
        run = ssd_backends.BACKENDS[backend].run
        result = parity.check(run, PARITY_PROBLEM, chunk_size, dtype, device)
        failures = result.failures(PARITY_PROBLEM, dtype)
        if failures:
            raise UserError(f"{backend}: parity failed ({'; '.join(failures)}): nothing is timed")
        rounded = {name: float(f"{error:.2e}") for name, error in result.errors.items()}
        shown[str(dtype).removeprefix("torch.")] = rounded
    return shown


# The operator -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """The SSD of one layer under one path. One that reads projections gets one in bfloat16."""

    path: str
    batch: int
    length: int
    heads: int
    head_dim: int
    state_dim: int
    chunk_size: int

    @property
    def _projected(self) -> bool:
        return ssd_backends.BACKENDS[self.path].projected is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs, but A."""
        return torch.bfloat16 if self._projected else torch.float32

    def draw(self, device: torch.device, seed: int) -> tuple[list[Tensor], Tensor]:
        """Leaves as this path takes them, dt of the spread at initialisation, and dy."""
        heads, channels, state = self.heads, self.head_dim, self.state_dim
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(width: int) -> Tensor:
            shape = (self.batch, self.length, width)
            return torch.randn(*shape, generator=generator, device=device, dtype=self.dtype)

        proj = normal(heads * (channels + 4 * state + 1))
        proj[..., -heads:] *= 0.64
        decay = [-torch.ones(heads, device=device), torch.linspace(0, 3.14, heads, device=device)]
        if self._projected:
            leaves = [proj, *decay]
        else:
            parts = proj.split([heads * channels, *[heads * state] * 4, heads], -1)
            wide = [part.unflatten(-1, (heads, -1)).contiguous() for part in parts[:5]]
            leaves = [*wide, parts[5].contiguous(), *decay]
        dy = normal(heads * channels).unflatten(-1, (heads, channels))
        return [leaf.requires_grad_() for leaf in leaves], dy

    def run(self, leaves: list[Tensor]) -> Tensor:
        """y (B, T, H, D)."""
        backend = ssd_backends.BACKENDS[self.path]
        if backend.run_projected is not None:
            proj, a_re, a_im = leaves
            return backend.run_projected(
                proj, (a_re, a_im),
                heads=self.heads, state_dim=self.state_dim, head_dim=self.head_dim,
            )[0]  # fmt: skip
        x, b_re, b_im, c_re, c_im, dt, a_re, a_im = leaves
        pairs = (b_re, b_im), (c_re, c_im)
        return backend.run(x, *pairs, dt, (a_re, a_im), chunk_size=self.chunk_size)[0]

    def forward(self, leaves: list[Tensor], dy: Tensor) -> Tensor:
        """y, without gradients; ``dy`` is not used."""
        with torch.no_grad():
            return self.run(leaves)

    def both(self, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        """Every gradient."""
        return torch.autograd.grad(self.run(leaves), leaves, dy)


def _operator_cases(config: TrainingConfig, device: torch.device, backend: str) -> list[Case]:
    model = config.model()
    operator = Operator(
        backend, config.batch_size, config.max_seq_len, model.n_heads, model.head_dim,
        model.state_dim, model.chunk_size,
    )  # fmt: skip
    shape = dataclasses.asdict(operator)
    dtype = str(operator.dtype).removeprefix("torch.")
    settings = {"backend": shape.pop("path"), "dtype": dtype, **shape, **_launch_knobs(backend)}

    def build(name: str) -> Work:
        # In turns, so that a call finds less of its inputs in a cache.
        sets = itertools.cycle([operator.draw(device, seed) for seed in range(2)])
        one_pass = getattr(operator, name)
        return Work(lambda: one_pass(*next(sets)), config.tokens_per_micro_step)

    return [
        Case("operator, forward", settings, lambda stack: build("forward")),
        Case("operator, with backward", settings, lambda stack: build("both")),
    ]


# The training step --------------------------------------------------------------------------------


class StepLoop:
    """A model and all that an optimizer step of one micro-step needs, on random tokens."""

    def __init__(self, config: TrainingConfig, device: torch.device):
        torch.manual_seed(0)
        self.config = dataclasses.replace(config, gradient_accumulation_steps=1)
        self.model = Mamba3Transformer(config.model()).to(device).train()
        if config.compile_model:
            compile_blocks(self.model, config.compile_mode)
        self.optimizer = build_optimizer(self.model, self.config)
        self.scheduler = build_schedule(self.optimizer, self.config)
        self.amp: AbstractContextManager = nullcontext()
        if device.type == "cuda":
            self.amp = torch.autocast("cuda", dtype=torch.bfloat16)
        shape = (config.batch_size, config.max_seq_len)
        self.window = torch.randint(0, config.vocab_size, (shape[0], shape[1] + 1), device=device)
        self.segments: Tensor | None = None
        if config.document_mode:
            self.segments = (
                (torch.rand(shape, device=device) < 1 / DOCUMENT_TOKENS).long().cumsum(1)
            )
        window = AccumulationWindow.of(self.optimizer)
        window.late = True
        window.recording = passes.recording_for(self.model, config, self.amp, World(device))
        self.opt_steps = self.calls = 0

    def opt_step(self) -> Tensor:
        """One optimizer step; the loss, on the device."""
        metrics, self.opt_steps = train_step(
            self.model, self.optimizer, self.scheduler, self.config, self.amp, print,
            self.opt_steps, self.window[:, :-1], self.window[:, 1:], self.calls,
            segment_ids=self.segments,
        )  # fmt: skip
        self.calls += 1
        assert metrics is not None
        self.loss: Tensor = metrics["loss"]
        return self.loss

    def settle(self) -> None:
        """Takes in the outcome of the last step."""
        self.opt_steps = settle(self.optimizer, self.scheduler, print, self.opt_steps)
        passes.insist(AccumulationWindow.of(self.optimizer).recording)


def _step_case(config: TrainingConfig, device: torch.device, backend: str) -> Case:
    settings = {
        **_model_settings(config, backend),
        "micro_batch_size": config.batch_size,
        "compile_mode": compile_mode_in_effect(config, device),
        "document_mode": config.document_mode,
    }

    def build(stack: ExitStack) -> Work:
        loop = StepLoop(config, device)
        if not torch.isfinite(loop.opt_step()):
            raise UserError(f"the loss of an optimizer step is {loop.loss}: nothing is timed")
        loop.settle()
        return Work(loop.opt_step, config.tokens_per_micro_step)

    return Case("step", settings, build)


def _model_settings(config: TrainingConfig, backend: str) -> dict[str, Any]:
    model = dataclasses.asdict(config.model())
    del model["ssd_dispatch"]
    return {"backend": backend, **model, **_launch_knobs(backend)}


def _launch_knobs(backend: str) -> dict[str, str]:
    return {name: env.read(name) for name in LAUNCH_KNOBS} if backend == "triton" else {}


# The loader ---------------------------------------------------------------------------------------


def write_shards(folder: Path, n_tokens: int, mean_length: int, vocab_size: int) -> int:
    """Documents of exponentially distributed lengths; returns how many.

    The last id of the vocabulary is the EOS.
    """
    rng, eos_id = np.random.default_rng(0), vocab_size - 1
    with ShardWriter(
        folder, vocab_size=vocab_size, eos_id=eos_id, tokenizer_name="none",
        tokenizer_fingerprint="0" * 64, source_names=["random"],
    ) as writer:  # fmt: skip
        while writer.n_tokens < n_tokens:
            lengths = 1 + rng.exponential(mean_length, 1_000).astype(np.int64)
            ids = rng.integers(max(1, eos_id), size=lengths.sum())
            ids[lengths.cumsum() - 1] = eos_id
            writer.append_documents(ids, lengths, np.zeros(lengths.size, np.int64))
    return writer.n_documents


def _loader_case(config: TrainingConfig, device: torch.device) -> Case:
    pinned = device.type == "cuda"
    settings = {
        "order": config.data_order,
        "document_mode": config.document_mode,
        "mask_boundary_targets": config.mask_boundary_targets,
        "num_workers": config.num_workers,
        "batch": config.batch_size,
        "seq_len": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "pin_memory": pinned,
    }

    def build(stack: ExitStack) -> Work:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "shards"
        n_tokens = max(CORPUS_TOKENS, 2 * config.tokens_per_micro_step + 1)
        write_shards(folder, n_tokens, DOCUMENT_TOKENS, config.vocab_size)
        data = PretrainDataset(
            folder, config.max_seq_len, config.vocab_size, document_mode=config.document_mode,
            mask_boundary_targets=config.mask_boundary_targets,
        )  # fmt: skip
        batches = make_loader(
            data, SampleOrder(len(data), config.data_order, config.seed), start_sample=0,
            batch_size=config.batch_size, num_workers=config.num_workers,
            pin_memory=pinned,
        )  # fmt: skip
        stack.callback(batches.close)  # type: ignore[attr-defined]

        def call() -> None:
            for _ in itertools.islice(batches, BATCHES_A_CALL):
                pass

        return Work(call, config.tokens_per_micro_step, units=BATCHES_A_CALL, on_host=True)

    return Case("loader", settings, build)


# Decoding -----------------------------------------------------------------------------------------


class Decoding:
    """The one place here that knows how `inference/` decodes a batch of prompts."""

    def __init__(self, model: Mamba3Transformer, prompts: list[list[int]], stack: ExitStack):
        self.model, self.prompts = model, prompts
        self.decoder = stack.enter_context(decoder_for(model, len(prompts)))

    def prefill(self) -> Tensor:
        """Logits (B, vocab) after the prompts."""
        logits, state = prefill(self.model, self.prompts)
        self.decoder.load(state)
        return logits

    def token(self, ids: Tensor) -> Tensor:
        """Logits (B, vocab) after one more token each, ids (B,)."""
        return self.decoder.step(ids)


def logits_error(model: Mamba3Transformer, device: torch.device) -> float:
    """Relative L2 error of logits after single tokens, against reading them with the prompt."""
    ids = torch.randint(
        0, model.cfg.vocab_size, (2, 70), generator=torch.Generator().manual_seed(0)
    )
    with ExitStack() as stack:
        want = Decoding(model, ids.tolist(), stack).prefill()
        decoding = Decoding(model, ids[:, :-3].tolist(), stack)
        decoding.prefill()
        for column in ids[:, -3:].to(device).unbind(1):
            got = decoding.token(column)
        return float((got - want).norm() / want.norm())


def _decode_cases(config: TrainingConfig, device: torch.device, backend: str) -> list[Case]:
    length = min(PROMPT_TOKENS, config.max_seq_len)
    settings = {**_model_settings(config, backend), "prompt_tokens": length}
    del settings["max_seq_len"], settings["grad_checkpoint"]  # of training only

    @functools.cache
    def model() -> Mamba3Transformer:
        torch.manual_seed(0)
        found = Mamba3Transformer(config.model()).to(device).eval()
        if device.type == "cuda":
            found.bfloat16()
        error = logits_error(found, device)
        if not error <= LOGITS_LIMIT:
            raise UserError(
                f"decode: single tokens and a whole prompt part by {error:.1e} in their logits "
                f"(limit {LOGITS_LIMIT}): nothing is timed"
            )
        return found

    @functools.cache
    def decoding(batch: int, stack: ExitStack) -> tuple[Decoding, Tensor]:
        ids = torch.randint(
            0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)
        )
        found = Decoding(model(), ids.tolist(), stack)
        found.prefill()
        return found, ids[:, -1].to(device)

    def case(name: str, batch: int, work: Callable[[int, ExitStack], Work]) -> Case:
        own = {**settings, "batch": batch}
        return Case(f"decode, {name}, batch {batch}", own, lambda stack: work(batch, stack))

    def prompts(batch: int, stack: ExitStack) -> Work:
        return Work(decoding(batch, stack)[0].prefill, batch * length)

    def tokens(batch: int, stack: ExitStack) -> Work:
        one, ids = decoding(batch, stack)
        return Work(lambda: one.token(ids), batch)

    return [
        case(name, batch, work)
        for batch in (1, LARGE_BATCH[device.type])
        for name, work in (("prefill", prompts), ("token", tokens))
    ]


def plan(
    config: TrainingConfig, device: torch.device, what: Iterable[str]
) -> tuple[list[Case], str | None]:
    """The cases of a configuration, and the SSD path that they take (None: none of them has one).

    Args:
        what: of ``WHAT``.

    Raises:
        UserError: the path or the compilation that the configuration names cannot be had here.
    """
    found: list[Case] = []
    backend = backend_asked_for(config, device) if set(what) != {"loader"} else ""
    for one in what:
        match one:
            case "operator":
                found += _operator_cases(config, device, backend)
            case "step":
                found.append(_step_case(config, device, backend))
            case "loader":
                found.append(_loader_case(config, device))
            case "decode":
                found += _decode_cases(config, device, backend)
    return found, backend or None

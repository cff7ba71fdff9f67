"""One recurrent step a token, as fast as the device allows, with a state of constant size.

``decoder_for`` gives the fused kernels in one CUDA graph where they run and are right, else the
plain path (``models/transformer.py:Mamba3Transformer.step``); both have the same methods.

Legend: B batch, V vocabulary, H heads, N complex state width, D channels of a head.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.inference import decode_plans, decode_self_test
from mamba3_lite.inference.decode_ops import LARGEST_INPUT, LARGEST_STATE
from mamba3_lite.inference.decode_plans import Plan
from mamba3_lite.inference.decode_resident import Resident, ResidentError, cut
from mamba3_lite.inference.decode_staged import fits, ops_for
from mamba3_lite.inference.decode_step import run_steps
from mamba3_lite.inference.decode_weights import STEPS, Buffers, Weights, make_buffers, prepare
from mamba3_lite.models.ssd_fused import HAS_TRITON
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig

# Timed replays of a candidate's graph of several steps: some 60 ms at batch 1.
_WARM_UP, _TIMED = 3, 20


class StepDecoder(Protocol):
    """Decodes a fixed number of sequences, token by token."""

    def load(self, state: Sequence[Tensor]) -> None:
        """Starts from one state (B, H, 2N, D) a layer, as ``forward`` returns it; copies it."""

    def step(self, ids: Tensor) -> Tensor:
        """Reads ids (B,) and returns the logits (B, V), which the next step may overwrite."""

    def greedy(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
        """At least one step and at most ``most``, each reading what the last found likeliest.

        Returns:
            The ids (B,) to go on with, and (steps, B, 2) float64: each step's ids of the largest
            logits, and these logits. Later steps may overwrite both. None: it looks for no ids.
        """

    def state(self) -> list[Tensor]:
        """A copy of the state now, one (B, H, 2N, D) float32 a layer."""


class PlainDecoder:
    """``Mamba3Transformer.step`` behind the same methods; ``state_dtype`` is kept between steps."""

    def __init__(self, model: Mamba3Transformer, *, state_dtype: torch.dtype = torch.float32):
        self.model, self.state_dtype = model, state_dtype
        self._state: list[Tensor] = []

    def load(self, state: Sequence[Tensor]) -> None:
        self._state = [self._kept(t) for t in state]

    def _kept(self, state: Tensor) -> Tensor:
        # The float64 path keeps its precision: a state is only ever narrowed on request.
        return state.to(self.state_dtype) if self.state_dtype != torch.float32 else state

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        logits, state = self.model.step(ids, self._state)
        self._state = [self._kept(t) for t in state]
        return logits

    def greedy(self, ids: Tensor, most: int) -> None:
        return None

    def state(self) -> list[Tensor]:
        return [t.float() if t.dtype != torch.float64 else t.clone() for t in self._state]


def refuse(model: Mamba3Transformer) -> str | None:
    """Why the kernels cannot decode this model where it lives, in a sentence; None if they can."""
    device, cfg = model.embed.weight.device, model.cfg
    interpreted = env.read("TRITON_INTERPRET") == "1"
    if not HAS_TRITON:
        return "Triton is not installed."
    if device.type != "cuda" and not interpreted:
        return f"the model is on '{device.type}', not on CUDA."
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 or more."
    if model.embed.weight.dtype == torch.float64:
        return "they compute in float32 and narrower."
    for name, size in (("head_dim", cfg.head_dim), ("state_dim", cfg.state_dim)):
        if size > LARGEST_STATE:
            return f"{name}={size} exceeds {LARGEST_STATE}."
    if (widest := max(cfg.d_model, cfg.ffn_dim, cfg.n_heads * cfg.head_dim)) > LARGEST_INPUT:
        return f"a layer is {widest} wide, more than {LARGEST_INPUT}."
    return None


class Decoder:
    """The fused kernels of whole steps, captured once as CUDA graphs with their own buffers.

    Args:
        model: gives the weights; they are prepared here, so later changes to it are not seen.
        batch_size: sequences that are decoded together.
        dtype: of weights and activations; None takes the model's. What has it already is shared.
        state_dtype: float32, or bfloat16 for half the state's traffic at some drift.
        plan: None tests the candidates against their twins and takes the fastest, once a machine.

    Raises:
        UserError: no plan gives the right results here.
    """

    def __init__(
        self,
        model: Mamba3Transformer,
        batch_size: int,
        *,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        plan: Plan | None = None,
    ):
        self.device = model.embed.weight.device
        dtype = dtype or model.embed.weight.dtype
        self.weights: Weights = prepare(model, dtype)
        self.buffers: Buffers = make_buffers(model.cfg, batch_size, dtype, state_dtype, self.device)
        # By their numbers of steps; none where there is no CUDA: the kernels are then interpreted.
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        cfg = model.cfg
        self._shape = (
            f"B{batch_size}-L{cfg.n_layers}-d{cfg.d_model}-H{cfg.n_heads}-N{cfg.state_dim}"
            f"-P{cfg.head_dim}-F{cfg.ffn_dim}-V{cfg.vocab_size}-{state_dtype}"
        )
        with self._on_device():
            self.plan = self._tested(plan) if plan else self._choose(cfg, dtype, batch_size)
            self._run = self._runner(self.plan)
            if self.device.type == "cuda":
                self._graphs = {steps: self._captured(self._run, steps) for steps in (1, STEPS)}
        self.buffers.state.zero_()

    def _on_device(self):
        cuda = self.device.type == "cuda"
        return torch.cuda.device(self.device) if cuda else contextlib.nullcontext()

    def load(self, state: Sequence[Tensor]) -> None:
        for own, given in zip(self.buffers.state, state, strict=True):
            own.copy_(given)

    def step(self, ids: Tensor) -> Tensor:
        self._steps(ids, 1)
        return self.buffers.logits

    def greedy(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
        count = STEPS if most >= STEPS else 1
        self._steps(ids, count)
        return self.buffers.ids, self.buffers.best[:count]

    def _steps(self, ids: Tensor, count: int) -> None:
        if ids is not self.buffers.ids:
            self.buffers.ids.copy_(ids)
        if count in self._graphs:
            self._graphs[count].replay()
        else:
            self._run(count)

    def state(self) -> list[Tensor]:
        return [t.to(torch.float32, copy=True) for t in self.buffers.state]

    @functools.cached_property
    def _resident(self) -> Resident:
        """One for all its graphs, which do not keep alive what they point to."""
        return Resident(self.weights, self.buffers)

    def _runner(self, plan: Plan) -> Callable[[int], None]:
        """Runs so many steps as a plan wants them, see ``decode_step.py:run_steps``."""
        if plan.resident:
            return self._resident.run
        return functools.partial(run_steps, ops_for(plan), self.weights, self.buffers)

    def _problem(self, plan: Plan) -> str | None:
        from triton.runtime.errors import OutOfResources

        try:
            if plan.resident:
                return decode_self_test.problem_of_steps(self._resident, self.weights, self.buffers)
            return decode_self_test.problem(ops_for(plan), self.weights, self.buffers)
        except (OutOfResources, ResidentError) as problem:
            return str(problem)

    def _tested(self, plan: Plan) -> Plan:
        problem = self._problem(plan)
        if problem is not None:
            raise UserError(f"the decoding kernels failed their self-test: {problem}.")
        return plan

    def _captured(self, run: Callable[[int], None], steps: int) -> torch.cuda.CUDAGraph:
        here = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):  # kernels are compiled and loaded before a capture
            run(min(steps, 2))
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(steps)
        return graph

    def _takes(self, plan: Plan, cfg: ModelConfig, batch: int) -> bool:
        """Whether a plan is on offer for a model of this shape, with what is installed here."""
        if not plan.resident:
            return not plan.staged or fits(cfg, batch)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        if cut(self.weights, self.buffers, processors) is None:
            return False
        try:
            return self._resident is not None
        except ResidentError as problem:
            print(f"[decode] {plan} passed over: {problem}")
            return False

    def _choose(self, cfg: ModelConfig, dtype: torch.dtype, batch: int) -> Plan:
        """The remembered plan, or the fastest of those that give the right results."""
        plans = decode_plans.candidates(self.device, dtype, batch)
        plans = [plan for plan in plans if self._takes(plan, cfg, batch)]
        if len(plans) == 1:
            return self._tested(plans[0])
        name = decode_plans.key(self.device, dtype, self._shape)
        plan = decode_plans.remembered(name, plans)
        if plan is not None:
            return self._tested(plan)
        found, problems = [], []
        for plan in plans:
            problem = self._problem(plan)
            if problem is not None:
                print(f"[decode] {plan} passed over: {problem}")
                problems.append(problem)
                continue
            run = self._runner(plan)
            found.append((_microseconds(self._captured(run, STEPS)) / STEPS, plan))
        if not found:
            raise UserError(f"the decoding kernels failed their self-test: {problems[0]}.")
        took, plan = min(found, key=lambda entry: entry[0])
        print(f"[decode] batch {batch}: {took:.0f} us a step, the best of {len(found)} plans")
        decode_plans.remember(name, plan)
        return plan


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, the median."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_WARM_UP + _TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    pairs = list(zip(marks, marks[1:], strict=False))[_WARM_UP:]
    return 1e3 * sorted(start.elapsed_time(end) for start, end in pairs)[_TIMED // 2]


# The last decoder of each model: preparing one takes a second, and a program that generates does it
# again and again. The key tells when the weights have changed since.
_idle: weakref.WeakKeyDictionary[Mamba3Transformer, tuple[object, Decoder]]
_idle = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def decoder_for(
    model: Mamba3Transformer, batch_size: int, *, state_dtype: torch.dtype = torch.float32
) -> Iterator[StepDecoder]:
    """The fastest decoder that is right where the model lives, for one user at a time.

    A GPU on which the kernels cannot run or fail their self-test gets the plain path, and a line
    that says so.
    """
    reason = refuse(model)
    if reason is None:
        weights = tuple((p.data_ptr(), p._version, p.dtype) for p in model.parameters())
        key = (batch_size, state_dtype, weights)
        # Taken out while in use: whoever comes meanwhile gets one of their own.
        held = _idle.pop(model, None)
        try:
            if held is None or held[0] != key:
                held = None
                held = key, Decoder(model, batch_size, state_dtype=state_dtype)
        except UserError as problem:
            reason = str(problem)
        else:
            try:
                yield held[1]
            finally:
                _idle[model] = held
            return
    if model.embed.weight.device.type == "cuda":
        print(f"[decode] plain path: {reason}")
    yield PlainDecoder(model, state_dtype=state_dtype)

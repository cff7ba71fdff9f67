"""Every SSD path against the token-by-token oracle in float64, at real lengths.

Outputs, states and all gradients are compared.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.ssd_complex import ssd_naive_complex

HEADS, STATE, CHANNELS = 2, 64, 64
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 2048, 8192)
CHUNKS = (16, 64, 128, 256)
# Raw dt around a value; None draws N(0, 0.64^2), the spread of a freshly initialised production
# block.
RAW_DT = (-20.0, 0.0, 2.0, 50.0, 1000.0, None)
DECAYS = ((-1 + 0j, -0.02 + 0.5j), (-1 + 3.14j, -1e-4 + 0.1j))

# Relative L2 limits by precision; the names are those of `Result.errors`.
LIMITS = {
    torch.float32: {
        "y": 1e-5, "state": 1e-5, "dx": 1e-5, "dB": 1e-5, "dC": 1e-5, "dstate": 1e-5, "ddt": 1e-4,
        "dA": 1e-3,
    },
    torch.float64: dict.fromkeys(("y", "state", "dx", "dB", "dC", "dstate", "ddt", "dA"), 1e-11),
    # Operands of 8 bits: 3e-3 by themselves. ddt and dA are small differences of large sums.
    torch.bfloat16: {
        "y": 5e-3, "state": 5e-3, "dx": 5e-3, "dB": 5e-3, "dC": 5e-3, "dstate": 5e-3, "ddt": 1e-2,
        "dA": 1e-1,
    },
}  # fmt: skip
# What each backend computes in, where that is not float32 and float64.
PRECISIONS = {"triton": (torch.float32,), "fused": (torch.bfloat16, torch.float32)}
# Where the true ddt, dA and dstate vanish (steps of 50 and more forget everything, a lone token has
# nothing to forget), an absolute error in units of |y| |dy|.
VANISHING = {torch.bfloat16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-12}


@dataclass(frozen=True)
class Problem:
    """What the oracle is asked: one sequence, batch 1."""

    length: int
    raw_dt: float | None
    decays: tuple[complex, ...]
    with_state: bool
    with_segments: bool

    @property
    def decay_gradients_vanish(self) -> bool:
        """Whether ddt, dA and dstate may be zero in truth: a relative error then says nothing."""
        return self.raw_dt in (50.0, 1000.0) or self.length == 1


@dataclass
class Result:
    """How far one implementation is from the oracle, and whether all it gave was finite."""

    errors: dict[str, float]  # relative L2, by tensor
    absolute: dict[str, float]  # of ddt, dA and dstate, in units of |y| |dy|
    finite: bool

    def failures(self, problem: Problem, dtype: torch.dtype) -> list[str]:
        """Which tensors miss their limit, one sentence each."""
        failed = [] if self.finite else ["not finite"]
        for name, limit in LIMITS[dtype].items():
            if name not in self.errors or self.errors[name] <= limit:
                continue
            if problem.decay_gradients_vanish and self.absolute.get(name, 1) <= VANISHING[dtype]:
                continue
            failed.append(f"{name} off by {self.errors[name]:.1e} (limit {limit:.0e})")
        return failed


def _complex(pair: Tensor) -> Tensor:
    return torch.view_as_complex(pair.contiguous())


@functools.lru_cache(maxsize=4)
def inputs(problem: Problem, precision: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random inputs that ``precision`` holds, so that every path sees the oracle's numbers exactly.

    A and the states are float32 in every path, and stay so here.
    """
    generator = torch.Generator().manual_seed(problem.length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    t, h = problem.length, HEADS
    spread = draw(1, t, h)
    boundaries = (torch.rand(1, t, generator=generator) < 0.02).long()
    given = {
        "x": draw(1, t, h, CHANNELS),
        "B": draw(1, t, h, STATE, 2),
        "C": draw(1, t, h, STATE, 2),
        "dt": 0.64 * spread if problem.raw_dt is None else problem.raw_dt + 0.1 * spread,
        "A": torch.view_as_real(torch.tensor(problem.decays, dtype=torch.complex64)),
        "state": draw(1, h, 2 * STATE, CHANNELS),
        "segments": boundaries.cumsum(1),
        "dy": draw(1, t, h, CHANNELS),
        "dfinal": draw(1, h, 2 * STATE, CHANNELS),
    }
    if precision == torch.bfloat16:
        for name in ("x", "B", "C", "dt", "dy"):
            given[name] = given[name].to(precision).float()
    return given


def _oracle(x, b, c, dt, a, *, chunk_size, state, return_state, segment_ids):
    """The oracle behind the backend seam."""
    b, c, a = (torch.complex(*pair) for pair in (b, c, a))
    initial = None if state is None else torch.complex(*state.chunk(2, 2))
    y, final = ssd_naive_complex(
        x, a, b, c, dt, initial_state=initial, return_final_state=True, segment_ids=segment_ids
    )
    return y.real, torch.cat([final.real, final.imag], 2)


def _run(
    run: ssd_backends.Run, problem: Problem, chunk: int, dtype: torch.dtype, device: torch.device,
    precision: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    """Outputs and gradients of <y, dy> + <final state, dfinal> under one implementation."""
    given = inputs(problem, precision)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    leaves = {
        name: given[name].to(device, wide if name in ("A", "state") else dtype).requires_grad_()
        for name in ("x", "B", "C", "dt", "A", "state")
    }
    y, final = run(
        leaves["x"], leaves["B"].unbind(-1), leaves["C"].unbind(-1), leaves["dt"],
        leaves["A"].unbind(-1), chunk_size=chunk,
        state=leaves["state"] if problem.with_state else None, return_state=True,
        segment_ids=given["segments"].to(device) if problem.with_segments else None,
    )  # fmt: skip
    assert final is not None
    loss = (y * given["dy"].to(y)).sum() + (final * given["dfinal"].to(final)).sum()
    used = {n: leaf for n, leaf in leaves.items() if n != "state" or problem.with_state}
    gradients = torch.autograd.grad(loss, list(used.values()))
    out = {"y": y.detach(), "state": final.detach()}
    out |= {f"d{name}": gradient for name, gradient in zip(used, gradients, strict=True)}
    return {name: value.cpu().double() for name, value in out.items()}


@functools.lru_cache(maxsize=4)
def oracle(problem: Problem, precision: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The truth, in float64, for inputs that ``precision`` holds."""
    return _run(_oracle, problem, 1, torch.float64, torch.device("cpu"), precision)


def check(
    run: ssd_backends.Run,
    problem: Problem,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Result:
    """Compares one implementation of the backend seam with the oracle."""
    precision = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    want = oracle(problem, precision)
    got = _run(run, problem, chunk, dtype, torch.device(device), precision)
    scale = float(want["y"].norm() * inputs(problem, precision)["dy"].double().norm())
    tiny = torch.finfo(torch.float64).tiny
    difference = {name: float((got[name] - want[name]).norm()) for name in want}
    return Result(
        errors={name: difference[name] / max(float(want[name].norm()), tiny) for name in want},
        absolute={
            name: difference[name] / scale for name in ("ddt", "dA", "dstate") if name in want
        },
        finite=all(bool(torch.isfinite(value).all()) for value in got.values()),
    )


def problems(lengths: Iterable[int] = LENGTHS) -> list[Problem]:
    """The whole grid for these lengths."""
    return [
        Problem(*point)
        for point in itertools.product(lengths, RAW_DT, DECAYS, (False, True), (False, True))
    ]


@dataclass
class Worst:
    """The largest errors met in one row of the table."""

    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    cases: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def sweep(
    names: Iterable[str],
    grid: list[Problem],
    chunks: Iterable[int] = CHUNKS,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64),
    device: str = "cpu",
    progress: Callable[[list[Problem]], Iterable[Problem]] = iter,
) -> dict[tuple[str, str, str], Worst]:
    """Runs the grid; keys are (backend, precision, raw dt)."""
    rows: dict[tuple[str, str, str], Worst] = {}
    for problem in progress(grid):
        for name, dtype, chunk in itertools.product(names, dtypes, chunks):
            result = check(ssd_backends.BACKENDS[name].run, problem, chunk, dtype, device)
            regime = "init" if problem.raw_dt is None else f"{problem.raw_dt:g}"
            row = rows.setdefault((name, str(dtype).removeprefix("torch."), regime), Worst())
            row.cases += 1
            row.failures += [f"{problem}, C={chunk}: {f}" for f in result.failures(problem, dtype)]
            for tensor, error in result.errors.items():
                if tensor in result.absolute and problem.decay_gradients_vanish:
                    error = min(error, result.absolute[tensor])
                row.errors[tensor] = max(row.errors.get(tensor, 0.0), error)
    return rows


def table(rows: dict[tuple[str, str, str], Worst]) -> Table:
    """The worst relative L2 error of each tensor.

    Where ddt, dA and dstate may vanish it is the better of relative and absolute.
    """
    tensors = ("y", "state", "dx", "dB", "dC", "ddt", "dA", "dstate")
    shown = Table("backend", "precision", "raw dt", "cases", *tensors, "verdict")
    for (name, dtype, regime), row in sorted(rows.items()):
        errors = [f"{row.errors[t]:.0e}" if t in row.errors else "-" for t in tensors]
        verdict = "ok" if not row.failures else f"{len(row.failures)} FAILED"
        shown.add_row(name, dtype, regime, str(row.cases), *errors, verdict)
    return shown


def parity_command(
    full: Annotated[bool, typer.Option("--full", help="All lengths up to 8192 (minutes).")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only these; default: all here.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Compare every SSD path with the float64 oracle: outputs, states and all gradients.

    Examples:

    mamba3-lite parity

    mamba3-lite parity --full --backend rotated
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device!r} is unknown; use cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here; use --device cpu.")
    shape = ssd_backends.Shape(CHANNELS, STATE, 64, torch.device(device))
    if backend:
        names = [ssd_backends.resolve(name, shape).name for name in backend]
    else:
        names = [n for n, b in ssd_backends.BACKENDS.items() if b.refuse(shape) is None]
    grid = problems(LENGTHS if full else (1, 63, 64, 65, 129))
    rows: dict[tuple[str, str, str], Worst] = {}
    console = Console(stderr=True)
    for name in names:
        dtypes = PRECISIONS.get(name, (torch.float32, torch.float64))
        if device == "cpu":
            # Triton's interpreter multiplies the bit patterns of bfloat16.
            dtypes = tuple(dtype for dtype in dtypes if dtype != torch.bfloat16)
        bar = functools.partial(track, description=name, console=console, transient=True)
        rows |= sweep([name], grid, dtypes=dtypes, device=device, progress=bar)
    Console(width=140).print(table(rows))
    failures = [failure for row in rows.values() for failure in row.failures]
    for failure in failures[:10]:
        print(failure)
    print(f"{sum(row.cases for row in rows.values())} cases, {len(failures)} failures")
    raise typer.Exit(1 if failures else 0)

"""Which SSD implementation runs, and why not another.

A backend computes a whole sequence behind one seam (see docs/architecture.md, section 3); decoding
one token uses :func:`mamba3_lite.models.ssd_rotated.step`, which every backend's final state feeds.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.models.ssd_complex import Pair, chunkwise, per_chunk_ssd_pytorch, ssd_naive_complex

Run = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Shape:
    """What a backend may refuse: dimensions of the heads, the chunk, and where the tensors live."""

    head_dim: int
    state_dim: int
    chunk_size: int
    device: torch.device
    heads: int | None = None

    @classmethod
    def of(cls, x: Tensor, b: Tensor, chunk_size: int) -> "Shape":
        """From x (B, T, H, D) and B (B, T, H, N)."""
        return cls(x.shape[-1], b.shape[-1], chunk_size, x.device, x.shape[-2])


def _imported(path: str) -> Run:
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class Backend:
    """One implementation: where it lives (imported on first use) and when it cannot run.

    ``projected`` names the function of one that reads a whole projection in place
    (see :func:`mamba3_lite.models.ssd_fused.run_projected`). ``self_tested`` says that ``refuse``
    has itself compared results and gradients with the truth on this device and shape.
    """

    name: str
    path: str
    refuse: Callable[[Shape], str | None]
    projected: str | None = None
    self_tested: bool = False

    @property
    def run(self) -> Run:
        """The whole-sequence function."""
        return _imported(self.path)

    @property
    def run_projected(self) -> Run | None:
        """The same on a projection, where there is one."""
        return None if self.projected is None else _imported(self.projected)


def _runs_anywhere(shape: Shape) -> str | None:
    return None


def _refuse_triton(shape: Shape) -> str | None:
    from mamba3_lite.models import ssd_triton

    return ssd_triton.refuse(
        head_dim=shape.head_dim,
        state_dim=shape.state_dim,
        chunk_size=shape.chunk_size,
        device=shape.device,
    )


def _refuse_fused(shape: Shape) -> str | None:
    from mamba3_lite.models import ssd_fused

    return ssd_fused.refuse(
        heads=shape.heads,
        head_dim=shape.head_dim,
        state_dim=shape.state_dim,
        device=shape.device,
    )


BACKENDS = {
    record.name: record
    for record in (
        Backend("pytorch", "mamba3_lite.models.ssd_backends:run_pytorch", _runs_anywhere),
        Backend("triton", "mamba3_lite.models.ssd_backends:run_triton", _refuse_triton),
        Backend("rotated", "mamba3_lite.models.ssd_rotated:run", _runs_anywhere),
        Backend(
            "fused",
            "mamba3_lite.models.ssd_fused:run",
            _refuse_fused,
            projected="mamba3_lite.models.ssd_fused:run_projected",
            self_tested=True,
        ),
    )
}
DISPATCH_NAMES = (*BACKENDS, "auto")
# Fastest first, by the recorded training steps in benchmarks/results.
AUTO_ORDER = ("fused", "rotated", "pytorch")


def _run_complex(per_chunk, x, b, c, dt, a, *, chunk_size, state, return_state, segment_ids):
    """The seam around the complex chunkwise path."""
    compute = x.dtype if x.dtype == torch.float64 else torch.float32
    b, c, a = (torch.complex(pair[0].to(compute), pair[1].to(compute)) for pair in (b, c, a))
    initial = None if state is None else torch.complex(*state.to(compute).chunk(2, 2))
    y, final = chunkwise(
        x, a, b, c, dt, chunk_size, per_chunk, initial_state=initial, segment_ids=segment_ids
    )
    return y, torch.cat([final.real, final.imag], 2) if return_state else None


@torch.compiler.disable
def run_pytorch(
    x, b, c, dt, a, *, chunk_size, state=None, return_state=False, segment_ids=None
) -> tuple[Tensor, Tensor | None]:
    """Seam of "pytorch"; not in compiled graphs, since Inductor has no code for complex numbers."""
    return _run_complex(
        per_chunk_ssd_pytorch, x, b, c, dt, a,
        chunk_size=chunk_size, state=state, return_state=return_state, segment_ids=segment_ids,
    )  # fmt: skip


@torch.compiler.disable
def run_triton(
    x, b, c, dt, a, *, chunk_size, state=None, return_state=False, segment_ids=None
) -> tuple[Tensor, Tensor | None]:
    """Seam of "triton", the seeds' per-chunk kernel."""
    from mamba3_lite.models.ssd_triton import per_chunk_ssd_triton

    return _run_complex(
        per_chunk_ssd_triton, x, b, c, dt, a,
        chunk_size=chunk_size, state=state, return_state=return_state, segment_ids=segment_ids,
    )  # fmt: skip


@functools.cache
def _parity_error(name: str, device: torch.device) -> float:
    """Relative L2 error of y on a small case, run on ``device``, against the oracle in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, dt = draw(1, 70, 2, 16), draw(1, 70, 2)
    b, c = ((draw(1, 70, 2, 16), draw(1, 70, 2, 16)) for _ in range(2))
    a = (torch.tensor([-1.0, -0.02]), torch.tensor([0.5, 3.14]))

    def complex128(pair: Pair) -> Tensor:
        return torch.complex(pair[0].double(), pair[1].double())

    truth = ssd_naive_complex(x.double(), complex128(a), complex128(b), complex128(c), dt.double())
    assert isinstance(truth, Tensor)
    want = truth.real

    def there(pair: Pair) -> Pair:
        return pair[0].to(device), pair[1].to(device)

    with torch.no_grad():
        y, _ = BACKENDS[name].run(
            x.to(device), there(b), there(c), dt.to(device), there(a), chunk_size=32
        )
    return float((y.cpu().double() - want).norm() / want.norm())


@functools.cache
def _choose(shape: Shape) -> Backend:
    """The first of AUTO_ORDER that runs here and agrees with the oracle; says which and why."""
    passed_over: list[str] = []
    for name in AUTO_ORDER:
        reason, why = BACKENDS[name].refuse(shape), "parity self-test passed"
        tested = BACKENDS[name].self_tested and shape.heads and shape.device.type == "cuda"
        if reason is None and not tested:
            error = _parity_error(name, shape.device)
            why = f"parity with the oracle on {shape.device.type}: {error:.1e}"
            reason = None if error < 1e-4 else f"relative error {error:.1e}"
        if reason is None:
            print(f"[ssd] auto: '{name}' ({'; '.join([why, *passed_over])})")
            return BACKENDS[name]
        passed_over.append(f"not '{name}': {reason}")
    raise UserError(f"ssd_dispatch='auto' found nothing that runs here: {'; '.join(passed_over)}.")


def resolve(dispatch: str, shape: Shape) -> Backend:
    """The backend that an explicit request means; never another one.

    Raises:
        UserError: the name is unknown, or the backend cannot run here (with its reason).
    """
    if dispatch == "auto":
        return _choose(shape)
    if dispatch not in BACKENDS:
        raise UserError(
            f"ssd_dispatch={dispatch!r} is unknown; choose one of {', '.join(DISPATCH_NAMES)}."
        )
    reason = BACKENDS[dispatch].refuse(shape)
    if reason is not None:
        raise UserError(f"ssd_dispatch={dispatch!r} cannot run here: {reason}")
    return BACKENDS[dispatch]

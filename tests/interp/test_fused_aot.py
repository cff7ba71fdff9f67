"""Without a GPU: every launch of the fused kernels compiles for A100 and H200, and fits them."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from mamba3_lite import env
from mamba3_lite.models import ssd_fused, ssd_plans, ssd_triton
from mamba3_lite.models.ssd_plans import CANDIDATES, Plan
from tests.fused_checks import KERNELS, Launch, answers, draw, watched
from tests.interp.test_per_chunk_aot import SHARED_LIMIT_BYTES, stack_bytes

pytestmark = pytest.mark.skipif(
    not ssd_triton.HAS_TRITON or env.read("TRITON_INTERPRET") == "1",
    reason="needs Triton, compiling and not interpreting",
)
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip
PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 64), (16, 16), (256, 256), (100, 40))
PRODUCTION_HEADS = 16


def launches(
    plan: Plan, dtype: torch.dtype, dims: tuple[int, int], whole_chunks: bool, segments: bool,
    *, training: bool,
) -> list[Launch]:  # fmt: skip
    """What one forward and backward pass launches: as in training, or with all that there is.

    That is states in and out, and a sequence long enough to be cut into splits.
    """
    chunks = 2 if training else 16
    length = chunks * ssd_plans.chunk_size(dtype) + (0 if whole_chunks else 5)
    problem = draw(
        length, heads=PRODUCTION_HEADS if training else 1, state_dim=dims[0], head_dim=dims[1],
        with_state=not training, starts=(20,) if segments else (), dtype=dtype,
    )  # fmt: skip
    with ssd_fused.forced(plan), watched(really=False) as found:
        if training:
            proj = problem.proj.requires_grad_()
            y, _ = ssd_fused.run_projected(
                proj, problem.a.unbind(), **problem.sizes, segment_ids=problem.segments
            )
            y.sum().backward()
        else:
            answers(ssd_fused.run_projected, problem)
    return found


def source(launch: Launch):
    """What Triton would compile for these arguments."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    fixed = {p.name for p in launch.kernel.params if p.is_constexpr}
    constants = {n: v for n, v in launch.arguments.items() if v is None or n in fixed}

    def kind(name: str) -> str:
        value = launch.arguments[name]
        if name in constants:
            return "constexpr"
        if hasattr(value, "block_shape"):  # a TMA descriptor
            rows, columns = value.block_shape
            return f"tensordesc<{TYPES[value.base.dtype]}[{rows},{columns}],{value.layout!r}>"
        return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"

    signature = {name: kind(name) for name in launch.kernel.arg_names}
    # What a launch sees as well: every tensor starts at a multiple of 16 bytes.
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return language(launch.kernel, signature, constants, aligned)


def distinct(found: Iterable[Launch]) -> list[Launch]:
    """One launch of each piece of machine code."""
    kept = {}
    for launch in found:
        code = source(launch)
        key = (launch.kernel.__name__, code.signature, code.constants, launch.options)
        kept.setdefault(repr(key), launch)
    return list(kept.values())


def assert_fits(launch: Launch, arch: int):
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source(launch), target=target, options=launch.options)
    assert compiled.metadata.shared <= SHARED_LIMIT_BYTES[arch], launch
    return compiled


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


# cases A04, A14
@pytest.mark.parametrize("arch", [80, 90])
def test_the_training_step_compiles_and_fits_a14(arch, tmp_path):
    found = distinct(launches(CANDIDATES[0], torch.bfloat16, (64, 64), True, False, training=True))
    assert sorted({launch.kernel.__name__ for launch in found}) == sorted(KERNELS)
    for launch in found:
        compiled = assert_fits(launch, arch)
        if arch == 90:
            # Hundreds of bytes would mean that the tiles outgrew the registers.
            stack = stack_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin")
            assert stack <= 256, launch.kernel.__name__


# cases A04, A14
@pytest.mark.parametrize(
    "arch, dtype, dims",
    [(80, torch.float32, (16, 16)), (90, torch.float16, (64, 64)), (80, torch.bfloat16, (100, 40))],
)
def test_a_sample_of_the_other_launches_compiles_and_fits_a14(arch, dtype, dims):
    every = [
        launch
        for plan in CANDIDATES
        for launch in launches(plan, dtype, dims, False, True, training=False)
    ]
    # At these dimensions the large kernel takes a quarter of a minute: it is in the campaign.
    skipped = {"gradient_kernel"} if dims == (100, 40) else set()
    for launch in distinct(every):
        if launch.kernel.__name__ not in skipped:
            assert_fits(launch, arch)


# cases A04, A14
@pytest.mark.campaign
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("arch", [80, 90])
def test_campaign_every_launch_compiles_and_fits_a04_a14(arch, dtype, dims):
    # Compiling the largest takes minutes: there only with every mask, which leaves nothing out.
    whole, segments = ((False,), (True,)) if min(dims) > 128 else ((True, False), (True, False))
    every = []
    for plan, rows, documents, training in itertools.product(
        CANDIDATES, whole, segments, (True, False)
    ):
        every += launches(plan, dtype, dims, rows, documents, training=training)
    found = distinct(every)
    assert {launch.kernel.__name__ for launch in found} == set(KERNELS)
    assert max(launch.grid[2] for launch in every if len(launch.grid) == 3) > 1
    for launch in found:
        assert_fits(launch, arch)


# case A05
def test_axis_0_carries_the_product_a05():
    """Axes 1 and 2 of a grid end at 65,535, axis 0 at 2^31 - 1."""
    problem = draw(65, batch=40_000, state_dim=1, head_dim=1)
    long = draw(2**21, heads=1, state_dim=1, head_dim=1)
    grids = {}
    for name, case in (("wide", problem), ("long", long)):
        with watched(really=False) as found:
            answers(ssd_fused.run_projected, case)
        grids[name] = [launch.grid for launch in found]
    assert {grid[0] for grid in grids["wide"]} == {80_000, 3 * 80_000}
    assert max(grid[0] for grid in grids["long"]) == 2**21 // 32
    rest = [extent for grid in (*grids["wide"], *grids["long"]) for extent in grid[1:]]
    assert max(rest) == 256


# case E03
def test_lengths_and_batches_ask_for_one_plan_e03(monkeypatch):
    asked = []

    def plan_for(*what):
        asked.append(what)
        return CANDIDATES[0]

    monkeypatch.setattr(ssd_fused, "plan_for", plan_for)
    with watched(really=False):
        for length in range(1, 2000, 100):
            answers(ssd_fused.run_projected, draw(length, batch=1 + length % 3))
    assert len(asked) == 40
    assert set(asked) == {(torch.device("cpu"), torch.float32, 2, 16, 16)}

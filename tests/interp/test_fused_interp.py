"""The fused kernels interpreted: shared checks, planted faults, addresses. Float32 only.

As with the per-chunk kernel, they need a process of their own: started plainly, this file runs
itself once more with TRITON_INTERPRET=1. (The interpreter of Triton 3.6 has no sound product of
bfloat16; that precision is in tests/gpu.)
"""

import types

import numpy as np
import pytest
import torch

from mamba3_lite import env
from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_fused, ssd_triton
from mamba3_lite.models.ssd_plans import CANDIDATES
from tests import fused_checks
from tests.fused_checks import FusedChecks, Launch, answers, draw
from tests.interp.again import start_again

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
INTERPRETED = ssd_triton.HAS_TRITON and env.read("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")

# What is replaced in the kernels' source, and the tensor that the self-test must find wrong first.
FAULTS = {
    "no phase": ("angle = (", "angle = 0.0 * (", "y"),
    "no carry": ("over = tl.exp(a_end)", "over = 0.0 * a_end", "y"),
    "future tokens": (
        "counts = tokens[:, None] >= tokens[None, :]",
        "counts = tokens[:, None] >= 0 * tokens[None, :]",
        "y",
    ),
    "reads of another document": (
        "reads = tl.where(own == before, reads, 0.0)", "reads = reads", "y",
    ),
    "padding that decays": (
        "s = tl.where(t < T, _softplus(dt.to(tl.float32)), 0.0)",
        "s = _softplus(dt.to(tl.float32))",
        "d_proj",
    ),
    "3 % in y": ("left, p, acc, H * P", "left, p, 1.03 * acc, H * P", "y"),
    "3 % in dx": ("left, p, dx, W", "left, p, 1.03 * dx, W", "d_proj"),
    "3 % in Re dB": ("left, n, re, W", "left, n, 1.03 * re, W", "d_proj"),
    "3 % in ddt": ("d_dt = (", "d_dt = 1.03 * (", "d_dt"),
    "no gradient of the turn": ("beta * turned) /", "0.0 * turned) /", "d_dt"),
    "no edge in the gradient of the decay": (
        "tl.load(edges + 2 * here) - (", "0.0 - (", "d_dt",
    ),
    "one dA for the other": ("tl.sum(s * turned, 0)", "tl.sum(s * grown, 0)", "dA"),
}  # fmt: skip
# Each takes ten seconds; the others are in the campaign.
SAMPLE = (
    "reads of another document", "future tokens", "3 % in Re dB",
    "no edge in the gradient of the decay", "one dA for the other",
)  # fmt: skip


def addresses(launch: Launch, program: int, patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Where a program reads and writes, access by access; memory is never touched."""
    import triton.language as tl
    from triton.runtime import interpreter

    accesses: list[np.ndarray] = []

    def load(pointers, mask, other, dtype):
        accesses.append(pointers[mask])
        return np.zeros(pointers.shape, dtype)

    def store(pointers, values, mask):
        accesses.append(pointers[mask])

    def program_id(axis):
        return handle(program if axis == 0 else builder.grid_idx[axis])

    def num_programs(axis):
        return handle(launch.grid[axis])

    def handle(number):
        return interpreter.TensorHandle(np.array([number], np.int32), tl.int32)

    builder = interpreter.interpreter_builder
    with patch.context() as inner:
        inner.setattr(interpreter, "_interpreter", types.SimpleNamespace(load=load, store=store))
        inner.setattr(builder, "create_get_program_id", program_id, raising=False)
        inner.setattr(builder, "create_get_num_programs", num_programs, raising=False)
        launch.kernel[(1, *launch.grid[1:])](**launch.arguments, **launch.options)
    return accesses


def wrong_addresses(launch: Launch, patch: pytest.MonkeyPatch) -> list[str]:
    """Case A05: the tensors in which batch element b is not b elements further on, or not inside.

    The launch is one of batch 1, so a batch element's share of a tensor is all of it; but d_a is
    (H, 2, B, nc), and A knows no batch.
    """
    tensors = {n: t for n, t in launch.arguments.items() if isinstance(t, torch.Tensor)}
    shares = {n: t.nbytes for n, t in tensors.items()} | {"a_re": 0, "a_im": 0}
    if "d_a" in tensors:
        shares["d_a"] = tensors["d_a"][0, 0].nbytes
    far = 10**8
    near, distant = (addresses(launch, b * launch.grid[0], patch) for b in (0, far))
    assert near and len(near) == len(distant)
    wrong = []
    for small, large in zip(near, distant, strict=True):
        if not small.size:
            continue
        name = owner(tensors, small)
        shift = large.astype(np.int64) - small.astype(np.int64)
        if name is None or (shift != far * shares[name]).any():
            wrong.append(name or "outside")
    return wrong


def owner(tensors: dict[str, torch.Tensor], accessed: np.ndarray) -> str | None:
    """The tensor that holds all these addresses."""
    for name, t in tensors.items():
        first = t.data_ptr()
        if first <= accessed.min() and accessed.max() < first + t.nbytes:
            return name
    return None


if INTERPRETED:

    class TestInterpreted(FusedChecks):
        device = "cpu"

    # cases A06, A13
    @pytest.mark.parametrize(
        "name",
        [
            name if name in SAMPLE else pytest.param(name, marks=pytest.mark.campaign)
            for name in FAULTS
        ],
    )
    def test_the_self_test_finds_a_planted_fault_a06_a13(name, tmp_path):
        old, new, tensor = FAULTS[name]
        with fused_checks.planted(tmp_path, old, new):
            problem = ssd_fused._problem(CANDIDATES[0], CPU, torch.float32, (2, 16, 16))
        assert problem is not None and problem.startswith(f"{tensor} off by "), problem

    @pytest.mark.parametrize("name", ["no phase", "no carry", "3 % in y"])
    def test_parity_finds_a_planted_fault_a06(name, tmp_path):
        old, new, _ = FAULTS[name]
        problem = parity.Problem(101, None, parity.DECAYS[0], False, False)
        with fused_checks.planted(tmp_path, old, new):
            result = parity.check(ssd_fused.run, problem, 64, torch.float32)
        assert any(f.startswith("y off by") for f in result.failures(problem, torch.float32))

    def test_a_fault_between_splits_is_found(tmp_path):
        problem = draw(512, heads=1)
        want = answers(fused_checks.run_rotated, fused_checks.wide(problem))
        for old, new in (
            ("whole *= over", "whole *= 1.0"),
            ("base += tl.sum(before, 0)", "base += tl.sum(before * 0.0, 0)"),
        ):
            with fused_checks.planted(tmp_path, old, new):
                got = answers(ssd_fused.run_projected, problem)
            wrong = fused_checks.failures(got, want, torch.float32)
            assert {"y", "dx", "dB"} <= wrong.keys(), old

    # cases A05, A07
    @pytest.mark.parametrize("length, starts", [(64, ()), (70, (20,))])
    def test_addresses_stay_inside_and_right_beyond_32_bits_a05(length, starts, monkeypatch):
        with fused_checks.watched() as launches:
            answers(ssd_fused.run_projected, draw(length, starts=starts))
        assert [launch.kernel.__name__ for launch in launches] == [
            "phase_kernel", "carry_kernel", "output_kernel",
            "carry_kernel", "gradient_kernel", "decay_gradient_kernel",
        ]  # fmt: skip
        assert launches[0].arguments["proj"].numel() * 10**8 > 2**31
        for launch in launches:
            assert wrong_addresses(launch, monkeypatch) == [], launch.kernel

    @pytest.mark.filterwarnings("ignore:overflow encountered")
    def test_a_planted_32_bit_offset_is_found_a05(monkeypatch, tmp_path):
        narrow = ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")
        with fused_checks.planted(tmp_path, *narrow), fused_checks.watched() as launches:
            answers(ssd_fused.run_projected, draw(64))
        assert all("proj" in wrong_addresses(launch, monkeypatch) for launch in launches)

    @pytest.mark.campaign
    @pytest.mark.parametrize("length", fused_checks.LENGTHS)
    def test_campaign_the_whole_parity_grid(length):
        for problem in parity.problems([length]):
            fused_checks.assert_parity(problem, torch.float32, "cpu")

    # case A01
    @pytest.mark.campaign
    @pytest.mark.parametrize("length", [127, 128, 129, 2048])
    def test_campaign_real_lengths_a01(length):
        for raw_dt in (0.0, 2.0, 5.0, None):
            problem = parity.Problem(length, raw_dt, parity.DECAYS[0], False, False)
            fused_checks.assert_parity(problem, torch.float32, "cpu")

    @pytest.mark.campaign
    @pytest.mark.parametrize("dims", [(128, 128), (256, 256), (100, 100)])
    def test_campaign_the_largest_states(dims):
        for length in (64, 101):
            fused_checks.assert_right(
                draw(length, state_dim=dims[0], head_dim=dims[1], starts=(20,))
            )

else:

    def test_every_check_passes_under_the_interpreter():
        assert start_again(__file__) > 50

    @pytest.mark.campaign
    def test_campaign_under_the_interpreter():
        assert start_again(__file__, "-m", "campaign") > 15

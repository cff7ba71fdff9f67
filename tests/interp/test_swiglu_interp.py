"""The SwiGLU kernels on a machine without a GPU: interpreted, and compiled ahead of time.

As with the per-chunk kernel, the interpreted checks need a process of their own: started plainly,
this file runs itself once more with TRITON_INTERPRET=1.
"""

import re

import pytest
import torch

from mamba3_lite import env
from mamba3_lite.models import mamba_block, ssd_fused, ssd_triton, swiglu
from mamba3_lite.models.mamba_block import Mamba3Block
from tests.interp.again import start_again

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
INTERPRETED = ssd_triton.HAS_TRITON and env.read("TRITON_INTERPRET") == "1"
HALVES = [1, 5, 64, 1000, 1025, 2048]

if INTERPRETED:
    import triton
    import triton.language as tl

    from mamba3_lite.kernels.swiglu import _tile

    def relative(got, want):
        return float((got.double() - want).norm() / want.norm())

    def value_and_gradient(function, gate_up, d_out):
        leaf = gate_up.detach().clone().requires_grad_()
        out = function(leaf)
        (gradient,) = torch.autograd.grad(out, leaf, d_out.to(out.dtype))
        return out.detach(), gradient

    def draw(*shape, dtype=torch.float32):
        return (3 * torch.randn(*shape)).to(dtype)

    @pytest.mark.parametrize("half", HALVES)
    # The interpreter cuts bf16 off where a GPU rounds it.
    @pytest.mark.parametrize(
        "dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 5e-4)]
    )
    def test_agrees_with_the_plain_twin_in_float64(dtype, limit, half):
        gate_up, d_out = draw(2, 3, 2 * half, dtype=dtype), draw(2, 3, half, dtype=dtype)
        got = value_and_gradient(torch.ops.mamba3_lite.swiglu, gate_up, d_out)
        want = value_and_gradient(swiglu.plain_swiglu, gate_up.double(), d_out)
        assert got[0].shape == (2, 3, half) and got[1].shape == gate_up.shape
        for ours, truth in zip(got, want, strict=True):
            assert ours.dtype == dtype and relative(ours, truth) < limit

    def test_extreme_gates_stay_finite():
        largest = torch.finfo(torch.bfloat16).max
        gate = torch.tensor([-largest, -1e4, -100.0, 0.0, 100.0, 1e4])
        gate_up = torch.cat([gate, torch.ones(6)]).to(torch.bfloat16)[None]
        out, gradient = value_and_gradient(torch.ops.mamba3_lite.swiglu, gate_up, torch.ones(1, 6))
        want = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e4]).to(torch.bfloat16)
        assert torch.equal(out[0] + 0.0, want), "silu of the gate"
        slopes = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0]).to(torch.bfloat16)
        assert torch.equal(gradient[0, :6] + 0.0, slopes)
        assert torch.equal(gradient[0, 6:] + 0.0, want)

    def test_any_strides_and_no_rows_at_all():
        gate_up, d_out = draw(10, 4).T, draw(5, 4).T
        got = value_and_gradient(torch.ops.mamba3_lite.swiglu, gate_up, d_out)
        want = value_and_gradient(swiglu.plain_swiglu, gate_up.double(), d_out)
        for ours, truth in zip(got, want, strict=True):
            assert relative(ours, truth) < 1e-6
        empty = value_and_gradient(torch.ops.mamba3_lite.swiglu, draw(0, 10), draw(0, 5))
        assert [t.shape for t in empty] == [(0, 5), (0, 10)]

    def test_is_a_well_behaved_operator():
        torch.library.opcheck(torch.ops.mamba3_lite.swiglu, (draw(2, 3, 10).requires_grad_(),))
        torch.library.opcheck(
            torch.ops.mamba3_lite.swiglu_backward, (draw(2, 3, 10), draw(2, 3, 5))
        )

    @triton.jit
    def _offsets(out, F: tl.constexpr, BLOCK: tl.constexpr):
        wide, narrow, inside = _tile(F, BLOCK)
        at = out + tl.program_id(0) * 2 * BLOCK + tl.arange(0, BLOCK)
        tl.store(at, wide, mask=inside)
        tl.store(at + BLOCK, narrow, mask=inside)

    def test_offsets_stay_right_beyond_32_bits():
        half, block, rows = 2**30, 4, 5
        out = torch.empty(rows, 2, block, dtype=torch.int64)
        _offsets[(rows,)](out, F=half, BLOCK=block)
        columns, row = torch.arange(block), torch.arange(rows)[:, None]
        assert torch.equal(out[:, 0], row * 2 * half + columns) and int(out.max()) > 2**32
        assert torch.equal(out[:, 1], row * half + columns)

    @pytest.mark.parametrize(
        "mode, launches",
        [(False, (1, 1, 1, 1)), ("selective", (1, 1, 2, 1)), (True, (2, 1, 2, 1))],
    )
    def test_what_each_grad_checkpoint_mode_runs_twice(mode, launches, monkeypatch):
        """Forward and backward of the fused SSD, forward and backward of the SwiGLU."""
        seen = []
        carry, launch = ssd_fused._carry, swiglu._launch

        def counted_carry(*args, backward, **rest):
            seen.append(("ssd", backward))
            return carry(*args, backward=backward, **rest)

        def counted_launch(kernel, half, *tensors):
            seen.append(("swiglu", len(tensors) == 3))
            launch(kernel, half, *tensors)

        monkeypatch.setattr(ssd_fused, "_carry", counted_carry)
        monkeypatch.setattr(swiglu, "_launch", counted_launch)
        monkeypatch.setattr(mamba_block, "swiglu", torch.ops.mamba3_lite.swiglu)
        sizes = dict(d_model=16, n_heads=2, head_dim=16, state_dim=16, ffn_dim=24)
        block = Mamba3Block({**sizes, "ssd_dispatch": "fused", "grad_checkpoint": mode}).train()
        block(torch.randn(1, 5, 16, requires_grad=True)).sum().backward()
        kinds = [("ssd", False), ("ssd", True), ("swiglu", False), ("swiglu", True)]
        assert tuple(map(seen.count, kinds)) == launches

else:

    def test_every_check_passes_under_the_interpreter():
        assert start_again(__file__) > 3 * len(HALVES)

    @pytest.mark.parametrize("arch", [80, 90])
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    @pytest.mark.parametrize("name", ["swiglu_forward_kernel", "swiglu_backward_kernel"])
    def test_kernel_compiles_with_wide_accesses(name, dtype, arch, tmp_path, monkeypatch):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        from mamba3_lite.kernels import swiglu as kernels

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        kernel = getattr(kernels, name)
        constants = {"F": 2048, "BLOCK": swiglu._BLOCK}
        tensors = [n for n in kernel.arg_names if n not in constants]
        signature = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
        assert list(signature) == kernel.arg_names
        # What a launch sees as well: every tensor starts at a multiple of 16 bytes.
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
        compiled = compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": swiglu._WARPS},
        )
        # Each of the two halves and the narrow tensor once, 16 bytes at a time.
        accesses = re.findall(r"(ld|st)\.global(?:\.v4|)\.b\d+", compiled.asm["ptx"])
        wide = re.findall(r"(ld|st)\.global\.v4\.b32", compiled.asm["ptx"])
        assert accesses == wide
        per_tensor = swiglu._BLOCK // (32 * swiglu._WARPS) * int(dtype[2:]) // 128
        loads, stores = (2, 1) if "forward" in name else (3, 2)
        assert wide.count("ld") == loads * per_tensor and wide.count("st") == stores * per_tensor
        assert ("cvt.rn.bf16" in compiled.asm["ptx"]) is (dtype == "bf16")

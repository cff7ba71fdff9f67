"""The pieces of a fast training step on CUDA: SwiGLU, compiled fused blocks, checkpointing."""

import re

import pytest
import torch

from mamba3_lite.models import ssd_triton
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.swiglu import plain_swiglu, swiglu
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.compile import compile_blocks
from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.losses import next_token_loss
from mamba3_lite.training.optim import build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
DEVICE = "cuda"


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_swiglu_in_bf16_against_float64():
    rows, width = 8192, 4096
    gate_up = (3 * torch.randn(rows, width, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    d_out = torch.randn(rows, width // 2, device=DEVICE).to(torch.bfloat16)
    out = swiglu(gate_up)
    (gradient,) = torch.autograd.grad(out, gate_up, d_out)
    assert "swiglu" in out.grad_fn.name().lower(), "the kernels, not their twin"
    wide = gate_up.detach().double().requires_grad_()
    want = plain_swiglu(wide)
    (want_gradient,) = torch.autograd.grad(want, wide, d_out.double())
    # Rounding the right answer to bf16 is off by 1.7e-3.
    assert relative(out, want) < 2e-3 and relative(gradient, want_gradient) < 2e-3


def test_compiled_fused_block_never_copies_the_projection():
    """Of everything inductor allocates, only in_proj's own output has the projection's size."""
    from torch._inductor.utils import run_and_get_code

    cfg = ModelConfig(n_layers=1, vocab_size=128, ssd_dispatch="fused")
    model = Mamba3Transformer(cfg).to(DEVICE).train()
    compile_blocks(model, "default")
    (block,) = model.layers
    assert isinstance(block, Mamba3Block)
    x = torch.randn(2, 256, cfg.d_model, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def forward_and_backward():
        with torch.autocast(DEVICE, torch.bfloat16):
            y = block(x)
        y.float().square().mean().backward()

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(forward_and_backward)
    code = "\n".join(sources)
    assert "fused_ssd.default(" in code and "fused_ssd_backward.default(" in code
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", code)
    sizes = [tuple(map(int, re.findall(r"\d+", shape))) for shape in shapes]
    tokens, width = 2 * 256, block.in_proj.out_features
    elements = [torch.Size(size).numel() for size in sizes]
    assert len(elements) > 10
    assert sum(count == tokens * width for count in elements) == 1


def train(mode: bool | str, compiled: bool, opt_steps: int = 5) -> tuple[list[float], int]:
    """Losses of a small fused model in bf16, and the bytes held between its two passes."""
    torch.manual_seed(0)
    cfg = ModelConfig(
        vocab_size=512, d_model=128, n_layers=3, n_heads=4, head_dim=32, state_dim=32, ffn_dim=256,
        ssd_dispatch="fused", grad_checkpoint=mode,
    )  # fmt: skip
    model = Mamba3Transformer(cfg).to(DEVICE).train()
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, "default")
    optimizer = build_optimizer(model, TrainingConfig(lr=3e-3))
    ids = torch.randint(0, cfg.vocab_size, (8, 513), device=DEVICE)
    losses, held = [], 0
    for _ in range(opt_steps):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss_sum, count = next_token_loss(model, ids[:, :-1], ids[:, 1:])
        held = torch.cuda.memory_allocated() - before
        (loss_sum / count).backward()
        optimizer.step()
        losses.append(float(loss_sum.detach() / count))
    return losses, held


@pytest.mark.parametrize("compiled", [False, True])
def test_grad_checkpoint_modes_train_alike_and_hold_less(compiled):
    everything, selective, inputs = (train(m, compiled) for m in (False, "selective", True))
    assert everything[0][-1] < everything[0][0] - 0.1
    assert selective[0] == pytest.approx(everything[0], rel=1e-2)
    assert inputs[0] == pytest.approx(everything[0], rel=1e-2)
    assert everything[1] > selective[1] > inputs[1] > 0

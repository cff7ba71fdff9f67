"""The SSD paths, the model and the trainer on a CUDA device."""

import contextlib
import itertools

import pytest
import torch

from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.optim import build_optimizer
from mamba3_lite.training.pretrain import Pretrainer, compile_blocks, train_step
from mamba3_lite.training.schedule import build_schedule
from tests.runs import MODEL, config, final_weights, losses, stop_after

pytestmark = pytest.mark.gpu
# "fused" in its own precisions is in test_fused_gpu.py.
PATHS = ("pytorch", "rotated", "triton")


@pytest.mark.parametrize("raw_dt", [-20.0, 0.0, 2.0, 50.0, 1000.0, None])
def test_parity_with_the_oracle(raw_dt):
    for length, decays in itertools.product((1, 65, 129, 2048), parity.DECAYS):
        problem = parity.Problem(length, raw_dt, decays, True, True)
        for path in PATHS:  # innermost: the oracle takes longer than all of them
            run = ssd_backends.BACKENDS[path].run
            result = parity.check(run, problem, 64, torch.float32, "cuda")
            assert result.failures(problem, torch.float32) == [], (path, problem)


def test_parity_in_float64_at_8192():
    problem = parity.Problem(8192, None, parity.DECAYS[1], True, False)
    for path in ("pytorch", "rotated"):
        run = ssd_backends.BACKENDS[path].run
        result = parity.check(run, problem, 128, torch.float64, "cuda")
        assert result.failures(problem, torch.float64) == [], path


@pytest.mark.parametrize(
    "path, autocast", [*itertools.product(PATHS, (False, True)), ("fused", True)]
)
def test_default_production_block_is_finite_at_2048(path, autocast):
    torch.manual_seed(0)
    block = Mamba3Block(ModelConfig(ssd_dispatch=path)).cuda()
    for name, parameter in block.named_parameters():
        if parameter.dim() == 2 and "mimo" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(4, 2048, 1024, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        y = block(x)
    y.float().square().mean().backward()
    assert bool(torch.isfinite(y).all()) and bool(torch.isfinite(x.grad).all())
    for name, parameter in block.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    assert not block._triton_fallback_warned


@pytest.mark.parametrize("raw_dt", [-20.0, 0.0, 2.0, 50.0, 1000.0])
def test_a_million_tokens_stay_finite_and_in_phase(raw_dt):
    """Float32 against the float64 path (itself held to the oracle), beta = pi and slow decay."""
    length = 2**20
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    leaves = {
        "x": draw(1, length, 2, 16), "b": draw(1, length, 2, 16, 2), "c": draw(1, length, 2, 16, 2),
        "dt": raw_dt + 0.1 * draw(1, length, 2),
        "a": torch.tensor([[-1e-2, torch.pi], [-1.0, 0.3]], device="cuda"),
    }  # fmt: skip
    weight = draw(1, length, 2, 16)
    results = {}
    for dtype in (torch.float64, torch.float32):
        given = {n: v.to(dtype).requires_grad_() for n, v in leaves.items()}
        y, _ = ssd_backends.BACKENDS["rotated"].run(
            given["x"], given["b"].unbind(-1), given["c"].unbind(-1), given["dt"],
            given["a"].unbind(-1), chunk_size=256,
        )  # fmt: skip
        gradients = torch.autograd.grad((y * weight.to(dtype)).sum(), list(given.values()))
        results[dtype] = [y.detach(), *gradients]
        assert all(bool(torch.isfinite(t).all()) for t in results[dtype])
    y, want = results[torch.float32][0], results[torch.float64][0]
    assert float((y - want).norm() / want.norm()) < 1e-4


def test_compiled_blocks_agree_with_eager_ones():
    ids = torch.randint(0, 97, (2, 41), device="cuda")
    curves = []
    for mode in (None, "default"):
        torch.manual_seed(0)
        model = Mamba3Transformer({**MODEL, "head_dim": 16, "state_dim": 16}).cuda().train()
        if mode:
            compile_blocks(model, mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curve = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
            loss.backward()
            optimizer.step()
            curve.append(float(loss.detach()))
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_the_guard_drops_a_window_on_the_device(tmp_path):
    settings = config(tmp_path, gradient_accumulation_steps=2)
    model = Mamba3Transformer(MODEL).cuda().train()
    optimizer = build_optimizer(model, settings)
    scheduler = build_schedule(optimizer, settings)
    ids = torch.randint(0, 97, (3, 25), device="cuda")
    opt_steps, lines = 0, []

    def feed(micro_step):
        return train_step(
            model, optimizer, scheduler, settings, contextlib.nullcontext(), lines.append,
            opt_steps, ids[:, :-1], ids[:, 1:], micro_step,
        )  # fmt: skip

    for micro_step in range(2):
        _, opt_steps = feed(micro_step)
    before = [p.detach().clone() for p in model.parameters()]
    hook = model.layers[0].out_proj.weight.register_hook(lambda g: g * float("nan"))
    feed(2)
    hook.remove()
    metrics, opt_steps = feed(3)
    assert metrics is None and opt_steps == 1 and len(lines) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_resume_on_the_device_goes_on_exactly(tmp_path):
    runs = {}
    for name, stop in (("whole", None), ("stopped", 7)):
        folder = tmp_path / name
        folder.mkdir()
        settings = config(folder)
        if stop:
            assert stop_after(settings, stop) == 143
        assert Pretrainer(settings).train() == 0
        runs[name] = folder / "run"
    got, want = losses(runs["stopped"]), losses(runs["whole"])
    assert [row[0] for row in got] == [row[0] for row in want]
    assert [row[1] for row in got] == pytest.approx([row[1] for row in want], rel=1e-3)
    weights = final_weights(runs["whole"])
    for name, value in final_weights(runs["stopped"]).items():
        assert float((value - weights[name]).norm() / weights[name].norm()) < 1e-2, name

"""Checks of the decoding kernels, shared by the interpreted run and the runs on CUDA."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mamba3_lite.inference.decode_ops import KernelOps, Norm, PlainOps, norm_parts
from mamba3_lite.inference.decode_staged import tiles
from mamba3_lite.inference.decode_weights import STEPS
from mamba3_lite.inference.decoder import Decoder
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer

MODEL = {
    "vocab_size": 61, "d_model": 24, "n_layers": 2, "n_heads": 2, "head_dim": 16, "state_dim": 8,
    "ffn_dim": 40, "ssd_dispatch": "rotated",
}  # fmt: skip
# The interpreter cuts bfloat16 off where a GPU rounds it.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Inputs and outputs of a product: tiles filled, ragged, and smaller than any tile.
PRODUCTS = ((32, 64), (24, 61), (100, 40), (7, 3), (64, 129))
KERNELS = (
    "embed_kernel", "vector_kernel", "batch_kernel", "norm_kernel", "largest_kernel", "best_kernel",
    "ssd_step_kernel",
)  # fmt: skip
STAGED_KERNELS = (
    "staged_vector_kernel", "staged_batch_kernel", "staged_head_kernel", "staged_ssd_step_kernel",
)  # fmt: skip
# heads, state_dim, head_dim
HEADS = ((2, 8, 16), (1, 64, 64), (3, 5, 7), (2, 128, 16), (2, 16, 256))


# What the resident kernel takes: the production model's layers, units of each size, one to four
# pieces, each slice of a head. The first ones of a small model are for all of them.
RESIDENT_MODEL = {
    "vocab_size": 5003, "n_layers": 3, "d_model": 256, "n_heads": 4, "head_dim": 64,
    "state_dim": 64, "ffn_dim": 512, "init_std": 0.05,
}  # fmt: skip
RESIDENT_SHAPES = {
    "production": {"d_model": 1024, "n_heads": 16, "ffn_dim": 2048, "vocab_size": 50257},
    "small": {},
    "three pieces": {"d_model": 768, "n_heads": 12, "ffn_dim": 1024},
    "narrow heads": {"d_model": 512, "n_heads": 16, "head_dim": 32, "state_dim": 16},
    "wide state": {"d_model": 512, "n_heads": 8, "head_dim": 64, "state_dim": 128},
}


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def norm_of(x: Tensor, scale: Tensor | None = None) -> Norm:
    """Some norm of x, with what a writer of x leaves for it, in three parts."""
    if scale is None:
        scale = draw(x.shape[1], dtype=x.dtype, device=str(x.device))
    squares = torch.zeros(len(x), norm_parts(x.shape[1]), device=x.device)
    for i, piece in enumerate(x.float().square().chunk(3, 1)):
        squares[:, 5 * i] = piece.sum(1)
    return Norm(scale, 1e-5, (x.float() * scale.float()).to(x.dtype), squares)


def assert_product(
    ops: KernelOps, batch: int, shape: tuple[int, int], dtype: torch.dtype, device: str, **how: Any
) -> None:
    """Against the twin in float64; ``out`` keeps what stands around it."""
    inputs, outputs = shape
    x = draw(batch, inputs, dtype=dtype, device=device)
    weight = draw(outputs * (1 + how.get("gated", False)), inputs, dtype=dtype, device=device)
    if how.pop("normed", False):
        how |= {"norm": norm_of(x)}
    room = draw(batch + 2, outputs, dtype=dtype, device=device)
    out, before = room[1:-1], room.clone()
    want = out.double()
    PlainOps().product(x.double(), weight.double(), want, **how)
    following = norm_of(draw(batch, outputs, dtype=dtype, device=device)) if "add" in how else None
    if following:
        following.squares.zero_()
    ops.product(x, weight, out, following=following, **how)
    # A product of two products is off by both.
    assert relative(out, want) < LIMITS[dtype] * (2 if how.get("gated") else 1)
    assert torch.equal(room[0], before[0]) and torch.equal(room[-1], before[-1])
    if following and ops.plan.staged and batch > 1 and tiles(inputs, outputs, False):
        assert relative(following.scaled, out.float() * following.scale.float()) < 4e-3
        assert relative(following.squares.sum(1), out.float().square().sum(1)) < 1e-5


def assert_embed(ops: KernelOps, dtype: torch.dtype, device: str) -> None:
    """The rows that are named; left for the norm, and nothing of what stood there before."""
    for width in (24, 1500):
        weight = draw(50, width, dtype=dtype, device=device)
        ids = torch.tensor([3, 49, 0], device=device)
        x = draw(3, width, dtype=dtype, device=device)
        following = norm_of(x)
        following.squares.fill_(7.0)
        ops.embed(ids, weight, x, following=following)
        assert torch.equal(x, weight[ids])
        if ops.plan.staged:
            assert relative(following.scaled, x.float() * following.scale.float()) < 4e-3
            assert relative(following.squares.sum(1), x.float().square().sum(1)) < 1e-5


def assert_best(ops: KernelOps, device: str) -> None:
    """The first of the largest, whatever the width; nothing found among NaNs is called a number."""
    for width in (7, 2048, 5000):
        logits = draw(6, width, device=device)
        logits[0, [1, width - 1]] = 9.0
        logits[1, width - 1] = 9.0
        logits[2] = float("-inf")
        logits[3, width // 2] = float("nan")
        logits[4, :] = float("nan")
        ids = torch.full((6,), -1, dtype=torch.int64, device=device)
        found = torch.zeros(6, 2, dtype=torch.float64, device=device)
        ops.best(logits, ids, found)
        largest = [9.0, 9.0, float("-inf"), float("nan"), float("nan"), float(logits[5].max())]
        assert torch.equal(found[:, 0], ids.double())
        assert [str(value) for value in found[:, 1].tolist()] == [str(value) for value in largest]
        ordered = [0, 1, 2, 5]
        assert ids[ordered].tolist() == [1, width - 1, 0, int(logits[5].argmax())]
        assert ((ids >= 0) & (ids < width)).all()


def assert_head(ops: KernelOps, batch: int, dtype: torch.dtype, device: str) -> None:
    """Logits as of the twin and the ids of their largest, which are the same without logits."""
    inputs, width = 256, 1111
    x, weight = (draw(n, inputs, dtype=dtype, device=device) for n in (batch, width))
    # Two equal rows: of equal logits the first counts.
    weight[[40, 900]] = weight[40] * 4
    norm, ids = norm_of(x), torch.full((batch,), -1, dtype=torch.int64, device=device)
    logits = torch.zeros(batch, width, device=device)
    found = torch.zeros(batch, 2, dtype=torch.float64, device=device)
    want = logits.double()
    PlainOps().product(x.double(), weight.double(), want, norm=norm)
    ops.head(x, weight, logits, ids, found, norm=norm)
    assert relative(logits, want) < LIMITS[dtype]
    assert torch.equal(ids, logits.argmax(-1)) and 900 not in ids.tolist()
    assert torch.equal(found[:, 0], ids.double()) and torch.equal(
        found[:, 1], logits.double().amax(1)
    )
    before = found.clone()
    found.zero_()
    ops.head(x, weight, logits, ids, found, norm=norm, keep=False)
    assert torch.equal(found, before) and torch.equal(found[:, 0], ids.double())
    x[-1, 3] = float("nan")
    norm = norm_of(x, norm.scale)
    ops.head(x, weight, logits, ids, found, norm=norm, keep=False)
    assert found[-1, 1].isnan() and torch.equal(found[:-1], before[:-1])
    weight[width - 1] = float("nan")
    ops.head(x, weight, logits, ids, found, norm=norm)
    assert found[:, 1].isnan().all() and ((ids >= 0) & (ids < width)).all()


def assert_greedy(decoder: Decoder, state: list[Tensor], ids: Tensor) -> None:
    """Several steps at a time, and then one: ids, logits and states of single steps, to the bit."""
    decoder.load(state)
    next_ids, want, largest = ids, [], []
    for _ in range(STEPS + 1):
        logits = decoder.step(next_ids).clone()
        next_ids = logits.argmax(-1)
        want.append(next_ids)
        largest.append(logits.amax(-1).double())
    kept = decoder.state()
    decoder.load(state)
    many, found = decoder.greedy(ids, STEPS + 1)
    found = found.clone()
    assert len(found) == STEPS and torch.equal(many, want[-2])
    last, rest = decoder.greedy(many, 1)
    assert len(rest) == 1 and torch.equal(last, want[-1])
    found = torch.cat([found, rest])
    assert torch.equal(found[..., 0], torch.stack(want).double())
    assert torch.equal(found[..., 1], torch.stack(largest))
    assert all(map(torch.equal, decoder.state(), kept))


def assert_ssd_step(
    ops: KernelOps, batch: int, sizes: tuple[int, int, int], dtype: torch.dtype,
    state_dtype: torch.dtype, device: str, raw_dt: float = 0.0, slow: float = -1e-3,
) -> None:  # fmt: skip
    """A few tokens in a row against the twin in float64."""
    heads, width, channels = sizes
    a = torch.stack([torch.linspace(-1, slow, heads), torch.linspace(0.5, 3.14, heads)]).to(device)
    state = draw(batch, heads, 2 * width, channels, dtype=state_dtype, device=device)
    wide, y = state.double(), draw(batch, heads * channels, dtype=dtype, device=device)
    want = y.double()
    for _ in range(3):
        proj = draw(batch, heads * (channels + 4 * width + 1), dtype=dtype, device=device)
        proj[:, -heads:] += raw_dt
        ops.ssd_step(proj, a, state, y)
        PlainOps().ssd_step(proj.double(), a.double(), wide, want)
        assert relative(y, want) < 3 * LIMITS[max(dtype, state_dtype, key=LIMITS.__getitem__)]
        assert relative(state, wide) < 3 * LIMITS[state_dtype]
    assert state.dtype == state_dtype


def model(device: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba3Transformer:
    """Random, but with decays, mixers and norms that are not those of a fresh model."""
    torch.manual_seed(0)
    found = Mamba3Transformer({**MODEL, "init_std": 0.2, **changes})
    with torch.no_grad():
        for block in found.layers:
            assert isinstance(block, Mamba3Block)
            block.A += torch.complex(torch.rand(len(block.A)), torch.randn(len(block.A)))
            block.mimo.mix.weight += 0.1 * torch.randn_like(block.mimo.mix.weight)
            block.norm1.weight += 0.1 * torch.randn_like(block.norm1.weight)
            block.norm2.weight += 0.1 * torch.randn_like(block.norm2.weight)
    found = found.to(device).eval()
    return found.bfloat16() if dtype == torch.bfloat16 else found


@contextlib.contextmanager
def planted(
    folder: Path, old: str, new: str, names: tuple[str, ...] = KERNELS
) -> Iterator[ModuleType]:
    """The kernels with one piece of their source replaced, in the place of the right ones."""
    name = "decode" if names is KERNELS else "decode_staged"
    decode = importlib.import_module(f"mamba3_lite.kernels.{name}")
    assert decode.__file__ is not None
    source = Path(decode.__file__).read_text(encoding="utf-8")
    assert old in source, f"the kernels do not say {old!r} any more"
    path = folder / "variant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("variant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(decode, name, getattr(module, name))
        yield module

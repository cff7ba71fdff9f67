"""Each decoding kernel against its plain twin in float64, on a model's own weights and shapes."""

import torch
from torch import Tensor

from mamba3_lite.inference.decode_ops import Norm, PlainOps
from mamba3_lite.inference.decode_resident import Resident
from mamba3_lite.inference.decode_step import run_steps
from mamba3_lite.inference.decode_weights import Buffers, LayerWeights, Weights

# Relative L2 limits: rounded operands and results alone cost 3e-3.
_LIMITS = {torch.float32: 1e-4}
_LIMIT_16_BITS = 1e-2
# Of the outputs of a product, as many are compared.
_MOST_OUTPUTS = 512


def _some(outputs: int, device: torch.device) -> Tensor:
    """Output columns to look at, the first and the last among them."""
    count = min(outputs, _MOST_OUTPUTS)
    return torch.linspace(0, outputs - 1, count, device=device, dtype=torch.float64).long()


def _error(got: Tensor, want: Tensor) -> float:
    tiny = torch.finfo(torch.float64).tiny
    return float((got.double() - want).norm() / want.norm().clamp_min(tiny))


class _Test:
    """Runs operations both ways and keeps what was wrong first."""

    def __init__(self, ops, weights: Weights, buffers: Buffers):
        self.ops, self.weights, self.buffers = ops, weights, buffers
        device = buffers.x.device
        self.generator = torch.Generator(device).manual_seed(0)
        self.found: str | None = None

    def draw(self, *tensors: Tensor) -> None:
        """Fills buffers with normal numbers."""
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator, device=tensor.device))

    def judge(self, name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
        limit, error = _LIMITS.get(dtype, _LIMIT_16_BITS), _error(got, want)
        if self.found is None and not error <= limit:
            self.found = f"{name} off by {error:.1e} (limit {limit:.0e})"

    def product(self, name: str, x: Tensor, weight: Tensor, out: Tensor, **how) -> None:
        """Of a drawn x, or of the residual stream as the last operation left it for ``norm``."""
        self.draw(*([out] if "norm" in how else [x, out]))
        columns = _some(out.shape[1], out.device)
        rows = torch.cat([columns, columns + out.shape[1]]) if how.get("gated") else columns
        want = out[:, columns].double()
        PlainOps().product(x.double(), weight[rows].double(), want, **how)
        self.ops.product(x, weight, out, **how)
        self.judge(name, out[:, columns], want, x.dtype)

    def head(self, weights: Weights, b: Buffers, norm: Norm) -> None:
        """Of the residual stream as it is; the ids have to be the same without the logits."""
        columns = _some(b.logits.shape[1], b.x.device)
        want = b.logits[:, columns].double()
        PlainOps().product(b.x.double(), weights.head[columns].double(), want, norm=norm)
        for keep in (True, False):
            self.ops.head(b.x, weights.head, b.logits, b.ids, b.best[0], norm=norm, keep=keep)
            if keep:
                self.judge("head", b.logits[:, columns], want, b.x.dtype)
                where, largest = b.logits.argmax(-1), b.logits.double().amax(-1)
            if not torch.equal(b.ids, where) or not torch.equal(b.best[0, :, 1], largest):
                self.found = self.found or "best: another id"

    def ssd_step(self, name: str, proj: Tensor, a: Tensor, state: Tensor, y: Tensor) -> None:
        self.draw(proj, state)
        want_state, want_y = state.double(), y.double()
        PlainOps().ssd_step(proj.double(), a.double(), want_state, want_y)
        self.ops.ssd_step(proj, a, state, y)
        self.judge(f"{name}: y", y, want_y, y.dtype)
        self.judge(f"{name}: state", state, want_state, state.dtype)


def problem(ops, weights: Weights, buffers: Buffers) -> str | None:
    """What is wrong with ``ops`` here, in a few words; None if nothing is. Overwrites buffers."""
    test, layer, b = _Test(ops, weights, buffers), weights.layers[0], buffers
    b.ids.copy_(torch.arange(len(b.ids), device=b.ids.device) * 7919 % len(weights.embed))
    scales = (layer.norm1, layer.norm2, weights.norm_f)
    norm1, norm2, norm_f = (Norm(scale, weights.eps, b.scaled, b.squares) for scale in scales)
    ops.embed(b.ids, weights.embed, b.x, following=norm1)
    if not torch.equal(b.x, weights.embed[b.ids]):
        return "embed: another row"
    test.product("in_proj", b.x, layer.in_proj, b.proj, norm=norm1)
    test.ssd_step("SSD step", b.proj, layer.a, b.state[0], b.y)
    test.product("mixer", b.y, layer.mixer, b.x, add=True, following=norm2)
    test.product("gate_up", b.x, layer.gate_up, b.act, norm=norm2, gated=True)
    test.product("down", b.act, layer.down, b.x, add=True, following=norm1)
    # Once more, since the first was of what the embedding left.
    test.product("in_proj", b.x, layer.in_proj, b.proj, norm=norm1)
    test.product("down", b.act, layer.down, b.x, add=True, following=norm_f)
    test.head(weights, b, norm_f)
    return test.found


def problem_of_steps(resident: Resident, weights: Weights, buffers: Buffers) -> str | None:
    """The same of a kernel of whole steps: the first and the last layer, each alone with a head."""
    test, b = _Test(None, weights, buffers), buffers
    columns = _some(b.logits.shape[1], b.x.device)
    for first in sorted({0, len(weights.layers) - 1}):
        b.ids.fill_((first * 7919 + 1) % len(weights.embed))
        test.draw(b.state[first])
        want = _twin(weights, weights.layers[first], b, b.state[first], columns)
        before = b.state[first].clone(), b.ids.clone()
        for steps in (1, 2):
            b.state[first].copy_(before[0])
            b.ids.copy_(before[1])
            resident.run(steps, first=first, layers=1)
            if steps == 1:
                test.judge("logits", b.logits[:, columns], want.logits, b.x.dtype)
                test.judge("state", b.state[first], want.state[0], b.x.dtype)
                where, largest = b.logits.argmax(-1), b.logits.double().amax(-1)
            if not torch.equal(b.best[0, 0], torch.cat([where.double(), largest])):
                test.found = test.found or "best: another id"
    return test.found


def _twin(
    weights: Weights, layer: LayerWeights, b: Buffers, state: Tensor, columns: Tensor
) -> Buffers:
    """What a step of one layer leaves in float64, with some of the head's columns."""
    wide = b._replace(**{name: torch.zeros_like(t).double() for name, t in b._asdict().items()})
    wide = wide._replace(
        ids=torch.zeros_like(b.ids), logits=wide.logits[:, columns], state=state[None].double()
    )
    given = Weights(
        weights.embed[b.ids].double(), [LayerWeights(*(t.double() for t in layer))],
        weights.norm_f.double(), weights.head[columns].double(), weights.eps,
    )  # fmt: skip
    run_steps(PlainOps(), given, wide, 1)
    return wide

"""One layer: the complex SSD mixer and a SwiGLU feed-forward, each a pre-norm residual branch.

Legend: B batch, T time, H heads, D channels of a head, N complex state width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mamba3_lite.models import ssd_backends, ssd_rotated
from mamba3_lite.models.mimo import MIMO
from mamba3_lite.models.ssd_complex import Pair
from mamba3_lite.models.swiglu import swiglu

if TYPE_CHECKING:
    from mamba3_lite.models.transformer import ModelConfig

# |Re A| never falls below this: a half-life of about 7,000 units of s.
_SLOWEST_DECAY = 1e-4


def stable_decay(A: Tensor) -> Pair:
    """The decay in effect for a free parameter A (H,) complex, with a real part < 0 for every A.

    Re A <= -1 is used as it is (so -1, the initial value, is a fixed point with slope 1). Above -1
    the rate r = -Re A follows r = (1 + (1 - r') / 4)^-4 on top of the floor, r' the raw rate:
    continuous with its slope, never zero, and with a polynomial tail, so that the gradient does not
    die however far an optimizer walks. A free Re A crosses zero within a few thousand optimizer
    steps at the default learning rate, and exp(Re A s) then grows without bound.

    Returns:
        (real, imag), each (H,).
    """
    real, imag = torch.view_as_real(A).unbind(-1)
    rate = -real
    # The clamp keeps the unused branch finite: a NaN there would reach the gradient through where.
    tail = (1 + (1 - rate).clamp_min(0) / 4) ** -4
    slow = _SLOWEST_DECAY + (1 - _SLOWEST_DECAY) * tail
    return -torch.where(rate >= 1, rate, slow), imag


def refuse_complex_cast(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raises before ``module.to(dtype)`` would drop the imaginary part of a complex parameter.

    That holds whatever else the cast converts.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and not fn(parameter.detach()[:0]).is_complex():
            raise TypeError(
                f"{name} is complex and must stay {parameter.dtype}: a cast to a real dtype would "
                "drop its imaginary part. Use module.bfloat16() / .double() (they leave complex "
                "parameters alone) or autocast."
            )


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of a block under ``grad_checkpoint: selective``, what takes long to compute is kept."""
    if op.name() in ("aten::mm", "aten::bmm", "mamba3_lite::fused_ssd"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Mamba3Block(nn.Module):
    """norm1 -> in_proj -> complex SSD -> MIMO -> out_proj, then norm2 -> SwiGLU.

    Two residual branches, no biases.

    Args:
        cfg: a ``ModelConfig``, or a dict with d_model, n_heads, head_dim, state_dim, ffn_dim
            (required) and chunk_size, ssd_dispatch, rms_norm_eps, grad_checkpoint (with defaults).
        layer_idx: position in the stack, for messages only.
    """

    def __init__(self, cfg: "Mapping[str, Any] | ModelConfig", layer_idx: int = 0):
        super().__init__()
        fields = cfg if isinstance(cfg, Mapping) else vars(cfg)
        d_model, ffn_dim = fields["d_model"], fields["ffn_dim"]
        self.n_heads, self.head_dim = fields["n_heads"], fields["head_dim"]
        self.state_dim = fields["state_dim"]
        self.chunk_size = fields.get("chunk_size", 64)
        self.ssd_dispatch = fields.get("ssd_dispatch", "pytorch")
        self.grad_checkpoint = fields.get("grad_checkpoint", False)
        eps = fields.get("rms_norm_eps", 1e-5)
        self.layer_idx = layer_idx
        self._triton_fallback_warned = False
        self._resolved: tuple[torch.device, ssd_backends.Backend] | None = None

        width = self.n_heads * self.head_dim
        self.norm1 = nn.RMSNorm(d_model, eps=eps)
        self.in_proj = nn.Linear(
            d_model, self.n_heads * (self.head_dim + 4 * self.state_dim + 1), bias=False
        )
        self.A = nn.Parameter(torch.full((self.n_heads,), -1.0, dtype=torch.complex64))
        self.mimo = MIMO(width)
        self.out_proj = nn.Linear(width, d_model, bias=False)
        self.norm2 = nn.RMSNorm(d_model, eps=eps)
        self.ffn_gate_up = nn.Linear(d_model, 2 * ffn_dim, bias=False)
        self.ffn_down = nn.Linear(ffn_dim, d_model, bias=False)

    def _apply(self, fn, recurse=True):
        refuse_complex_cast(self, fn)
        return super()._apply(fn, recurse)

    def forward(
        self,
        x: Tensor,
        *,
        state: Tensor | None = None,
        return_state: bool = False,
        segment_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Any:
        """(B, T, d_model) -> the same shape, with ``return_state`` also the state (B, H, 2N, D).

        Args:
            state: where an earlier piece of the sequence left off; zero when absent.
            segment_ids: (B, T) document ids; state is reset where they change.
            token_mask: (B, T) bool; False marks padding, which never enters the state.
        """
        # A is complex: it is turned into real pairs here, outside what torch.compile sees.
        a_real, a_imag = stable_decay(self.A)
        backend = self._backend(x.device)
        # Padding is masked in the parts of the projection, so there it has to be taken apart.
        projected = backend.run_projected if token_mask is None else None
        args = (
            x, a_real, a_imag, backend.run, projected, state, return_state, segment_ids, token_mask,
        )  # fmt: skip
        if self.grad_checkpoint is True and self.training:
            y, final = checkpoint(self._forward_impl, *args, use_reentrant=False)
        else:
            y, final = self._forward_impl(*args)
        return (y, final) if return_state else y

    def _forward_impl(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        """What torch.compile sees: selective checkpointing has to be in its graph."""
        if self.grad_checkpoint == "selective" and self.training:
            contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
            return checkpoint(self._layer, *args, use_reentrant=False, context_fn=contexts)
        return self._layer(*args)

    def _layer(
        self, x, a_real, a_imag, run, projected, state, return_state, segment_ids, token_mask
    ) -> tuple[Tensor, Tensor | None]:
        # The SSD core is kept out of autocast: its decays span many orders of magnitude.
        if projected is not None:
            proj = self.in_proj(self.norm1(x))
            with torch.autocast(device_type=x.device.type, enabled=False):
                y, final = projected(
                    proj, (a_real, a_imag),
                    heads=self.n_heads, state_dim=self.state_dim, head_dim=self.head_dim,
                    state=state, return_state=return_state, segment_ids=segment_ids,
                )  # fmt: skip
            return self._after_ssd(x, y), final
        u, b, c, dt = self._project(x)
        if token_mask is not None:
            # softplus(-inf) = 0: a padded token neither decays the state nor writes to it.
            dt = dt.masked_fill(~token_mask[..., None], float("-inf"))
            u = u.masked_fill(~token_mask[..., None, None], 0)
        with torch.autocast(device_type=x.device.type, enabled=False):
            y, final = run(
                u, b, c, dt, (a_real, a_imag),
                chunk_size=self.chunk_size, state=state, return_state=return_state,
                segment_ids=segment_ids,
            )  # fmt: skip
        return self._after_ssd(x, y.to(u.dtype)), final

    def _project(self, x: Tensor) -> tuple[Tensor, Pair, Pair, Tensor]:
        """norm1 and in_proj of x (..., d_model), sliced as views.

        Returns:
            x (..., H, D), B and C as pairs of (..., H, N), dt (..., H).
        """
        heads, channels, width = self.n_heads, self.head_dim, self.state_dim
        parts = self.in_proj(self.norm1(x)).split(
            [heads * channels, *[heads * width] * 4, heads], dim=-1
        )
        u = parts[0].unflatten(-1, (heads, channels))
        b_re, b_im, c_re, c_im = (p.unflatten(-1, (heads, width)) for p in parts[1:5])
        return u, (b_re, b_im), (c_re, c_im), parts[5]

    def _after_ssd(self, x: Tensor, y: Tensor) -> Tensor:
        """MIMO and output projection of y (..., H, D) onto the residual x (..., d_model).

        The feed-forward branch follows.
        """
        x = x + self.out_proj(self.mimo(y.flatten(-2)))
        return x + self.ffn_down(swiglu(self.ffn_gate_up(self.norm2(x))))

    def step(self, x: Tensor, state: Tensor) -> Pair:
        """One token: x (B, d_model) and the state (B, H, 2N, D) -> the same two, one token on."""
        u, b, c, dt = self._project(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            y, state = ssd_rotated.step(u, b, c, dt, stable_decay(self.A), state)
        return self._after_ssd(x, y.to(u.dtype)), state

    def _backend(self, device: torch.device) -> ssd_backends.Backend:
        """The SSD implementation for this device, decided once."""
        if self._resolved is None or self._resolved[0] != device:
            self._resolved = (device, self._ssd_with_dispatch(device))
        return self._resolved[1]

    def _ssd_with_dispatch(self, device: torch.device) -> ssd_backends.Backend:
        """The seeds' contract: "triton" falls back with one line where it foreseeably cannot run.

        An unknown name runs PyTorch; the project's own names are met or refused.
        """
        shape = ssd_backends.Shape(
            self.head_dim, self.state_dim, self.chunk_size, device, self.n_heads
        )
        dispatch = self.ssd_dispatch
        if dispatch == "triton":
            reason = ssd_backends.BACKENDS["triton"].refuse(shape)
            if reason is not None:
                if not self._triton_fallback_warned:
                    print(
                        f"[Mamba3Block {self.layer_idx}] ssd_dispatch='triton' unavailable "
                        f"({reason}); falling back to 'pytorch' for this block."
                    )
                    self._triton_fallback_warned = True
                dispatch = "pytorch"
        elif dispatch not in ssd_backends.DISPATCH_NAMES:
            dispatch = "pytorch"
        return ssd_backends.resolve(dispatch, shape)

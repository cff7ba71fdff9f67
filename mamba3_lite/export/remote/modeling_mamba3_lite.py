# SPDX-License-Identifier: Apache-2.0
"""Mamba-3-Lite for Hugging Face transformers: one file that needs torch and transformers only.

An export copies it beside the weights, and it is imported from there, never from the package. Its
arithmetic is that of the package's path "rotated", operation by operation, so that float32 logits
on a CPU are equal bit for bit; a test of the package holds it to that.

Legend: B batch, T time, H heads, D channels of a head, N complex state width, K = 2N, C chunk
length, nc chunks.

Recurrence, per batch and head, with s = softplus(dt) and a complex A a head:

    h_t = exp(A s_t) h_{t-1} + B_t x_t^T        y_t = Re(C_t h_t)

Complex numbers travel as real pairs. Inside a chunk B and C are rotated by the phase Im(A) sum(s),
which leaves a real recurrence with a state of 2N rows.
"""

import math
from collections import OrderedDict
from dataclasses import make_dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import ModelOutput

# What this version of transformers calls the thing that `generate` carries from token to token.
_CACHE = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"
_SLOWEST_DECAY = 1e-4


class Mamba3LiteConfig(PretrainedConfig):
    """The architecture.

    Args:
        max_seq_len: the training window, for information; the model takes any length.
        mimo_folded: the head mixer has been multiplied into ``out_proj`` and is left out.
    """

    model_type = "mamba3_lite"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "ffn_dim",
        "initializer_range": "init_std",
    }

    def __init__(
        self,
        vocab_size=50257,
        d_model=1024,
        n_layers=28,
        n_heads=16,
        head_dim=64,
        state_dim=64,
        chunk_size=64,
        ffn_dim=2048,
        max_seq_len=2048,
        rms_norm_eps=1e-5,
        init_std=0.02,
        mimo_folded=False,
        tie_word_embeddings=True,
        use_cache=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.state_dim = state_dim
        self.chunk_size = chunk_size
        self.ffn_dim = ffn_dim
        self.max_seq_len = max_seq_len
        self.rms_norm_eps = rms_norm_eps
        self.init_std = init_std
        self.mimo_folded = mimo_folded
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RecurrentState:
    """All that the model keeps of a past: one float32 (B, H, K, D) a layer, whatever its length.

    ``generate`` carries it where an attention model has keys and values. ``seen`` counts the
    columns read so far, padding included.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, layers: list[Tensor], seen: int):
        self.layers = layers
        self.seen = seen

    @property
    def is_linear(self) -> list[bool]:
        return [True] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``."""
        self.layers = [h.index_select(0, beam_idx.to(h.device)) for h in self.layers]


# The state stands under the name that `generate` of this version looks for.
Mamba3LiteOutput = make_dataclass(
    "Mamba3LiteOutput",
    [(name, object, None) for name in ("loss", "logits", _CACHE)],
    bases=(ModelOutput,),
)


# The SSD ------------------------------------------------------------------------------------------


def _stable_decay(A):
    """A (H, 2) as stored -> (real, imag) in effect, each (H,); the real part is below 0 for any."""
    real, imag = A.unbind(-1)
    rate = -real
    tail = (1 + (1 - rate).clamp_min(0) / 4) ** -4
    slow = _SLOWEST_DECAY + (1 - _SLOWEST_DECAY) * tail
    return -torch.where(rate >= 1, rate, slow), imag


def _softplus(dt):
    return F.softplus(dt, threshold=40.0)


def _rotate(state, cos, sin):
    """(upper half + i lower half of dimension -2) times cos + i sin."""
    real, imag = state.chunk(2, -2)
    return torch.cat([real * cos - imag * sin, real * sin + imag * cos], -2)


def _wide(t):
    """One number a head, ready to multiply its (K, D) state."""
    return t[..., None, None]


def _split_factor(exponent, phase):
    """exp(exponent + i phase) as whole + (real + i imag), whole 0 or 1.

    A slow decay is so near 1 that its rounding would add up over a long text; what differs from 1
    is rounded instead.
    """
    whole = (exponent > -0.5).to(exponent.dtype)
    half = torch.sin(phase / 2)
    near_one = torch.expm1(exponent) * torch.cos(phase) - 2 * half * half
    magnitude = torch.exp(exponent)
    real = torch.where(whole > 0, near_one, magnitude * torch.cos(phase))
    return whole, real, magnitude * torch.sin(phase)


def _ssd_chunked(x, b, c, dt, a, chunk_size, state):
    """A whole sequence: x (B, T, H, D), b and c pairs of (B, T, H, N), dt (B, T, H).

    ``state`` (B, H, K, D) or None. Returns y (B, T, H, D) and the state after the last token.
    """
    batch, length, heads, channels = x.shape
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    size = min(chunk_size, length)
    pad = (size - length % size) % size

    def chunked(t):
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) if pad else t
        return t.unflatten(1, (-1, size))

    # Sums along time are float64: they hold one number a token and head. Padding has s = 0.
    prefix = chunked(_softplus(dt.double())).cumsum(2)
    phase = a[1].double() * prefix
    turns = torch.round(phase.detach() / (2 * math.pi))
    log_decay, phase = a[0].double() * prefix, phase - turns * (2 * math.pi)

    cos, sin = (f(phase.to(compute))[..., None] for f in (torch.cos, torch.sin))
    b_re, b_im, c_re, c_im = (chunked(t.to(compute)) for t in (*b, *c))
    b_rot = torch.cat([b_re * cos + b_im * sin, b_im * cos - b_re * sin], -1).transpose(2, 3)
    c_rot = torch.cat([c_re * cos - c_im * sin, -(c_im * cos + c_re * sin)], -1).transpose(2, 3)
    xc = chunked(x.to(compute)).transpose(2, 3)

    # The exponent is masked, never the exponential: above the diagonal exp() would overflow.
    inside = log_decay.to(compute).transpose(2, 3)
    causal = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    exponent = (inside[..., :, None] - inside[..., None, :]).masked_fill(~causal, -math.inf)
    y = ((c_rot @ b_rot.mT) * torch.exp(exponent)) @ xc
    to_end = torch.exp(log_decay[:, :, -1:] - log_decay).to(compute)
    added = (b_rot * to_end.transpose(2, 3)[..., None]).mT @ xc

    end = phase[:, :, -1]
    added = _rotate(added, *(_wide(t.to(compute)) for t in (torch.cos(end), torch.sin(end))))
    factors = (_wide(t.to(compute)).unbind(1) for t in _split_factor(log_decay[:, :, -1], end))
    h = x.new_zeros(batch, heads, b_rot.shape[-1], channels, dtype=compute)
    if state is not None:
        h = state.to(compute)
    starts = []
    for added_c, whole, real, imag in zip(added.unbind(1), *factors, strict=True):
        starts.append(h)
        h = whole * h + (_rotate(h, real, imag) + added_c)
    from_start = torch.exp(log_decay).to(compute)
    y = y + (c_rot * from_start.transpose(2, 3)[..., None]) @ torch.stack(starts, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :length], h


def _ssd_step(x, b, c, dt, a, state):
    """One token: the arguments and results of :func:`_ssd_chunked` without their T."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    s = _softplus(dt.double())
    split = _split_factor(a[0].double() * s, a[1].double() * s)
    whole, real, imag = (_wide(t.to(compute)) for t in split)
    written = torch.cat(b, -1).to(compute)[..., :, None] * x.to(compute)[..., None, :]
    state = state.to(compute)
    state = whole * state + (_rotate(state, real, imag) + written)
    reading = torch.cat([c[0], -c[1]], -1).to(compute)
    return (reading[..., None, :] @ state).squeeze(-2), state


# The model ----------------------------------------------------------------------------------------


class HeadMixer(nn.Linear):
    """A dense map over the channels of all heads; starts as the identity."""

    def reset_parameters(self):
        nn.init.eye_(self.weight)


class Mamba3LiteBlock(nn.Module):
    """norm1 -> in_proj -> SSD -> head mixer -> out_proj, then norm2 -> SwiGLU; both residual."""

    def __init__(self, config: Mamba3LiteConfig):
        super().__init__()
        self.heads, self.channels = config.n_heads, config.head_dim
        self.state_dim, self.chunk_size = config.state_dim, config.chunk_size
        d, width, eps = config.d_model, config.n_heads * config.head_dim, config.rms_norm_eps
        projected = config.n_heads * (config.head_dim + 4 * config.state_dim + 1)
        self.norm1 = nn.RMSNorm(d, eps=eps)
        self.in_proj = nn.Linear(d, projected, bias=False)
        # (real, imaginary) of each head: complex tensors do not survive every tool.
        self.A = nn.Parameter(torch.tensor([-1.0, 0.0]).repeat(config.n_heads, 1))
        self.mimo: nn.Module = nn.Identity()
        if not config.mimo_folded:
            self.mimo = nn.Sequential(OrderedDict(mix=HeadMixer(width, width, bias=False)))
        self.out_proj = nn.Linear(width, d, bias=False)
        self.norm2 = nn.RMSNorm(d, eps=eps)
        self.ffn_gate_up = nn.Linear(d, 2 * config.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(config.ffn_dim, d, bias=False)

    def forward(self, x, mask, state, step):
        """x (B, T, d) and mask (B, T) bool or None, both without T for a ``step``.

        Returns x and the state after its last token.
        """
        heads, n = self.heads, self.state_dim
        parts = self.in_proj(self.norm1(x)).split(
            [heads * self.channels, *[heads * n] * 4, heads], dim=-1
        )
        u, dt = parts[0].unflatten(-1, (heads, self.channels)), parts[5]
        b_re, b_im, c_re, c_im = (p.unflatten(-1, (heads, n)) for p in parts[1:5])
        operands = ((b_re, b_im), (c_re, c_im))
        with torch.autocast(device_type=x.device.type, enabled=False):
            a = _stable_decay(self.A)
            if mask is not None:
                # softplus(-inf) = 0: padding neither decays the state nor writes to it.
                dt = dt.masked_fill(~mask[..., None], float("-inf"))
                u = u.masked_fill(~mask[..., None, None], 0)
            if step:
                y, state = _ssd_step(u, *operands, dt, a, state)
            else:
                y, state = _ssd_chunked(u, *operands, dt, a, self.chunk_size, state)
        x = x + self.out_proj(self.mimo(y.to(u.dtype).flatten(-2)))
        gate, up = self.ffn_gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.ffn_down(F.silu(gate) * up), state


class Mamba3LiteForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, blocks, final norm, (tied) head. No positional embedding: any length works."""

    config_class = Mamba3LiteConfig
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}
    _no_split_modules = ["Mamba3LiteBlock"]
    _keep_in_fp32_modules_strict = ["A"]
    # A state cannot be wound back, which assisted generation would need.
    _is_stateful = True

    def __init__(self, config: Mamba3LiteConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Mamba3LiteBlock(config) for _ in range(config.n_layers))
        self.norm_f = nn.RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if not isinstance(module, HeadMixer):
            super()._init_weights(module)

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: RecurrentState | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs,
    ):
        """input_ids (B, T) -> logits (B, T, vocab).

        Args:
            attention_mask: (B, T), or (B, columns so far); 0 marks padding, on either side.
            cache: what an earlier call returned; the sequence goes on from there. The argument
                ``past_key_values`` is its older name.
            use_cache: return the state, too; by default when not training.
            labels: (B, T), shifted here; -100 does not count.
            logits_to_keep: logits of so many last positions only; 0: all.
        """
        past = cache if cache is not None else past_key_values
        length = input_ids.shape[1]
        mask = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("attention_mask must be (batch, tokens), 0 on padding")
            mask = attention_mask[:, -length:].bool()
        # One token after others takes the recurrent step; a lone first token is a sequence.
        step = past is not None and length == 1
        if step:
            input_ids, mask = input_ids[:, 0], None if mask is None else mask[:, 0]
        x = self.embed(input_ids)
        finals = []
        for index, layer in enumerate(self.layers):
            x, final = layer(x, mask, None if past is None else past.layers[index], step)
            finals.append(final)
        x = self.norm_f(x)
        x = x[:, None] if step else x
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = Mamba3LiteOutput(loss=loss, logits=logits)
        if self.config.use_cache and not self.training if use_cache is None else use_cache:
            seen = length + (0 if past is None else past.seen)
            output[_CACHE] = RecurrentState(finals, seen)
        return output.to_tuple() if return_dict is False else output

    # ``generate`` makes no cache of keys and values: the first call of the model makes the state.
    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids,
        cache=None,
        past_key_values=None,
        attention_mask=None,
        use_cache=True,
        logits_to_keep=None,
        **kwargs,
    ):
        past = cache if cache is not None else past_key_values
        # Of ids that the mask covers whole, those that the state has not seen are left to read.
        whole = attention_mask is None or attention_mask.shape[1] == input_ids.shape[1]
        if past is not None and whole:
            input_ids = input_ids[:, past.seen :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": 1 if logits_to_keep is None else logits_to_keep,
            _CACHE: past,
        }

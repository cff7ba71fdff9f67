"""Parameters, FLOPs and bytes of a configuration, by arithmetic alone: no tensor is made.

A multiply-add counts as two FLOPs. W is the number of parameters that sit in matrix products (head
included), L layers, H heads, D channels, N complex state width, C chunk length. The functions that
take ``dispatch`` and ``compiled`` say what this code keeps in memory, under bf16 autocast; tests
hold them against the code run on tensors without storage, and against recorded peaks.
"""

from typing import NamedTuple

import torch

from mamba3_lite.models import ssd_plans
from mamba3_lite.models.transformer import ModelConfig


def parameter_counts(cfg: ModelConfig) -> dict[str, int]:
    """Parameters by part, over all layers; A is one complex number a head.

    A tied head counts once, with the embedding.
    """
    d, width = cfg.d_model, cfg.n_heads * cfg.head_dim
    layers = cfg.n_layers
    embedding = cfg.vocab_size * d
    return {
        "embedding": embedding,
        "head": 0 if cfg.weight_tying else embedding,
        "in_proj": layers * d * cfg.n_heads * (cfg.head_dim + 4 * cfg.state_dim + 1),
        "mimo": layers * width * width,
        "out_proj": layers * width * d,
        "ffn": layers * 3 * d * cfg.ffn_dim,
        "norms": (2 * layers + 1) * d,
        "A": layers * cfg.n_heads,
    }


def parameter_count(cfg: ModelConfig) -> int:
    """All parameters (complex A counted as one)."""
    return sum(parameter_counts(cfg).values())


def matmul_parameters(cfg: ModelConfig) -> int:
    """W: parameters in matrix products, for every token; a tied embedding counts as the head."""
    counts = parameter_counts(cfg)
    return cfg.vocab_size * cfg.d_model + sum(
        counts[part] for part in ("in_proj", "mimo", "out_proj", "ffn")
    )


def model_flops_per_token(cfg: ModelConfig) -> int:
    """6 W: the figure MFU is quoted against.

    Independent of the chunk length, no credit for recomputation.
    """
    return 6 * matmul_parameters(cfg)


def ssd_flops_per_token(cfg: ModelConfig) -> tuple[int, int]:
    """(forward, backward) FLOPs of all SSD layers for one token.

    In the real-valued form with state K = 2N (full tiles).
    """
    c, k, p = cfg.chunk_size, 2 * cfg.state_dim, cfg.head_dim
    heads = cfg.n_layers * cfg.n_heads
    return heads * (2 * c * (k + p) + 4 * k * p), heads * (c * (6 * k + 4 * p) + 8 * k * p)


def forward_flops_per_token(cfg: ModelConfig) -> int:
    """Matrix products and SSD of one forward pass."""
    return 2 * matmul_parameters(cfg) + ssd_flops_per_token(cfg)[0]


def training_flops_per_token(cfg: ModelConfig) -> int:
    """Forward and backward; with ``grad_checkpoint`` True all but the head runs forward twice.

    What "selective" computes again is no matrix product and no SSD.
    """
    ssd_forward, ssd_backward = ssd_flops_per_token(cfg)
    flops = 6 * matmul_parameters(cfg) + ssd_forward + ssd_backward
    if cfg.grad_checkpoint is True:
        blocks = matmul_parameters(cfg) - cfg.vocab_size * cfg.d_model
        flops += 2 * blocks + ssd_forward
    return flops


def activation_bytes(cfg: ModelConfig, batch: int, seq_len: int, element_bytes: int = 2) -> int:
    """Activations kept for the backward pass, logits apart.

    Counts what the mathematics needs (inputs of every product, norm and activation); a backend may
    keep more. With ``grad_checkpoint`` True each block keeps only its input, with "selective" all
    but the outputs of its norms and of the SwiGLU.
    """
    d, width = cfg.d_model, cfg.n_heads * cfg.head_dim
    if cfg.grad_checkpoint is True:
        per_layer = d
    else:
        projected = cfg.n_heads * (cfg.head_dim + 4 * cfg.state_dim + 1)
        per_layer = 2 * d + projected + 2 * width + 2 * cfg.ffn_dim
        if cfg.grad_checkpoint != "selective":
            per_layer += 2 * d + cfg.ffn_dim
    return batch * seq_len * element_bytes * (cfg.n_layers * per_layer + d)


def optimizer_bytes(cfg: ModelConfig) -> int:
    """AdamW in float32: two moments a parameter (complex A: complex moments)."""
    return 2 * weight_bytes(cfg)


def weight_bytes(cfg: ModelConfig) -> int:
    """Float32 master weights; A is complex64. Gradients take the same."""
    return 4 * (parameter_count(cfg) + parameter_counts(cfg)["A"])


def state_bytes(cfg: ModelConfig, batch: int = 1) -> int:
    """The recurrent state of ``batch`` sequences in complex64; constant in their length."""
    return 8 * batch * cfg.n_layers * cfg.n_heads * cfg.state_dim * cfg.head_dim


class _Bytes(NamedTuple):
    """Bytes a token and head: so many times N, D, C and N D / C, and a constant."""

    n: int
    d: int
    c: int
    states: int
    rest: int

    def of(self, cfg: ModelConfig, chunk: int) -> int:
        """Bytes a token, over all heads."""
        states = self.states * cfg.state_dim * cfg.head_dim // chunk
        width = self.n * cfg.state_dim + self.d * cfg.head_dim + self.c * chunk
        return cfg.n_heads * (width + states + self.rest)


class _SsdMemory(NamedTuple):
    """What one SSD path holds; where it holds its bf16 projection, 8 N + 2 D + 2 are of that.

    ``kept`` is there between forward and backward, ``selective`` the same under selective
    checkpointing; ``forward`` and ``backward`` are the fullest moments inside either.
    """

    kept: _Bytes
    selective: _Bytes
    forward: _Bytes
    backward: _Bytes


# Projection, bf16 states at the chunks' edges, three float32 numbers of phase; the forward adds y,
# the backward dy, the gradients of projection and states, and two float32 sums.
_FUSED = _SsdMemory(
    kept=_Bytes(8, 2, 0, 4, 14),
    selective=_Bytes(8, 2, 0, 4, 14),
    forward=_Bytes(8, 4, 0, 4, 14),
    backward=_Bytes(16, 6, 0, 8, 24),
)
# What the compiler keeps for a backward pass in float32: projection, rotated operands and their
# factors, scores and decay, the states; the forward adds y, the backward dy, the gradients of the
# projection, of both operands, of x, and of the scores.
_ROTATED_COMPILED = _SsdMemory(
    kept=_Bytes(56, 6, 8, 24, 11),
    selective=_Bytes(8, 8, 4, 8, 2),
    forward=_Bytes(56, 10, 8, 24, 11),
    backward=_Bytes(80, 14, 12, 24, 13),
)
# Run operation by operation, whatever autograd saves and the operations make on their way.
_BY_OPERATION = {
    "fused": _FUSED,
    "rotated": _SsdMemory(
        kept=_Bytes(64, 8, 12, 24, 45),
        selective=_Bytes(8, 8, 4, 8, 2),
        forward=_Bytes(80, 26, 16, 32, 68),
        backward=_Bytes(73, 17, 14, 33, 56),
    ),
    "pytorch": _SsdMemory(
        kept=_Bytes(64, 12, 28, 24, 81),
        selective=_Bytes(8, 12, 8, 8, 2),
        forward=_Bytes(76, 30, 32, 35, 170),
        backward=_Bytes(52, 10, 54, 44, 80),
    ),
    "triton": _SsdMemory(
        kept=_Bytes(40, 4, 0, 16, 89),
        selective=_Bytes(8, 8, 0, 0, 2),
        forward=_Bytes(56, 22, 0, 24, 105),
        backward=_Bytes(60, 16, 61, 30, 16),
    ),
}


class BlockMemory(NamedTuple):
    """Bytes a token of one block under bf16 autocast.

    Attributes:
        ssd: of what stays for the backward pass, the part of the SSD path, projection included.
        rest: the other part: residual stream, norms, products, SwiGLU.
        fullest: the block while its own backward runs, what is made again and all gradients
            inside it included.
    """

    ssd: int
    rest: int
    fullest: int


def block_memory(cfg: ModelConfig, *, dispatch: str, compiled: bool) -> BlockMemory:
    """What one block holds, by ``cfg.grad_checkpoint``; ``dispatch`` is a path, never "auto"."""
    d, width, ffn = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.ffn_dim
    selective = cfg.grad_checkpoint == "selective"
    # These two are in the block's graph; torch.compile leaves the others alone.
    in_graph = compiled and dispatch in ("fused", "rotated")
    memory = _BY_OPERATION[dispatch]
    if in_graph and dispatch == "rotated":
        memory = _ROTATED_COMPILED
    # The fused kernels cut chunks of their own.
    fused_chunk = ssd_plans.chunk_size(torch.bfloat16)
    chunk = fused_chunk if dispatch == "fused" else cfg.chunk_size
    ssd, ssd_selective, forward, backward = (part.of(cfg, chunk) for part in memory)
    # bf16 inputs of both norms, of all products and of the SwiGLU, and two numbers of 1 / rms. A
    # norm that is not compiled keeps two float32 tensors in the place of its bf16 input.
    rest = 2 * (4 * d + 2 * width + 3 * ffn) + 8 + (0 if compiled else 12 * d)
    # The last product's output serves nobody, but only a compiler sees that.
    needless = 0 if compiled else 2 * d
    outputs = 2 * (width + d + 2 * ffn) + needless  # of the products behind the SSD
    whole = ssd + rest + (needless if selective else 0)
    # The fullest moment is in the SwiGLU or in the SSD. There: the block's gradient, and those of
    # the SwiGLU's output and input. The output itself is free again by then; but the backward of a
    # compiled graph is one call, and is taken to give nothing back before its end.
    in_swiglu = whole + 2 * d + (6 if compiled else 4) * ffn
    if in_graph:
        in_ssd = whole - ssd + backward + 2 * d
    else:
        if cfg.grad_checkpoint:
            backward = max(backward, forward + (outputs if selective else 0))
        # Beside the SSD: the block's input, its gradient, and the norm before the projection.
        in_ssd = backward + (6 * d if compiled else 14 * d)
    fullest = max(in_swiglu, in_ssd)
    if cfg.grad_checkpoint is True:
        return BlockMemory(0, 2 * d, fullest)
    if selective:
        return BlockMemory(ssd_selective, 2 * (d + width) + outputs, fullest)
    return BlockMemory(ssd, rest, fullest)

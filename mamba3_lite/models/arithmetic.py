"""Parameters, FLOPs and bytes of a configuration, by arithmetic alone: no tensor is made.

A multiply-add counts as two FLOPs. W is the number of parameters that sit in matrix products (head
included), L layers, H heads, D channels, N complex state width, C chunk length.
"""

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

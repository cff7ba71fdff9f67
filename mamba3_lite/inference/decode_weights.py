"""What a decoding step reads and writes: the weights, prepared once, and its buffers."""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba3_lite.inference.decode_ops import norm_parts
from mamba3_lite.models.mamba_block import Mamba3Block, stable_decay
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig

# Of one CUDA graph, where nobody draws between them: behind each graph a GPU waits for its next.
STEPS = 8


class LayerWeights(NamedTuple):
    """One layer; ``a`` (2, H) float32 is the decay in effect, ``mixer`` is out_proj times mix."""

    norm1: Tensor
    in_proj: Tensor
    a: Tensor
    mixer: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """A model for decoding, in one precision."""

    embed: Tensor
    layers: list[LayerWeights]
    norm_f: Tensor
    head: Tensor
    eps: float


class Buffers(NamedTuple):
    """What steps of B sequences work on; the state is (layers, B, H, 2 N, D).

    scaled and squares: see ``decode_ops.py:Norm``. best (STEPS, B, 2): what each step found.
    """

    ids: Tensor
    x: Tensor
    scaled: Tensor
    squares: Tensor
    proj: Tensor
    y: Tensor
    act: Tensor
    logits: Tensor
    best: Tensor
    state: Tensor


def _folded(block: Mamba3Block) -> Tensor:
    """The head mixer and the output projection as one matrix.

    That is exact in real arithmetic, and computed in float64.
    """
    return block.out_proj.weight.double() @ block.mimo.mix.weight.double()


@torch.no_grad()
def prepare(model: Mamba3Transformer, dtype: torch.dtype) -> Weights:
    """The weights in ``dtype``; those that have it already are shared with the model."""

    def cast(t: Tensor) -> Tensor:
        return t.detach().to(dtype).contiguous()

    layers = []
    for block in model.layers:
        assert isinstance(block, Mamba3Block)
        layers.append(
            LayerWeights(
                cast(block.norm1.weight), cast(block.in_proj.weight),
                torch.stack(stable_decay(block.A)).float().contiguous(),
                cast(_folded(block)), cast(block.norm2.weight),
                cast(block.ffn_gate_up.weight), cast(block.ffn_down.weight),
            )
        )  # fmt: skip
    embed = cast(model.embed.weight)
    tied = model.lm_head.weight is model.embed.weight
    head = embed if tied else cast(model.lm_head.weight)
    return Weights(embed, layers, cast(model.norm_f.weight), head, model.cfg.rms_norm_eps)


def make_buffers(
    cfg: ModelConfig, batch: int, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device
) -> Buffers:
    """Empty buffers, the state zero."""

    def empty(width: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(batch, width, dtype=kind, device=device)

    heads, width, channels = cfg.n_heads, cfg.state_dim, cfg.head_dim
    return Buffers(
        ids=torch.zeros(batch, dtype=torch.int64, device=device),
        x=empty(cfg.d_model),
        scaled=empty(cfg.d_model),
        squares=torch.zeros(batch, norm_parts(cfg.d_model), dtype=torch.float32, device=device),
        proj=empty(heads * (channels + 4 * width + 1)),
        y=empty(heads * channels),
        act=empty(cfg.ffn_dim),
        logits=empty(cfg.vocab_size, torch.float32),
        best=torch.zeros(STEPS, batch, 2, dtype=torch.float64, device=device),
        state=torch.zeros(
            cfg.n_layers, batch, heads, 2 * width, channels, dtype=state_dtype, device=device
        ),
    )

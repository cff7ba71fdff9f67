"""The language model: embedding, a stack of Mamba3Blocks, final norm, (tied) head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mamba3_lite.errors import UserError
from mamba3_lite.models.mamba_block import Mamba3Block, refuse_complex_cast
from mamba3_lite.models.mimo import MIMO


@dataclass
class ModelConfig:
    """Every number of the architecture.

    A field added here is a key of the YAML's ``model:`` section without further code.
    """

    vocab_size: int = 50257
    d_model: int = 1024
    n_layers: int = 28
    n_heads: int = 16  # H
    head_dim: int = 64  # D, channels of a head
    state_dim: int = 64  # N, complex state width
    chunk_size: int = 64  # C, tokens an SSD chunk holds
    ssd_dispatch: str = "pytorch"
    ffn_dim: int = 2048
    max_seq_len: int = 2048  # the training window only; any length works
    weight_tying: bool = True
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    grad_checkpoint: bool | str = False  # or "selective"

    def __post_init__(self) -> None:
        problems = []
        for name in (
            "vocab_size", "d_model", "n_layers", "n_heads", "head_dim", "state_dim", "chunk_size",
            "ffn_dim", "max_seq_len",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                problems.append(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rms_norm_eps", "init_std"):
            if not 0 < getattr(self, name) < 1:
                problems.append(f"model.{name} must lie between 0 and 1, got {getattr(self, name)}")
        if not (isinstance(self.grad_checkpoint, bool) or self.grad_checkpoint == "selective"):
            problems.append(
                "model.grad_checkpoint must be true, false or selective, "
                f"got {self.grad_checkpoint!r}"
            )
        if problems:
            raise UserError("; ".join(problems) + ".")


class Mamba3Transformer(nn.Module):
    """A language model over token ids, without positional embedding: any length works.

    Args:
        cfg: a ``ModelConfig``, or a dict of some of its fields (an unknown one: ``TypeError``).
    """

    def __init__(self, cfg: ModelConfig | dict[str, Any]):
        super().__init__()
        cfg = ModelConfig(**cfg) if isinstance(cfg, dict) else cfg
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Mamba3Block(cfg, i) for i in range(cfg.n_layers))
        self.norm_f = nn.RMSNorm(cfg.d_model, eps=cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.weight_tying:
            self.lm_head.weight = self.embed.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Linears and embedding N(0, init_std), norms 1, head mixers the identity; A keeps -1."""
        mixers = {module.mix for module in self.modules() if isinstance(module, MIMO)}
        drawn: set[int] = set()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module not in mixers:
                if id(module.weight) not in drawn:
                    nn.init.normal_(module.weight, std=self.cfg.init_std)
                drawn.add(id(module.weight))

    def _apply(self, fn, recurse=True):
        # Asked of the whole model first, so that a refusal leaves nothing half converted.
        refuse_complex_cast(self, fn)
        return super()._apply(fn, recurse)

    def hidden(
        self,
        ids: Tensor,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        segment_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Any:
        """ids (B, T) -> what the head reads, (B, T, d_model); otherwise as :meth:`forward`."""
        x = self.embed(ids)
        if torch.is_autocast_enabled(x.device.type):
            # What every layer adds is rounded to this precision anyway; a wider sum would double
            # the traffic of norms and residuals.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        finals = []
        for i, layer in enumerate(self.layers):
            x = layer(
                x,
                state=None if state is None else state[i],
                return_state=return_state,
                segment_ids=segment_ids,
                token_mask=token_mask,
            )
            if return_state:
                x, final = x
                finals.append(final)
        x = self.norm_f(x)
        return (x, finals) if return_state else x

    def forward(
        self,
        ids: Tensor,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        segment_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Any:
        """ids (B, T) int64 -> logits (B, T, vocab).

        Args:
            state: what an earlier call returned; the sequence goes on from there.
            return_state: return also one state (B, H, 2N, D) a layer.
            segment_ids: (B, T) document ids, non-decreasing; state is reset where they change.
            token_mask: (B, T) bool, False on padding (any side); padding never enters a state.
        """
        x = self.hidden(
            ids, state=state, return_state=return_state,
            segment_ids=segment_ids, token_mask=token_mask,
        )  # fmt: skip
        if return_state:
            return self.lm_head(x[0]), x[1]
        return self.lm_head(x)

    def step(self, ids: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One token a sequence: ids (B,) and a state of ``forward`` -> logits (B, vocab), state."""
        x = self.embed(ids)
        new_state = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            assert isinstance(layer, Mamba3Block)
            x, layer_state = layer.step(x, layer_state)
            new_state.append(layer_state)
        return self.lm_head(self.norm_f(x)), new_state

"""AdamW with two parameter groups, the one gradient norm, and an update that the device can skip.

Nothing here reads a value back from the device.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mamba3_lite.utils.weights import as_held, as_spread, gathered

if TYPE_CHECKING:
    from mamba3_lite.training.config import TrainingConfig


class PlainView(nn.Parameter):
    """What this rank holds of a parameter, as plain real numbers: its storage, its gradient.

    A complex parameter (...) becomes a real one (..., 2), a sharded one (a ``DTensor``) this rank's
    rows, maybe none. The fused kernel takes such tensors only; and AdamW works number by number, so
    nothing changes but who is asked.
    """

    source: nn.Parameter

    def __new__(cls, source: nn.Parameter) -> "PlainView":
        view = super().__new__(cls, _plain(source.detach()))
        view.source = source
        return view

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The same view of the gradient, as it is now."""
        # A model that is moved leaves the view behind, and updates would go nowhere.
        moved = self.data_ptr() != _plain(self.source.detach()).data_ptr()
        assert not moved, "the model moved under its optimizer"
        return None if self.source.grad is None else _plain(self.source.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        assert value is None, "a gradient is written through its source"
        self.source.grad = None

    @property
    def shards(self) -> DTensor | None:
        """The sharded parameter that this is a part of."""
        return self.source if isinstance(self.source, DTensor) else None


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def build_optimizer(model: nn.Module, config: "TrainingConfig") -> torch.optim.AdamW:
    """Fused AdamW: parameters with two or more dimensions decay, the rest (norms, A) do not.

    Tied ones count once; complex and sharded ones take part as :class:`PlainView`. The model must
    be on its devices already.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for p in model.parameters():  # yields a shared one once
        if p.requires_grad:
            special = p.is_complex() or isinstance(p, DTensor)
            groups[p.dim() < 2].append(PlainView(p) if special else p)
    decaying, rest = groups
    return torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict, config: "TrainingConfig") -> None:
    """Moments from a checkpoint, hyperparameters from the configuration.

    A changed knob takes effect from here. Moments are whole, as :func:`whole_state` gives them; of
    a sharded parameter's each rank takes its rows.
    """
    cut = {
        index: {name: _as_held(value, parameter) for name, value in saved["state"][index].items()}
        for index, parameter in enumerate(_parameters(optimizer))
        if index in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": cut})
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr
        group["betas"] = (config.beta1, config.beta2)
    optimizer.param_groups[0]["weight_decay"] = config.weight_decay


def whole_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict:
    """Its state dict with whole moments, however they are sharded.

    Every rank must ask; what those get that do not ``keep`` is of no use.
    """
    saved = optimizer.state_dict()
    whole = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        state = saved["state"].get(index, {})
        if isinstance(parameter, PlainView) and (shards := parameter.shards) is not None:
            state = {n: gathered(v, shards, keep=keep) if v.dim() else v for n, v in state.items()}
        if state:
            whole[index] = state
    return {**saved, "state": whole}


def spread_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict]:
    """Its moments as ``optim.INDEX.NAME``, sharded ones as this rank's part; and its groups."""
    saved = optimizer.state_dict()
    tensors = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        shards = parameter.shards if isinstance(parameter, PlainView) else None
        for name, value in saved["state"].get(index, {}).items():
            if shards is not None and value.dim():
                value = as_spread(value, shards)
            tensors[f"optim.{index}.{name}"] = value
    return tensors, {"param_groups": saved["param_groups"]}


def _as_held(value: Tensor, parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, PlainView) and (shards := parameter.shards) is not None:
        return as_held(value, shards).to_local() if value.dim() else value
    return value


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Global L2 norm of all gradients, a 0-d tensor on their device.

    A complex entry counts with its modulus, and what is sharded over ranks once.
    """
    parameters = _parameters(optimizer)
    shards = {id(p): p.shards for p in parameters if isinstance(p, PlainView)}
    sharded = [p for p in parameters if shards.get(id(p)) is not None]
    whole = [p for p in parameters if shards.get(id(p)) is None]
    if not sharded:
        return _norm(whole)
    square, one = _norm(sharded).square(), shards[id(sharded[0])]
    assert one is not None
    # Under hsdp the other dimension of the mesh holds copies.
    dist.all_reduce(square, group=one.device_mesh.get_group("shard"))
    return (square + _norm(whole).square()).sqrt()


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_real_gradients(parameters))))


def update(optimizer: torch.optim.Optimizer, *, divisor: Tensor, skip: Tensor) -> None:
    """One optimizer step with every gradient divided by ``divisor``; none at all where ``skip``.

    Both are 0-d tensors on the gradients' device, ``skip`` float32: 0 or 1. A fused optimizer takes
    them into its kernel, by the protocol of torch's gradient scaler: division costs no pass of its
    own, and a skipped step leaves weights, moments and step counts untouched without anybody
    looking at the flag. For any other optimizer both happen here, and the host waits.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        torch._foreach_div_(_real_gradients(_parameters(optimizer)), divisor)
        optimizer.step()


def _real_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Views of all gradients as real numbers, which the foreach kernels take."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [torch.view_as_real(g) if g.is_complex() else g for g in gradients]

"""The head mixer between the SSD and the output projection."""

import torch
from torch import Tensor, nn


class MIMO(nn.Module):
    """A dense (H*D, H*D) map over all heads' channels, the identity at initialisation.

    It is linear like ``out_proj`` behind it, so at inference the two can be folded into one matrix.
    """

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the identity; the model-wide initialisation leaves this module alone."""
        nn.init.eye_(self.mix.weight)

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, T, H*D)."""
        return self.mix(y)

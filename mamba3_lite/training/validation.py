"""Loss over a validation split, without any influence on training."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mamba3_lite.training.losses import next_token_loss


class EvaluationStopped(Exception):
    """The caller asked for an end before the last window."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    *,
    batch_size: int,
    device: torch.device,
    amp_context: AbstractContextManager,
    max_batches: int = 0,
    reset_every_token: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[float, int]:
    """(mean loss in nat per token, number of counted tokens) over all windows.

    Items of the dataset are (x, y), or (x, y, segment_ids) to reset the state between documents.

    Args:
        max_batches: stop after so many micro-batches; 0 takes all.
        reset_every_token: makes every token a document of its own, so that the model sees no
            context but the current token: the difference tells what the recurrent state is worth.
        should_stop: asked before each micro-batch.

    Raises:
        EvaluationStopped: ``should_stop`` said so.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    try:
        for i, batch in enumerate(DataLoader(dataset, batch_size=batch_size)):
            if max_batches and i >= max_batches:
                break
            if should_stop():
                raise EvaluationStopped
            x, y, *documents = (part.to(device) for part in batch)
            segments = documents[0] if documents else None
            if reset_every_token:
                segments = torch.arange(x.shape[1], device=device).expand_as(x)
            with amp_context:
                loss, count = next_token_loss(model, x, y, segment_ids=segments)
            total += loss.double()
            tokens += count
    finally:
        model.train(was_training)
    return float(total) / max(1, int(tokens)), int(tokens)

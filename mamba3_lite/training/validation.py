"""Loss over a validation split, without any influence on training."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.data import DataLoader

from mamba3_lite.data.dataset import WindowDataset
from mamba3_lite.distributed.world import World
from mamba3_lite.training.losses import next_token_loss


class EvaluationStopped(Exception):
    """The caller asked for an end before the last window."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: WindowDataset,
    *,
    batch_size: int,
    world: World,
    amp_context: AbstractContextManager,
    max_batches: int = 0,
    reset_every_token: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[float, int]:
    """(mean loss in nat per token, number of counted tokens) over all windows and ranks.

    Items of the dataset are (x, y), or (x, y, segment_ids) to reset the state between documents.
    Ranks share the windows; each makes as many forward passes as the others, since a pass of a
    sharded model needs all of them, and what has no window left does not count.

    Args:
        model: what :func:`mamba3_lite.training.losses.next_token_loss` takes.
        max_batches: stop after so many micro-batches of each rank; 0 takes all.
        reset_every_token: makes every token a document of its own, so that the model sees no
            context but the current token: the difference tells what the recurrent state is worth.
        should_stop: asked before each micro-batch; one rank is enough.

    Raises:
        EvaluationStopped: ``should_stop`` said so.
    """
    was_training, device = model.training, world.device
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    shares = list(itertools.islice(_shares(len(dataset), batch_size, world), max_batches or None))
    try:
        loader = DataLoader(dataset, batch_sampler=[list(share) or [0] for share in shares])
        for share, batch in zip(shares, loader, strict=True):
            if world.largest(should_stop()):
                raise EvaluationStopped
            x, y, *documents = (part.to(device) for part in batch)
            segments = documents[0] if documents else None
            if reset_every_token:
                segments = torch.arange(x.shape[1], device=device).expand_as(x)
            with amp_context:
                loss, count = next_token_loss(model, x, y, segment_ids=segments)
            if share:
                sums += torch.stack((loss.double(), count.double()))
    finally:
        model.train(was_training)
    total, tokens = world.sum_(sums).tolist()
    return total / max(1, tokens), int(tokens)


def _shares(n_windows: int, batch_size: int, world: World) -> Iterator[range]:
    """The windows of each of this rank's micro-batches, the last ones maybe none."""
    for start in range(0, n_windows, world.size * batch_size):
        mine = start + world.rank * batch_size
        yield range(mine, max(mine, min(mine + batch_size, n_windows)))

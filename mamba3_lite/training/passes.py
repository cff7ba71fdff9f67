"""The two passes of a micro-step: plain, or recorded once as CUDA graphs and replayed.

A micro-step is thousands of launches from Python. Where the micro-batch is small they take longer
than the work itself; a replay is one launch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.losses import next_token_loss

RECORDING_MODE = "reduce-overhead"

# (summed loss, number of counted tokens), both 0-d.
LossAndCount = tuple[Tensor, Tensor]
# What replays, and what it then writes into.
Recorded = tuple[Callable[[], None], LossAndCount]
# Runs something without effect and gives its recording.
Record = Callable[[Callable[[], LossAndCount]], Recorded]


def forward_backward(
    model: nn.Module, amp_context: AbstractContextManager, divisor: int, batch: Sequence[Tensor]
) -> LossAndCount:
    """Adds the gradients of the summed loss over ``divisor`` to those that are there.

    Args:
        batch: tokens and targets (B, T), and segment ids (B, T) where documents matter.
    """
    tokens, targets, *segments = batch
    with amp_context:
        loss_sum, count = next_token_loss(
            model, tokens, targets, segment_ids=segments[0] if segments else None
        )
    (loss_sum / divisor).backward()
    return loss_sum.detach(), count


class Recording:
    """:func:`forward_backward` for batches of one shape, recorded when first met and replayed.

    There are two graphs, since the first micro-step of a window writes the gradients and the later
    ones add to them; the tensors of the gradients are always the same ones. A batch of another
    shape runs plainly, and so does everything once something turned out not to be recordable.

    Args:
        record: how to record; for tests on a CPU.

    Attributes:
        problem: why passes cannot be recorded, once that is known.
    """

    def __init__(
        self, model: nn.Module, amp_context: AbstractContextManager, *, record: Record | None = None
    ):
        self._model, self._amp = model, amp_context
        self._record = record or CudaRecorder()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._shape: list[object] = []
        self._batch: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._graphs: dict[bool, Recorded] = {}
        self.problem: str | None = None

    def __call__(self, divisor: int, batch: Sequence[Tensor]) -> LossAndCount:
        first = all(p.grad is None for p in self._parameters)
        recorded = None
        if self.problem is None:
            recorded = self._recorded(first, divisor, batch)
        if recorded is None:
            return forward_backward(self._model, self._amp, divisor, batch)
        if first:
            self._put(self._gradients)
        replay, (loss_sum, count) = recorded
        replay()
        # The next replay overwrites its own results.
        return loss_sum.clone(), count.clone()

    def _recorded(self, first: bool, divisor: int, batch: Sequence[Tensor]) -> Recorded | None:
        """What takes this batch, which it then holds; None: the batch has to run plainly."""
        shape = [divisor, *((t.shape, t.dtype) for t in batch)]
        if not self._shape:
            self._shape = shape
            self._batch = [t.clone(memory_format=torch.contiguous_format) for t in batch]
        if shape != self._shape or not (first or (self._gradients and self._ours())):
            return None
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        if first not in self._graphs:
            self._add(first, divisor)
        return self._graphs.get(first)

    def _ours(self) -> bool:
        gradients = zip(self._parameters, self._gradients, strict=True)
        return all(parameter.grad is gradient for parameter, gradient in gradients)

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _add(self, first: bool, divisor: int) -> None:
        def run() -> LossAndCount:
            return forward_backward(self._model, self._amp, divisor, self._batch)

        kept = [p.grad for p in self._parameters]
        # Whatever compiles, tests or chooses itself on its first call does so now.
        self._put([None if g is None else torch.zeros_like(g) for g in kept])
        run()
        self._put(kept)
        try:
            self._graphs[first] = self._record(run)
        except RuntimeError as problem:
            self._put(kept)
            # The end of a recording that failed fails as well; what came before says why.
            self.problem = str(problem.__context__ or problem).strip().partition("\n")[0]
            print(f"[warn] micro-steps are not recorded, and run plainly: {self.problem}")
            return
        if first:
            self._gradients = [p.grad for p in self._parameters]


def recording_for(
    model: nn.Module, config: TrainingConfig, amp_context: AbstractContextManager, world: World
) -> Recording | None:
    """A recording of its own, or None where nothing is to be recorded."""
    return Recording(model, amp_context) if is_recorded(config, world) else None


def is_recorded(config: TrainingConfig, world: World) -> bool:
    """Whether ``compile_mode: reduce-overhead`` is in effect: on a GPU, and not over ranks.

    Their exchanges are not recorded.
    """
    asked = config.compile_model and config.compile_mode == RECORDING_MODE
    return asked and world.device.type == "cuda" and not world.grouped


def insist(recording: Recording | None) -> None:
    """``UserError`` where passes that were to be recorded ran plainly: measurements refuse them."""
    if recording is not None and recording.problem is not None:
        raise UserError(
            f"micro-steps were to be recorded, but ran plainly ({recording.problem}): no result; "
            "training.compile_mode=default asks for no recording."
        )


class CudaRecorder:
    """Records CUDA graphs that share their memory: no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], LossAndCount]) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # What the run before has left would be there twice.
        torch.cuda.empty_cache()
        here = torch.cuda.current_stream()
        try:
            # Of this thread only: another one pins the memory of the next batches meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = run()
        except RuntimeError:
            torch.cuda.set_stream(here)  # the end of a recording that failed does not come to that
            raise
        return graph.replay, results

"""Who trains together, and the few things on which the processes have to agree.

Every decision of a run (to stop, to drop a window, to go back) is taken by all ranks alike: one of
them alone in a collective operation would wait for the others until the time limit. torchrun starts
the processes and says who is who.
"""

import datetime
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.errors import UserError


class World:
    """The ranks of a run, or a process alone: then nothing here communicates.

    Attributes:
        rank, size: which of how many.
        local_size: processes on this host.
        device: where this rank computes.
        grouped: whether there is a process group, which torchrun makes even for one rank.
        waited_sec: time this rank has waited for others in :meth:`largest`.
    """

    def __init__(
        self, device: torch.device, *, rank: int = 0, size: int = 1, local_size: int = 1,
        grouped: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.rank, self.size, self.local_size = device, rank, size, local_size
        self.grouped = grouped
        self.waited_sec = 0.0

    @classmethod
    def alone(cls) -> "World":
        """One process, on the CUDA device if there is one."""
        return cls(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def leads(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over the ranks, in place, without making the host wait for a GPU."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: int) -> int:
        """Of one number a rank: how ranks agree on a flag or an exit code."""
        if self.size == 1:
            return value
        start = time.perf_counter()
        number = torch.tensor(value)  # on the host: no GPU is waited for
        dist.all_reduce(number, dist.ReduceOp.MAX)
        self.waited_sec += time.perf_counter() - start
        return int(number)

    def gather(self, value: Any) -> list[Any]:
        """What each rank says (anything that can be pickled), on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_leader(self, value: Any) -> Any:
        """What the leader says; the others' own value does not count."""
        return self.gather(value)[0]

    @contextmanager
    def same_fate(self) -> Iterator[None]:
        """What a ``UserError`` forbids one rank, none goes on with.

        Every rank must get here. The leader raises what it was, naming the ranks when it was not
        all of them; the others end quietly with the same exit code.
        """
        problem = None
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            problem = str(error)
        by_problem: dict[str, list[int]] = {}
        for rank, said in enumerate(self.gather(problem)):
            if said is not None:
                by_problem.setdefault(said, []).append(rank)
        if not by_problem:
            return
        if not self.leads:
            raise SystemExit(2)
        raise UserError(
            " ".join(
                text if len(ranks) == self.size else f"{text} (rank {', '.join(map(str, ranks))})"
                for text, ranks in by_problem.items()
            )
        )


@contextmanager
def join_world(timeout_sec: float) -> Iterator[World]:
    """The world that torchrun has started this process in, or the process alone.

    Args:
        timeout_sec: a collective operation that takes longer ends the run.

    Raises:
        UserError: torchrun's variables make no sense, or there are more ranks than GPUs.
    """
    if not env.is_set("WORLD_SIZE"):
        yield World.alone()
        return
    local_rank, local_size = env.read_int("LOCAL_RANK"), env.read_int("LOCAL_WORLD_SIZE")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_size > torch.cuda.device_count():
            raise UserError(
                f"{local_size} processes on a host with {torch.cuda.device_count()} GPUs; start "
                "one a GPU (torchrun --nproc_per_node)."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_sec),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield World(
            device, rank=dist.get_rank(), size=dist.get_world_size(), local_size=local_size,
            grouped=True,
        )  # fmt: skip
    finally:
        # DDP's reducer, if it were the group's last owner when Python ends, would wait for Gloo's
        # threads with the interpreter's lock held, for which such a thread may wait: a hang.
        gc.collect()
        dist.destroy_process_group()

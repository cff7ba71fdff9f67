"""The data of a run, opened: training windows, their order, validation windows."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mamba3_lite.data.dataset import DummyDataset, PretrainDataset
from mamba3_lite.data.loader import SampleOrder
from mamba3_lite.training.config import TrainingConfig


class RunData(NamedTuple):
    """``validation`` is None where the configuration names none."""

    train: PretrainDataset | DummyDataset
    order: SampleOrder
    validation: PretrainDataset | None


def open_data(config: TrainingConfig, *, stand_in: int, log: Callable[[str], None]) -> RunData:
    """Opens what a configuration names.

    Args:
        stand_in: so many windows of random tokens take the place of training data that do not
            exist, and validation data that do not are left out, each with a line to ``log``; 0:
            both are errors.

    Raises:
        UserError: data that the run cannot read.
    """
    path, val_path = config.data_path, config.val_data_path
    shape, documents = (config.max_seq_len, config.vocab_size), config.document_mode
    masked, tokenizer = config.mask_boundary_targets, config.data.tokenizer
    rules = {"document_mode": documents, "mask_boundary_targets": masked}
    train: PretrainDataset | DummyDataset
    if stand_in and not Path(path).exists():
        log(f"[dry-run] {path} does not exist: random tokens instead")
        train = DummyDataset(stand_in, *shape, config.seed, document_mode=documents)
    else:
        train = PretrainDataset(path, *shape, **rules, tokenizer=tokenizer)
    order = SampleOrder(train.n_windows, config.data_order, config.seed)
    validation = None
    if val_path and stand_in and not Path(val_path).exists():
        log(f"[dry-run] {val_path} does not exist: no validation")
    elif val_path:
        validation = PretrainDataset(val_path, *shape, **rules, tokenizer=tokenizer)
    return RunData(train, order, validation)

"""How a run starts: where a checkpoint of its own left off, or from weights that it is given."""

import dataclasses
from collections.abc import Callable
from typing import Any

from mamba3_lite.errors import UserError
from mamba3_lite.models.pretrained import fill, read_weights
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.config import _FREE_MODEL_FIELDS, TrainingConfig, check_resume
from mamba3_lite.utils.checkpoint import Checkpoint


def may_go_on(
    checkpoint: Checkpoint, config: TrainingConfig, data_fingerprint: str, *, ranks: int
) -> list[str]:
    """One sentence for each thing to know about a run that ``ranks`` go on with.

    Raises:
        UserError: it holds no run, or one that this configuration or these data do not continue.
    """
    meta = checkpoint.meta
    if "config" not in meta:
        raise UserError(
            f"{config.checkpoint_dir} holds imported weights and no run to go on with; start one "
            f"from them in another training.save_dir: --init-from {config.checkpoint_dir}"
        )
    notes = check_resume(meta["config"], config, ranks=(meta.get("ranks", 1), ranks))
    if meta["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"{config.data_path} does not hold the data that {config.checkpoint_dir} was trained "
            "on; point data.train_data_path at it, or start in a new training.save_dir."
        )
    if config.init_from:
        notes.append(f"resuming: the weights of {config.init_from} were its start, not read again")
    return notes


def start_from(
    model: Mamba3Transformer, source: str, *, log: Callable[[str], None]
) -> dict[str, Any]:
    """Fills ``model`` with trained weights and nothing else of their run.

    Returns:
        For the run's metadata: ``source``, ``file``, ``opt_step``, and the file's ``sha256``.

    Raises:
        UserError: nothing usable at ``source``, or a model that differs in more than how it is
            computed, with each field and both values.
    """
    weights = read_weights(source, log=log)
    old, new = dataclasses.asdict(weights.model), dataclasses.asdict(model.cfg)
    differences = [
        f"model.{name}: {old[name]!r} there, {value!r} here"
        for name, value in new.items()
        if old[name] != value and name not in (*_FREE_MODEL_FIELDS, "max_seq_len")
    ]
    if differences:
        raise UserError(
            f"--init-from {source}: another model: {'; '.join(differences)}. Set the model section "
            "to what is there, or choose other weights."
        )
    fill(model, weights)
    step, digest = weights.opt_step, weights.sha256()
    log(
        f"weights from {weights.file} (opt_step {step}, SHA-256 {digest[:12]}); optimizer, "
        "schedule and data begin anew"
    )
    file = str(weights.file.resolve())
    return {"source": source, "file": file, "opt_step": step, "sha256": digest}

"""TrainingConfig: every knob of a run, how a YAML fills it, and which ones may change on resume."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.models.ssd_backends import DISPATCH_NAMES
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.schema import ResolvedConfig, Sections, keys_of, named, nearest, read_config

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DATA_ORDERS = ("sequential", "shuffled")
_WARPS = (1, 2, 4, 8, 16, 32)


def _knob(default: Any, text: str, *, resume: str = "free") -> Any:
    """A field with its one sentence; ``resume``: a change is free, safe or refused on resume."""
    return field(default=default, metadata={"help": text, "resume": resume})


@dataclass
class DataConfig:
    """What ``prepare`` reads of the YAML's ``data:`` section."""

    tokenizer: str = _knob("gpt2", "gpt2, or the path of a tokenizer.json")
    shard_size_tokens: int = _knob(50_000_000, "tokens a shard holds")
    max_tokens: int = _knob(0, "token budget of the prepared data; 0 takes all")
    data_mix: str = _knob("", "name of the mix in configs/data")


@dataclass
class TrainingConfig:
    """One run. Steps are optimizer steps, except where the name says micro-steps."""

    model_config: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "fields of ModelConfig", "resume": "refused"}
    )
    data_path: str = _knob("data/pretrain_data.bin", "training data: file or folder of shards")
    checkpoint_dir: str = _knob("checkpoints/pretrain", "the run folder")
    vocab_size: int = _knob(50257, "size of the vocabulary", resume="refused")
    max_seq_len: int = _knob(2048, "tokens of a training window", resume="refused")
    batch_size: int = _knob(16, "sequences of a micro-step", resume="safe")
    gradient_accumulation_steps: int = _knob(2, "micro-steps of an optimizer step", resume="safe")
    max_steps: int = _knob(256_000, "optimizer steps of the run")
    warmup_steps: int = _knob(2000, "optimizer steps of linear warm-up")
    lr: float = _knob(3e-4, "peak learning rate")
    min_lr_ratio: float = _knob(0.05, "floor of the cosine, as a share of lr")
    weight_decay: float = _knob(0.1, "AdamW decay of parameters with two or more dimensions")
    beta1: float = _knob(0.9, "AdamW first-moment decay")
    beta2: float = _knob(0.95, "AdamW second-moment decay")
    max_grad_norm: float = _knob(1.0, "gradients are clipped to this global norm")
    grad_checkpoint: bool | str = _knob(
        True, "recompute each block in the backward pass, or of each only what is cheap: selective"
    )
    compile_model: bool = _knob(True, "torch.compile the blocks")
    compile_mode: str = _knob("max-autotune", "mode of torch.compile")
    save_every: int = _knob(4000, "optimizer steps between checkpoints")
    log_every: int = _knob(50, "micro-steps between log lines")
    nan_guard: bool = _knob(True, "drop windows with a non-finite loss or gradient norm")
    nan_guard_max_consecutive: int = _knob(5, "dropped windows in a row before a rollback")
    # Ours, appended.
    seed: int = _knob(0, "seed of the initial weights and of the data order", resume="refused")
    data_order: str = _knob("sequential", "sequential, or shuffled once an epoch", resume="refused")
    num_workers: int = _knob(0, "processes that read data ahead")
    val_data_path: str = _knob("", "validation data; empty: none")
    eval_interval: int = _knob(0, "optimizer steps between validations; 0: only at the end")
    eval_batches: int = _knob(0, "micro-batches of a validation; 0: all")
    keep_last: int = _knob(3, "newest checkpoints to keep; 0: all")
    keep_every: int = _knob(0, "also keep each checkpoint at a multiple of this; 0: none")
    max_time_sec: float = _knob(0.0, "save and stop after this many seconds; 0: no limit")
    max_rollbacks: int = _knob(3, "rollbacks without progress before the run gives up")
    tensorboard: bool = _knob(True, "write TensorBoard files when the package is there")
    document_mode: bool = _knob(False, "reset the state at document boundaries")
    mask_boundary_targets: bool = _knob(
        False, "do not train on the target that crosses a document boundary"
    )
    init_from: str = _knob(
        "", "run folder, checkpoint or export whose weights the run starts from; empty: random",
        resume="refused",
    )  # fmt: skip
    checkpoint_format: str = _knob(
        "files", "files: three, by one rank; sharded: a part by each rank, while training goes on"
    )
    parallel_mode: str = _knob("auto", "how ranks share the model: auto, ddp, fsdp or hsdp")
    shard_ranks: int = _knob(0, "ranks that share one copy under hsdp; 0: those of a host")
    rank_timeout_sec: float = _knob(600.0, "a rank that others wait for so long ends the run")
    watchdog_sec: float = _knob(1800.0, "a rank in which nothing ends for so long is ended; 0: off")
    data: DataConfig = field(
        default_factory=DataConfig, metadata={"help": "what prepare reads", "resume": "free"}
    )

    @property
    def tokens_per_micro_step(self) -> int:
        """Tokens of one forward and backward pass."""
        return self.batch_size * self.max_seq_len

    @property
    def samples_per_step(self) -> int:
        """Windows an optimizer step consumes."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step consumes."""
        return self.tokens_per_micro_step * self.gradient_accumulation_steps

    @property
    def total_tokens(self) -> int:
        """Token exposures of the whole run."""
        return self.tokens_per_step * self.max_steps

    def model(self) -> ModelConfig:
        """The model of this run; where its section lacks grad_checkpoint, the trainer's counts."""
        given = {"vocab_size": self.vocab_size, "max_seq_len": self.max_seq_len}
        return ModelConfig(
            **{"grad_checkpoint": self.grad_checkpoint, **self.model_config, **given}
        )


TrainConfig = TrainingConfig

CHECKPOINT_FORMATS = ("files", "sharded")
PARALLEL_MODES = ("auto", "ddp", "fsdp", "hsdp")
_PARALLEL_FIELDS = ("parallel_mode", "shard_ranks", "rank_timeout_sec", "watchdog_sec")

_RENAMED = {
    "batch_size": "micro_batch_size",
    "max_steps": "total_steps",
    "max_grad_norm": "grad_clip",
    "save_every": "save_interval",
    "log_every": "log_interval",
    "checkpoint_dir": "save_dir",
    "compile_model": "compile",
    "data_path": "train_data_path",
    "data_order": "order",
    "parallel_mode": "mode",
    "rank_timeout_sec": "timeout_sec",
}
_DATA_FIELDS = (
    "data_path", "val_data_path", "data_order", "num_workers", "document_mode",
    "mask_boundary_targets",
)  # fmt: skip

SECTIONS: Sections = {
    "model": keys_of("model", ModelConfig),
    "training": keys_of(
        "training",
        TrainingConfig,
        exclude=(
            "model_config",
            "vocab_size",
            "max_seq_len",
            "data",
            *_DATA_FIELDS,
            *_PARALLEL_FIELDS,
        ),
        rename=_RENAMED,
    ),
    "data": {
        **keys_of("data", DataConfig),
        **keys_of("training", TrainingConfig, only=_DATA_FIELDS, rename=_RENAMED),
    },
    "parallel": keys_of("training", TrainingConfig, only=_PARALLEL_FIELDS, rename=_RENAMED),
}


def yaml_key(name: str) -> str:
    """How a YAML spells a field of TrainingConfig, as ``section.key``."""
    if name in ("vocab_size", "max_seq_len"):
        return f"model.{name}"
    section = "data" if name in _DATA_FIELDS else "training"
    if name in _PARALLEL_FIELDS:
        section = "parallel"
    return f"{section}.{_RENAMED.get(name, name)}"


def load_training_config(
    path: str | Path | None, overrides: list[str] | None = None
) -> tuple[TrainingConfig, dict[str, str]]:
    """Reads, types and validates a configuration.

    Returns:
        The configuration, and the source of each ``section.key`` that is not a default.

    Raises:
        UserError: every problem, in one message.
    """
    mode = env.read("TORCH_COMPILE_MODE")
    resolved = read_config(
        path,
        SECTIONS,
        environment={"TORCH_COMPILE_MODE": ("training.compile_mode", mode)} if mode else {},
        overrides=overrides or [],
        check=lambda resolved: problems_of(config_from_values(resolved), resolved.sources),
    )
    return config_from_values(resolved), resolved.sources


def config_from_values(resolved: ResolvedConfig) -> TrainingConfig:
    """Typed values where they belong; the model's vocab_size and max_seq_len are the trainer's."""
    model = resolved.values.get("model", {})
    shared = {name: model[name] for name in ("vocab_size", "max_seq_len") if name in model}
    return TrainingConfig(
        model_config=dict(model),
        data=DataConfig(**resolved.values.get("data", {})),
        **shared,
        **resolved.values.get("training", {}),
    )


def validate(config: TrainingConfig) -> None:
    """Ranges and relations of every knob; ``UserError`` with all problems in one message."""
    problems = problems_of(config, {})
    if problems:
        raise UserError("; ".join(problems) + ".")


def problems_of(config: TrainingConfig, sources: Mapping[str, str]) -> list[str]:
    """What is wrong with the values of a configuration, one sentence each.

    Args:
        sources: where each ``section.key`` came from, for the sentences.
    """
    problems = []

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            where = named(yaml_key(name), sources)
            problems.append(f"{where} must be {rule}, got {getattr(config, name)!r}")

    for name in (
        "batch_size", "gradient_accumulation_steps", "max_steps", "save_every", "log_every",
        "nan_guard_max_consecutive",
    ):  # fmt: skip
        need(getattr(config, name) >= 1, name, "at least 1")
    for name in (
        "warmup_steps", "num_workers", "eval_interval", "eval_batches", "keep_last", "keep_every",
        "max_time_sec", "max_rollbacks", "shard_ranks", "watchdog_sec",
    ):  # fmt: skip
        need(getattr(config, name) >= 0, name, "0 or more")
    for name in ("data_path", "checkpoint_dir"):
        need(bool(getattr(config, name)), name, "a path")
    need(0 <= config.seed < 2**63, "seed", "between 0 and 2^63 - 1")
    need(0 < config.lr < math.inf, "lr", "a positive number")
    need(0 <= config.weight_decay < math.inf, "weight_decay", "0 or a positive number")
    need(config.max_grad_norm > 0, "max_grad_norm", "positive")
    need(0 <= config.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1")
    for name in ("beta1", "beta2"):
        need(0 <= getattr(config, name) < 1, name, "at least 0 and below 1")
    limit = f"below {named('training.total_steps', sources)} ({config.max_steps})"
    need(config.warmup_steps < config.max_steps, "warmup_steps", limit)
    need(config.rank_timeout_sec > 0, "rank_timeout_sec", "positive")
    for name, names in (
        ("data_order", DATA_ORDERS), ("compile_mode", COMPILE_MODES),
        ("parallel_mode", PARALLEL_MODES), ("checkpoint_format", CHECKPOINT_FORMATS),
    ):  # fmt: skip
        value = getattr(config, name)
        need(value in names, name, f"one of {', '.join(names)}{nearest(value, names)}")
    known = isinstance(config.grad_checkpoint, bool) or config.grad_checkpoint == "selective"
    need(known, "grad_checkpoint", "true, false or selective")
    if config.eval_interval and not config.val_data_path:
        problems.append(f"{named('training.eval_interval', sources)} needs data.val_data_path")
    return problems + _model_problems(config, sources) + _data_problems(config.data, sources)


def _model_problems(config: TrainingConfig, sources: Mapping[str, str]) -> list[str]:
    try:
        # The trainer's own grad_checkpoint has been judged under its own name.
        model = dataclasses.replace(config, grad_checkpoint=False).model()
    except UserError as problem:
        return [str(problem).rstrip(".")]
    if model.ssd_dispatch not in DISPATCH_NAMES:
        return [
            f"{named('model.ssd_dispatch', sources)} must be one of {', '.join(DISPATCH_NAMES)}, "
            f"got {model.ssd_dispatch!r}{nearest(model.ssd_dispatch, DISPATCH_NAMES)}"
        ]
    if model.ssd_dispatch == "triton" and env.read("ENABLE_TRITON_KERNELS") == "1":
        return _launch_knob_problems()
    return []


def _launch_knob_problems() -> list[str]:
    """The kernel reads its knobs at its first launch, when the run folder is made already."""
    problems = []
    for name, rule, fits in (
        ("TRITON_PER_CHUNK_NUM_WARPS", "a power of two up to 32", lambda n: n in _WARPS),
        ("TRITON_PER_CHUNK_NUM_STAGES", "at least 1", lambda n: n >= 1),
    ):
        try:
            value = env.read_int(name)
        except UserError as problem:
            problems.append(str(problem))
        else:
            if not fits(value):
                problems.append(f"environment variable {name} must be {rule}, got {value}")
    return problems


def _data_problems(data: DataConfig, sources: Mapping[str, str]) -> list[str]:
    return [
        f"{named(f'data.{name}', sources)} must be at least {least}, got {getattr(data, name)}"
        for name, least in (("shard_size_tokens", 1), ("max_tokens", 0))
        if getattr(data, name) < least
    ]


# These choose how the model is computed, not what it is.
_FREE_MODEL_FIELDS = ("chunk_size", "ssd_dispatch", "grad_checkpoint", "init_std")


def check_resume(
    saved: dict[str, Any], config: TrainingConfig, *, ranks: tuple[int, int] = (1, 1)
) -> list[str]:
    """Compares the present configuration with the one that a checkpoint was made with.

    Free knobs may change and are reported; batch geometry may change at equal tokens per optimizer
    step; what fixes the model or the data stream may not.

    Args:
        saved: ``dataclasses.asdict`` of the checkpoint's ``TrainingConfig``; a field that it lacks
            was added later and had its default.
        ranks: that trained then, and that do now.

    Returns:
        One sentence for each change that takes effect.

    Raises:
        UserError: a refused change, naming each key with both values.
    """
    notes: list[str] = []
    refused: list[str] = []
    was = TrainingConfig(**{**saved, "data": DataConfig(**saved["data"])})
    for f in dataclasses.fields(TrainingConfig):
        old, new = getattr(was, f.name), getattr(config, f.name)
        if f.name in ("model_config", "data") or old == new:
            continue
        change = f"{yaml_key(f.name)}: {old!r} -> {new!r}"
        (refused if f.metadata["resume"] == "refused" else notes).append(change)
    old_model, new_model = dataclasses.asdict(was.model()), dataclasses.asdict(config.model())
    for name, value in new_model.items():
        if old_model[name] != value and name not in ("vocab_size", "max_seq_len"):
            change = f"model.{name}: {old_model[name]!r} -> {value!r}"
            (notes if name in _FREE_MODEL_FIELDS else refused).append(change)
    if ranks[0] != ranks[1]:
        notes.append(f"ranks: {ranks[0]} -> {ranks[1]}")
    sequences = ranks[0] * was.samples_per_step, ranks[1] * config.samples_per_step
    if sequences[0] != sequences[1]:
        refused.append(
            "sequences of an optimizer step (ranks x training.micro_batch_size x "
            f"gradient_accumulation_steps): {sequences[0]} -> {sequences[1]}"
        )
    if refused:
        raise UserError(
            f"Cannot resume from {config.checkpoint_dir} with a changed {'; '.join(refused)}. "
            "Set it back, or start in a new training.save_dir."
        )
    return notes

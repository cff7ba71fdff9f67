"""The arms of a comparison: configurations that differ in one key, checked, and nothing else."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.schema import find_config
from mamba3_lite.training.config import TrainingConfig, load_training_config, validate, yaml_key

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# The two may change together: their product, the sequences of an optimizer step, stays.
GEOMETRY = ("training.micro_batch_size", "training.gradient_accumulation_steps")
LAUNCH_KNOBS = ("TRITON_PER_CHUNK_NUM_STAGES", "TRITON_PER_CHUNK_NUM_WARPS")
_VARIABLES = "environment."
# These choose how a model is computed, not what it learns: a loss that moves is a mistake.
THROUGHPUT_KNOBS = (
    "training.compile", "training.compile_mode", "training.grad_checkpoint", "data.num_workers",
    "model.ssd_dispatch", "model.chunk_size", " x ".join(GEOMETRY),
    *(_VARIABLES + name for name in LAUNCH_KNOBS),
)  # fmt: skip
# What the comparison sets in every arm: field of TrainingConfig, and the option that speaks for it.
_OWN = {
    "max_steps": "--opt-steps", "log_every": "--row-opt-steps", "checkpoint_dir": "--out",
    "save_every": "", "eval_interval": "", "val_data_path": "", "max_time_sec": "",
    "tensorboard": "",
}  # fmt: skip
# Arms on other data or another seed have losses that cannot be compared.
_SHARED = ("data.train_data_path", "training.seed")
_WARM_UP_SHARE = 3  # of the timed micro-steps, one in so many is run before them


@dataclass(frozen=True)
class Protocol:
    """How long each run is and which of its log rows count. A row covers ``row_opt_steps``."""

    throughput: bool
    opt_steps: int
    drop_opt_steps: int
    loss_at: int
    last_rows: int
    row_opt_steps: int

    def __post_init__(self) -> None:
        usable = (self.opt_steps - self.drop_opt_steps) // self.row_opt_steps
        if usable < 2:
            raise UserError(
                f"{self.opt_steps} optimizer steps without the first {self.drop_opt_steps} hold "
                f"{max(0, usable)} log rows of {self.row_opt_steps}, and two are needed: raise "
                "--opt-steps, or lower --drop or --row-opt-steps."
            )
        if not 2 * self.row_opt_steps <= self.loss_at <= self.opt_steps:
            raise UserError(
                f"--loss-at must leave two log rows of {self.row_opt_steps} before it and be at "
                f"most --opt-steps ({self.opt_steps}), got {self.loss_at}."
            )

    @classmethod
    def timed(cls, micro_steps: int, accumulation: int) -> "Protocol":
        """Throughput only: so many timed micro-steps, at least, after a third of that as warm-up.

        Args:
            accumulation: the smallest of the arms, so that all train on the same tokens.
        """
        row = max(1, 5 // accumulation)
        timed = row * max(4, math.ceil(micro_steps / (accumulation * row)))
        warm_up = row * math.ceil(micro_steps / (_WARM_UP_SHARE * accumulation * row))
        whole = warm_up + timed
        return cls(True, whole, warm_up, whole, timed // row, row)

    @property
    def loss_name(self) -> str:
        """What the verdict calls the loss that is compared."""
        return "loss" if self.throughput else f"loss@{self.loss_at}"


@dataclass(frozen=True)
class Arm:
    """One configuration: a letter, what its key is set to, and every ``section.key`` of it."""

    name: str
    value: str
    config: TrainingConfig
    settings: dict[str, Any]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its runs."""
        given = self.settings.items()
        return {k.removeprefix(_VARIABLES): v for k, v in given if k.startswith(_VARIABLES)}

    def write_yaml(self, path: Path, *, seed: int) -> None:
        """The complete configuration of one run, whose folder is that of the file."""
        own = {"training.seed": seed, "training.save_dir": str(path.parent)}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in {**self.settings, **own}.items():
            section, _, name = key.partition(".")
            if not key.startswith(_VARIABLES):
                sections.setdefault(section, {})[name] = value
        path.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")


def settings_of(config: TrainingConfig, variables: Mapping[str, str]) -> dict[str, Any]:
    """Every ``section.key`` with its value in effect, and the kernel's launch variables."""
    model = dataclasses.asdict(config.model())
    found: dict[str, Any] = {}
    for f in dataclasses.fields(TrainingConfig):
        if f.name not in ("model_config", "data"):
            found[yaml_key(f.name)] = getattr(config, f.name)
    # The model's own grad_checkpoint wins over the trainer's, and what counts is the outcome.
    found["training.grad_checkpoint"] = model.pop("grad_checkpoint")
    found |= {f"model.{name}": model[name] for name in model if f"model.{name}" not in found}
    found |= {f"data.{name}": value for name, value in dataclasses.asdict(config.data).items()}
    return found | {_VARIABLES + name: variables.get(name, env.read(name)) for name in LAUNCH_KNOBS}


def split_sweep(overrides: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Tells settings for all arms from the swept ones, ``section.key=v1,v2``.

    Returns:
        Settings for all; and for each arm its own (none where nothing is swept).
    """
    common, swept = [], []
    own = {yaml_key(field): option for field, option in _OWN.items()}
    for override in overrides:
        key, _, text = override.partition("=")
        if key in own:
            hint = f"use {own[key]}" if own[key] else "leave it out"
            raise UserError(f"{key} is set by ab itself in every arm; {hint}.")
        values = text.split(",")
        if len(values) == 1:
            common.append(override)
        elif not all(values):
            raise UserError(f"{override!r} has an empty value; name each, such as {key}=1,2.")
        else:
            swept.append([f"{key}={value}" for value in values])
    if len({len(one) for one in swept}) > 1 or len(swept) > 2:
        raise UserError(
            "arms differ in one key, so sweep one (section.key=v1,v2); or both of "
            f"{' and '.join(GEOMETRY)}, with as many values each."
        )
    return common, [list(one) for one in zip(*swept, strict=True)]


def load_arms(
    configs: Sequence[str], overrides: Sequence[str], *, identical: bool, opt_steps: int | None
) -> list[tuple[TrainingConfig, dict[str, str]]]:
    """Configuration and launch variables of each arm.

    They come from several files, or from one file and a sweep; ``identical`` takes one file twice.
    ``opt_steps`` is the length of the runs, which a warm-up has to fit into; None: the files'.
    """
    common, sweep = split_sweep(overrides)
    if opt_steps is not None:
        common.append(f"training.total_steps={opt_steps}")
    if identical and (sweep or len(configs) != 1):
        raise UserError("--aa compares one configuration with itself: one --config, nothing swept.")
    if sweep and len(configs) != 1:
        raise UserError("give several --config files or a sweep (section.key=v1,v2), not both.")
    if len(configs) == 1:
        sweep = [[], []] if identical else sweep
        plans = [(configs[0], one) for one in sweep]
    else:
        plans = [(path, []) for path in configs]
    if not 2 <= len(plans) <= len(NAMES):
        raise UserError(
            f"a comparison has 2 to {len(NAMES)} arms, got {max(1, len(plans))}: sweep a key "
            "(model.chunk_size=64,128) or give --config several times."
        )
    found = []
    for path, own in plans:
        given = [*common, *own]
        variables = dict(one.split("=", 1) for one in given if one.split("=")[0] in LAUNCH_KNOBS)
        plain = [one for one in given if one.split("=")[0] not in LAUNCH_KNOBS]
        found.append((load_training_config(find_config(path), plain)[0], variables))
    return found


def build_arms(
    loaded: Sequence[tuple[TrainingConfig, dict[str, str]]], protocol: Protocol, *, identical: bool
) -> tuple[str, list[Arm]]:
    """The key in which the arms differ ("" for identical ones), and the arms.

    Raises:
        UserError: they differ in no key, in several (all are named), or in one that must be shared.
    """
    raw = [settings_of(*one) for one in loaded]
    keys = () if identical else differing_keys(raw)
    values = [" x ".join(_shown(one[k]) for k in keys) or "the same" for one in raw]
    arms = []
    for name, value, (config, variables) in zip(NAMES, values, loaded, strict=False):
        config = _under(protocol, config)
        validate(config)
        arms.append(Arm(name, value, config, settings_of(config, variables)))
        if any(arms[-1].settings[k] != raw[len(arms) - 1][k] for k in keys):
            raise UserError(f"{keys[0]} is set by --throughput itself; compare it without.")
    return " x ".join(keys), arms


def differing_keys(arms: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The one key, or the two of the batch geometry; ``UserError`` for anything else."""
    own = {yaml_key(field) for field in _OWN}
    keys = [k for k in arms[0] if k not in own and any(one[k] != arms[0][k] for one in arms)]
    for (i, one), (j, other) in itertools.combinations(enumerate(arms), 2):
        if all(one[k] == other[k] for k in keys):
            raise UserError(
                f"arms {NAMES[i]} and {NAMES[j]} do not differ in effect, and a comparison needs "
                "one key that does; the noise between equal arms is what --aa shows."
            )
    if set(keys) == set(GEOMETRY):
        if len({math.prod(one[k] for k in GEOMETRY) for one in arms}) == 1:
            return GEOMETRY
        raise UserError(
            f"arms may differ in {' and '.join(GEOMETRY)} together only at an equal product."
        )
    if len(keys) > 1:
        each = "; ".join(f"{k}: {' / '.join(_shown(one[k]) for one in arms)}" for k in keys)
        raise UserError(f"arms must differ in exactly one key, these differ in {len(keys)}: {each}")
    if keys[0] in _SHARED:
        raise UserError(
            f"arms must share {keys[0]}: losses on other data or another seed do not compare "
            "(each repeat has a seed of its own already)."
        )
    return tuple(keys)


def _under(protocol: Protocol, config: TrainingConfig) -> TrainingConfig:
    """The configuration with what the comparison sets in every arm."""
    changes: dict[str, Any] = {
        "max_steps": protocol.opt_steps,
        "log_every": protocol.row_opt_steps * config.gradient_accumulation_steps,
        "save_every": protocol.opt_steps,
        "eval_interval": 0,
        "val_data_path": "",
        "max_time_sec": 0.0,
        "tensorboard": False,
    }
    if protocol.throughput:
        # The configuration's warm-up is longer than the run; speed does not depend on it.
        changes["warmup_steps"] = protocol.opt_steps // 2
    return dataclasses.replace(config, **changes)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

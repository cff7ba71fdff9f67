"""What a run folder keeps of how the run was started: config.yaml and env.json."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from mamba3_lite import hardware
from mamba3_lite.training.config import TrainingConfig

CONFIG, ENVIRONMENT = "config.yaml", "env.json"


def write_run_record(run_dir: Path, config: TrainingConfig, sources: Mapping[str, str]) -> None:
    """Every value, the source of each that is not a default, and the machine; each file whole.

    Args:
        sources: by ``section.key``, as :func:`mamba3_lite.training.config.load_training_config`
            gives them.
    """
    values = dataclasses.asdict(config)
    values["model_config"] = dataclasses.asdict(config.model())
    resolved = {"config": values, "sources": dict(sources)}
    _write(run_dir / CONFIG, yaml.safe_dump(resolved, sort_keys=False))
    _write(run_dir / ENVIRONMENT, json.dumps(hardware.environment_record(), indent=2))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

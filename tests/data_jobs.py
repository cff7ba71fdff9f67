"""What the tests of `prepare` share: small sources, jobs over them, and what came out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mamba3_lite.data.clean import CleanConfig
from mamba3_lite.data.config import DedupConfig, PrepareConfig, PrepareJob
from mamba3_lite.data.prepare import prepare_job
from mamba3_lite.data.records import SourceConfig
from mamba3_lite.data.report import PrepareReport
from mamba3_lite.data.shards import open_shards
from mamba3_lite.data.tokenizer import load_tokenizer

EOS = 50256


def texts(name: str, count: int, *, seed: int = 0) -> list[str]:
    """Different documents of 3 to 40 words that name their source."""
    rng = np.random.default_rng([seed, len(name), *name.encode()])
    lengths = rng.integers(3, 40, size=count).tolist()
    words = [f"word{i}" for i in range(500)]
    return [
        f"{name} {i} " + " ".join(rng.choice(words, size=length))
        for i, length in enumerate(lengths)
    ]


def jsonl(path: Path, records: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    return path


def source(path: Path, weight: float = 1.0, **changes: Any) -> SourceConfig:
    """A source called like its file."""
    return SourceConfig(**{"name": path.stem, "weight": weight, "paths": (str(path),), **changes})


def job(out: Path, *sources: SourceConfig, **changes: Any) -> PrepareJob:
    """`changes` of the section prepare; no worker processes, no cleaning unless asked for."""
    sections = {name: changes.pop(name) for name in ("clean", "dedup") if name in changes}
    made = PrepareJob(
        prepare=PrepareConfig(out=str(out), workers=changes.pop("workers", 1), **changes),
        sources=sources,
        clean=CleanConfig(enabled=False),
        dedup=DedupConfig(),
    )
    return replace(made, **sections)


def run(made: PrepareJob, **options: Any) -> PrepareReport:
    quiet: dict[str, Any] = {"log": lambda message: None, "progress": False}
    report = prepare_job(made, **(quiet | options))
    assert report is not None
    return report


def tokens(folder: Path) -> np.ndarray:
    return np.concatenate([shard.tokens() for shard in open_shards(folder).shards])


def indexed_documents(folder: Path) -> list[tuple[str, str]]:
    """(source, text) of every document, by the index; each must end with its only EOS."""
    opened = open_shards(folder)
    ids = tokens(folder)
    names = [entry["name"] for entry in opened.manifest["sources"]]
    gpt2 = load_tokenizer("gpt2")
    found = []
    for part, number in zip(
        np.split(ids, opened.document_starts()[1:].astype(int)),
        opened.document_sources().tolist(),
        strict=True,
    ):
        assert part[-1] == EOS and (part[:-1] != EOS).all()
        found.append((names[number], gpt2.decode(part[:-1].tolist())))
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder` (hidden ones too) with its hash."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

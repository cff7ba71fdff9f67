"""A small run trained on sentences, with a tokenizer of its own, for the tests of eval."""

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from mamba3_lite.data.prepare import prepare
from mamba3_lite.training.config import DataConfig
from mamba3_lite.training.pretrain import Pretrainer
from tests.runs import config

EOS = "<|endoftext|>"
_NAMES = ("Ada", "Émile", "小明", "Zoë")
_THINGS = ("a red stone", "an old map", "twelve eggs", "the last key 🔑")
_PLACES = ("in the garden", "under the bridge", "at café Ñandú", "by the river")


class EvalRun(NamedTuple):
    """A run folder and what it was made of."""

    folder: Path
    data: Path  # an output of prepare, both splits
    tokenizer: Path


def sentences(count: int, *, seed: int = 0, most: int = 12) -> list[str]:
    """Texts of one to ``most`` sentences, whose names come again: context helps."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        name = draw.choice(_NAMES)
        texts.append(
            " ".join(
                f"{name} found {draw.choice(_THINGS)} {draw.choice(_PLACES)}."
                for _ in range(draw.randint(1, most))
            )
        )
    return texts


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def train_tokenizer(path: Path, texts: list[str]) -> Path:
    """Byte-level BPE of 300 ids: tokens of one to many bytes, some ending inside a character."""
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    built.train_from_iterator(texts, trainer)
    built.save(str(path))
    return path


def trained_run(folder: Path) -> EvalRun:
    """Sixty optimizer steps: a model that has learnt something."""
    texts = sentences(300)
    tokenizer = train_tokenizer(folder / "tokenizer.json", texts)
    corpus, data = write_jsonl(folder / "corpus.jsonl", texts), folder / "data"
    prepare(
        [corpus], data, tokenizer=str(tokenizer), val_fraction=0.2, workers=1,
        shard_size_tokens=1_000, log=lambda _: None, progress=False,
    )  # fmt: skip
    settings = config(
        folder, data_path=str(data / "train"), val_data_path=str(data / "val"), vocab_size=300,
        model={"vocab_size": 300}, data=DataConfig(tokenizer=str(tokenizer)),
        batch_size=8, gradient_accumulation_steps=1, max_steps=60, lr=1e-2, save_every=30,
    )  # fmt: skip
    assert Pretrainer(settings).train() == 0
    return EvalRun(folder / "run", data, tokenizer)

"""Bad input of every kind ends in one clear line, exit code 2 and an untouched folder tree."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import mamba3_lite
from mamba3_lite.cli import main
from mamba3_lite.data.shards import HEADER_BYTES, ShardWriter
from mamba3_lite.data.tokenizer import GPT2_SHA256
from mamba3_lite.errors import UserError, user_errors_as_one_line
from mamba3_lite.training.pretrain import Pretrainer
from tests import runs

ROOT = Path(mamba3_lite.__file__).resolve().parents[1]
NOBODY = 65534
WINDOW = runs.MODEL["max_seq_len"]
SETTINGS: dict[str, dict[str, Any]] = {
    "model": runs.MODEL,
    "training": {
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "total_steps": 4,
        "warmup_steps": 1, "lr": 1e-3, "compile": False, "save_interval": 2, "log_interval": 1,
        "keep_last": 0, "tensorboard": False, "save_dir": "run",
    },
    "data": {"train_data_path": "train.bin"},
}  # fmt: skip
PRETRAIN = ["pretrain", "--config", "config.yaml"]

Arrange = Callable[[Path], None]
FOREIGN = {"tokenizer_name": "toy", "tokenizer_fingerprint": "ab" * 32}


def tree(folder: Path) -> dict[str, tuple[int, str] | None]:
    """Size and hash of every file below ``folder``, hidden ones too; None for a folder."""
    return {
        str(path.relative_to(folder)): (
            (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
            if path.is_file()
            else None
        )
        for path in folder.rglob("*")
    }


def the_one_line(stderr: str) -> str:
    """The error line, which must be all that was printed."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    return lines[0]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good settings and good data, and what the commands make of them: no case fails by itself."""
    folder = tmp_path_factory.mktemp("healthy")
    runs.write_tokens(folder / "train.bin", WINDOW * 9 + 1)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / "good.txt").write_text("some text")
    with contextlib.chdir(folder):
        for argv in (PRETRAIN, ["prepare", "good.txt", "--out", "prepared"]):
            with pytest.raises(SystemExit) as stop:
                main(argv)
            assert not stop.value.code
    assert (folder / "run" / "meta_step_4.json").is_file()
    assert (folder / "prepared" / "prepare.json").is_file()
    return folder


@pytest.fixture
def room(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the healthy folder; the working directory of the test."""
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], str]:
    """Runs a command that must be refused in the working directory; returns its error line."""

    def run(argv: Sequence[str]) -> str:
        folder = Path.cwd()
        before = tree(folder)
        capsys.readouterr()
        # Any other exception passes through and fails the test.
        with pytest.raises(SystemExit) as stop:
            main(list(argv))
        assert stop.value.code == 2
        line = the_one_line(capsys.readouterr().err)
        assert tree(folder) == before
        return line

    return run


def nothing(room: Path) -> None:
    """The fault lies in the command itself."""


def setting(dotted: str, value: Any) -> Arrange:
    """Changes one value of config.yaml."""

    def arrange(room: Path) -> None:
        path = room / "config.yaml"
        content = yaml.safe_load(path.read_text())
        section, _, name = dotted.partition(".")
        if name:
            content.setdefault(section, {})[name] = value
        else:
            content[section] = value
        path.write_text(yaml.safe_dump(content))

    return arrange


def file(name: str, content: str | bytes) -> Arrange:
    """Writes a file."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda room: (room / name).write_bytes(raw) and None


def data(values: Any, name: str = "train.bin") -> Arrange:
    """Saves something with torch.save."""
    return lambda room: torch.save(values, room / name)


def truncated(name: str, size: int) -> Arrange:
    """Cuts a file."""
    return lambda room: os.truncate(room / name, size)


def together(*arrangements: Arrange) -> Arrange:
    """One after the other."""

    def arrange(room: Path) -> None:
        for one in arrangements:
            one(room)

    return arrange


def shards(name: str = "shards", key: str = "train_data_path", **changes: Any) -> Arrange:
    """Two good shards of our format as the training data, or as what ``key`` says."""
    options: dict[str, Any] = {
        "vocab_size": runs.VOCAB, "eos_id": 0, "tokenizer_name": "gpt2",
        "tokenizer_fingerprint": GPT2_SHA256, "shard_size_tokens": 100,
    }  # fmt: skip

    def arrange(room: Path) -> None:
        setting(f"data.{key}", name)(room)
        with ShardWriter(room / name, **(options | changes)) as out:
            out.append(runs.tokens(200).numpy())

    return arrange


def with_id(token: int) -> torch.Tensor:
    """Good tokens but one, in the last window."""
    values = runs.tokens(WINDOW * 9 + 1)
    values[-2] = token
    return values


def flip_first_byte(name: str) -> Arrange:
    """Damages the magic of a shard."""

    def arrange(room: Path) -> None:
        raw = (room / name).read_bytes()
        (room / name).write_bytes(b"X" + raw[1:])

    return arrange


def damage_all_checkpoints(room: Path) -> None:
    """Cuts every weight file of the run."""
    for path in (room / "run").glob("model_step_*.safetensors"):
        os.truncate(path, path.stat().st_size - 1)


@dataclass(frozen=True)
class Case:
    """``says``: what the line must hold, where and what first, the way out last."""

    id: str
    arrange: Arrange
    says: tuple[str, ...]
    argv: tuple[str, ...] = tuple(PRETRAIN)
    env: dict[str, str] = field(default_factory=dict)


def cases(listed: list[Case]) -> pytest.MarkDecorator:
    """The list as a parametrisation with readable names."""
    return pytest.mark.parametrize("case", listed, ids=[case.id for case in listed])


def key(id: str, dotted: str, value: Any, *says: str) -> Case:
    """One bad value in the configuration."""
    return Case(id, setting(dotted, value), (f"'{dotted}' in config.yaml", *says))


def override(id: str, text: str, *says: str) -> Case:
    """One bad override on the command line."""
    return Case(id, nothing, says, (*PRETRAIN, text))


CONFIGURATIONS = [
    key("unknown key", "training.warmup_step", 2, "unknown key", "did you mean 'warmup_steps'?"),
    key("field name as key", "training.max_steps", 2, "did you mean 'total_steps'?"),
    key("key of another section", "training.d_model", 2, "it belongs to section 'model'"),
    key("key like nothing", "data.zzz", 2, "unknown key", "keys: ", "train_data_path"),
    Case("unknown section", setting("trainning", {"lr": 1.0}),
         ("unknown section 'trainning' in config.yaml", "did you mean 'training'?")),
    Case("section is a number", setting("training", 5),
         ("section 'training' in config.yaml", "got 5", "must hold key: value pairs")),
    key("fraction for an int", "training.total_steps", 2.5, "got 2.5", "needs a whole number"),
    key("text for a float", "training.lr", "fast", "got 'fast'", "needs a number"),
    key("text for a bool", "training.nan_guard", "maybe", "got 'maybe'", "needs true or false"),
    key("number for a bool", "model.weight_tying", 1, "got 1", "needs true or false"),
    key("bool for a float", "training.lr", True, "got true", "needs a number"),
    key("number for a string", "training.save_dir", 7, "got 7", "put it in quotes"),
    key("list for a string", "data.train_data_path", ["a", "b"], "needs a string"),
    key("null", "training.lr", None, "got nothing", "needs a number"),
    key("warm-up as long as the run", "training.warmup_steps", 4, "got 4",
        "must be below 'training.total_steps' in config.yaml (4)"),
    key("negative lr", "training.lr", -1e-3, "got -0.001", "must be a positive number"),
    key("lr not a number", "training.lr", float("nan"), "got nan", "must be a positive number"),
    key("zero batch", "training.micro_batch_size", 0, "got 0", "must be at least 1"),
    key("min_lr_ratio", "training.min_lr_ratio", 2, "got 2.0", "between 0 and 1"),
    key("beta1", "training.beta1", 1.0, "got 1.0", "at least 0 and below 1"),
    key("seed too large", "training.seed", 2**70, "must be between 0 and 2^63 - 1"),
    key("empty save_dir", "training.save_dir", "", "must be a path"),
    key("dispatch", "model.ssd_dispatch", "pytroch", "got 'pytroch'", "did you mean 'pytorch'?"),
    key("compile mode", "training.compile_mode", "fast", "got 'fast'", "one of default, "),
    key("data order", "data.order", "shuffeld", "did you mean 'shuffled'?"),
    key("no validation data", "training.eval_interval", 2, "needs data.val_data_path"),
    key("shard size", "data.shard_size_tokens", -1, "got -1", "must be at least 1"),
    Case("no layers", together(setting("model.n_layers", 0), setting("model.init_std", 2)),
         ("model.n_layers must be at least 1, got 0", "model.init_std must lie between 0 and 1")),
    Case("several problems",
         together(setting("training.lrr", 1), setting("training.beta1", 1.0),
                  setting("model.d_model", "wide"), setting("training.clip", 0)),
         ("4 problems: ", "'training.lrr'", "'training.beta1'", "'model.d_model'",
          "'training.clip'", "did you mean 'lr'?")),
    Case("broken YAML", file("config.yaml", "training:\n  lr: 1: 2\n"),
         ("config.yaml: line 2: not readable as YAML", "mend it there")),
    Case("doubled key", file("config.yaml", "training:\n  lr: 1e-3\n  lr: 2e-3\n"),
         ("config.yaml: line 3:", "duplicate key lr", "mend it there")),
    Case("YAML is a list", file("config.yaml", "- model\n"),
         ("config.yaml", "a configuration is sections of key: value pairs")),
    Case("YAML is a number", file("config.yaml", "5\n"), ("config.yaml", "mend it there")),
    Case("no UTF-8", file("config.yaml", b"training: {lr: \xff}"),
         ("config.yaml", "save it as UTF-8")),
    Case("unknown reference", setting("training.save_dir", "${home}/x"),
         ("config.yaml", "Interpolation key 'home' not found")),
    Case("base missing", setting("base", "nope.yaml"),
         ("nope.yaml: no such file", "correct 'base:' in config.yaml")),
    Case("base in a circle",
         together(setting("base", "b.yaml"), file("b.yaml", "base: config.yaml\n")),
         ("config.yaml -> b.yaml -> config.yaml", "remove one of them")),
    Case("base is a number", setting("base", 3), ("config.yaml", "got 3", "path of another")),
    Case("config missing", nothing, ("nope.yaml: no such file", "check --config"),
         ("pretrain", "--config", "nope.yaml")),
    Case("config is a folder", nothing, ("run: is a directory", "check --config"),
         ("pretrain", "--config", "run")),
    override("override without value", "training.lr", "'training.lr'", "section.key=value"),
    override("override without section", "lr=1", "'lr=1'", "section.key=value"),
    override("override of an unknown key", "training.lrs=1",
             "unknown key 'training.lrs' on the command line", "did you mean 'lr'?"),
    override("override of a wrong type", "training.lr=fast",
             "'training.lr' on the command line", "needs a number, got 'fast'"),
    Case("negative time limit", nothing, ("max_time_sec", "got -1.0", "must be 0 or more"),
         (*PRETRAIN, "--max-time", "-1")),
    Case("compile mode in the environment", nothing,
         ("in environment variable TORCH_COMPILE_MODE", "got 'nonsense'", "one of default, "),
         env={"TORCH_COMPILE_MODE": "nonsense"}),
    Case("W&B without the package", nothing, ("WANDB_PROJECT is set", "pip install"),
         env={"WANDB_PROJECT": "p"}),
    Case("kernel knob is text", setting("model.ssd_dispatch", "triton"),
         ("TRITON_PER_CHUNK_NUM_WARPS='x'", "use a number such as"),
         env={"ENABLE_TRITON_KERNELS": "1", "TRITON_PER_CHUNK_NUM_WARPS": "x"}),
    Case("kernel knob out of range", setting("model.ssd_dispatch", "triton"),
         ("TRITON_PER_CHUNK_NUM_WARPS", "got 3", "must be a power of two"),
         env={"ENABLE_TRITON_KERNELS": "1", "TRITON_PER_CHUNK_NUM_WARPS": "3"}),
]  # fmt: skip

DATA = [
    Case("missing", setting("data.train_data_path", "nope"), ("nope does not", "correct the path")),
    Case("empty folder",
         together(setting("data.train_data_path", "empty"), lambda room: (room / "empty").mkdir()),
         ("empty is a folder without", "mamba3-lite prepare")),
    Case("prepared splits",
         together(shards(), lambda room: shutil.move(room / "shards", room / "all" / "train"),
                  setting("data.train_data_path", "all")),
         ("all holds prepared splits", "use all/train")),
    Case("truncated tensor file", truncated("train.bin", 900), ("train.bin", "write it again")),
    Case("damaged tensor file",
         lambda room: (room / "train.bin").write_bytes(
             (room / "train.bin").read_bytes().replace(b"torch._utils", b"torch\xff_utils")
         ) and None,
         ("train.bin: not a readable", "write it again")),
    Case("truncated shard", together(shards(), truncated("shards/tokens_00001.bin", 300)),
         ("tokens_00001.bin: truncated shard: 300 bytes", "prepare the data again")),
    Case("shard without a whole header",
         together(shards(), truncated("shards/tokens_00000.bin", HEADER_BYTES - 1)),
         ("tokens_00000.bin: truncated shard", "prepare the data again")),
    Case("shard with wrong magic", together(shards(), flip_first_byte("shards/tokens_00000.bin")),
         ("tokens_00000.bin: not a mamba3-lite shard", "prepare the data again")),
    Case("one shard with wrong magic",
         together(shards(), flip_first_byte("shards/tokens_00000.bin"),
                  setting("data.train_data_path", "shards/tokens_00000.bin")),
         ("tokens_00000.bin: unknown data format", "mamba3-lite prepare")),
    Case("missing shard",
         together(shards(), lambda room: (room / "shards" / "tokens_00001.bin").unlink()),
         ("tokens_00001.bin: cannot read this shard", "copy the whole folder anew")),
    Case("manifest is no JSON", together(shards(), file("shards/manifest.json", "{")),
         ("manifest.json: not a shard manifest", "prepare the data again")),
    Case("manifest of other things",
         together(shards(), file("shards/manifest.json", json.dumps(
             {"shards": [{"file": 5, "tokens": 1}], "tokenizer": {"fingerprint": ""}}))),
         ("manifest.json: not a shard manifest", "prepare the data again")),
    Case("id == vocab_size", data(with_id(runs.VOCAB)),
         ("train.bin: token 215 has id 97, outside 0..96", "correct vocab_size")),
    Case("id -1", data(with_id(-1)), ("train.bin: token 215 has id -1", "correct vocab_size")),
    Case("float tensor", data(torch.zeros(300)), ("train.bin: holds a torch.float32 tensor",
                                                  "one dimension of torch.int64 is needed")),
    Case("int32 tensor", data(torch.zeros(300, dtype=torch.int32)),
         ("train.bin: holds a torch.int32 tensor", "torch.int64 is needed")),
    Case("2-D tensor", data(torch.zeros(9, 33, dtype=torch.int64)),
         ("tensor of shape (9, 33)", "one dimension of torch.int64 is needed")),
    Case("a dictionary", data({"ids": [1]}), ("holds a dict", "one int64 tensor is needed")),
    Case("no tokens", data(runs.tokens(1)[:0]), ("holds 0 tokens", "needs 25", "use more data")),
    Case("T tokens", data(runs.tokens(WINDOW)), ("holds 24 tokens", "needs 25", "use more data")),
    Case("short validation",
         together(setting("data.val_data_path", "val.bin"), data(runs.tokens(WINDOW), "val.bin")),
         ("val.bin: holds 24 tokens", "use more data")),
    Case("text as data", file("train.bin", "Once upon a time, there was a file of text.\n"),
         ("train.bin: unknown data format", "mamba3-lite prepare")),
    Case("raw uint32 as data", file("train.bin", np.arange(400, dtype="<u4").tobytes()),
         ("train.bin: looks like raw uint32", "convert them with `mamba3-lite prepare`")),
    Case("larger vocabulary", shards(vocab_size=500),
         ("tokens_00000.bin: written with a vocabulary of 500", "use the model of that")),
    # case C01
    Case("another tokenizer", shards(**FOREIGN),
         ("error: shards: made with another tokenizer 'toy' than data.tokenizer 'gpt2'",
          "abababababab", GPT2_SHA256[:12], "name theirs in data.tokenizer, or prepare")),
    Case("another tokenizer in one shard",
         together(shards(**FOREIGN), setting("data.train_data_path", "shards/tokens_00000.bin")),
         ("shards/tokens_00000.bin: made with another tokenizer than", "prepare the data again")),
    Case("validation of another tokenizer",
         together(shards(), shards("val", "val_data_path", **FOREIGN)),
         ("error: val: made with another tokenizer 'toy'", "name theirs in data.tokenizer")),
    Case("validation alone of data.tokenizer",
         together(shards(**FOREIGN), shards("val", "val_data_path")),
         ("error: shards: made with another tokenizer 'toy'", "name theirs in data.tokenizer")),
    Case("tokenizer missing", together(shards(), setting("data.tokenizer", "nope.json")),
         ("tokenizer: cannot read nope.json",)),
]  # fmt: skip


@pytest.mark.parametrize("save_dir", ["run", "new/run"])
@cases(CONFIGURATIONS + DATA)
def test_bad_configurations_and_data(
    case: Case, save_dir: str, room: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a healthy run folder, which stays as it is, and before a new one, never made."""
    if save_dir != "run" and not case.id.endswith("save_dir"):
        case = Case(
            case.id, case.arrange, case.says, (*case.argv, "--checkpoint-dir", save_dir), case.env
        )
    case.arrange(room)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    line = refused(case.argv)
    assert [text for text in case.says if text not in line] == [], line


def resumed(id: str, text: str, *says: str) -> Case:
    """A change that a run folder with checkpoints does not take."""
    return Case(id, nothing, ("Cannot resume from run", *says, "Set it back"), (*PRETRAIN, text))


RUN_FOLDERS = [
    Case("a file", file("new", ""), ("cannot write logs to new", "choose another run folder"),
         (*PRETRAIN, "--checkpoint-dir", "new")),
    Case("below a file", file("new", ""), ("logs to new/run", "choose another run folder"),
         (*PRETRAIN, "--checkpoint-dir", "new/run")),
    Case("absent checkpoint", nothing, ("step 3 in run", "is missing", "steps available: 2, 4"),
         (*PRETRAIN, "--resume", "3")),
    Case("no checkpoint at all", nothing, ("step 2 in new", "steps available: none"),
         (*PRETRAIN, "--resume", "2", "--checkpoint-dir", "new")),
    Case("one damaged checkpoint", damage_all_checkpoints,
         ("model_step_2.safetensors has", "bytes instead of", "steps available: 2, 4"),
         (*PRETRAIN, "--resume", "2")),
    Case("all checkpoints damaged", damage_all_checkpoints,
         ("run holds no intact checkpoint", "steps 2, 4", "start in another checkpoint folder")),
    resumed("d_model", "model.d_model=32", "model.d_model: 16 -> 32"),
    resumed("window", "model.max_seq_len=12", "model.max_seq_len: 24 -> 12"),
    resumed("seed", "training.seed=5", "training.seed: 0 -> 5"),
    resumed("order", "data.order=shuffled", "data.order: 'sequential' -> 'shuffled'"),
    resumed("tokens per step", "training.micro_batch_size=4", "micro_batch_size", "2 -> 4"),
    Case("other data", data(runs.tokens(WINDOW * 9 + 1, seed=1)),
         ("train.bin does not hold the data that run was trained on", "data.train_data_path")),
]  # fmt: skip


def prepared(id: str, arrange: Arrange, says: Sequence[str], *argv: str) -> Case:
    """A run of prepare."""
    return Case(id, arrange, tuple(says), ("prepare", *argv))


JSONL = file("a.jsonl", '{"body": "some text"}\n{"body": 5\n')
PREPARE = [
    prepared("missing input", nothing, ("nope.txt: no such file", "check the path"),
             "nope.txt", "--out", "new/out"),
    prepared("wrong extension", file("a.bin", "text"),
             ("a.bin: no torch.save'd tensor", "set kind: raw_uint32"), "a.bin", "--out", "out"),
    prepared("folder without text", lambda room: (room / "empty").mkdir(),
             ("empty: no file ending in .txt", "in this folder"), "empty", "--out", "out"),
    prepared("empty file", file("a.txt", ""), ("a.txt", "1 empty", "name files that hold text"),
             "a.txt", "--out", "new/out"),
    prepared("wrong text field", JSONL,
             ("a.jsonl: no record has the field 'text'", "fields seen: body", "--text-field"),
             "a.jsonl", "--out", "new/out"),
    prepared("invalid UTF-8", file("a.txt", b"good\nbad \xff\n"),
             ("a.txt:2: invalid UTF-8", "(--invalid-utf8) to replace"),
             "a.txt", "--out", "new/out", "--invalid-utf8", "fail"),
    prepared("broken JSON", JSONL, ("a.jsonl:2: broken JSON", "(--invalid-utf8) to replace"),
             "a.jsonl", "--out", "out", "--invalid-utf8", "fail", "--text-field", "body"),
    prepared("unknown policy", file("a.txt", "text"), ("invalid_utf8", "'ignore'", "replace, skip"),
             "a.txt", "--out", "out", "--invalid-utf8", "ignore"),
    prepared("output not empty", file("a.txt", "text"), ("run: is not empty", "choose another"),
             "a.txt", "--out", "run", "--force"),
    prepared("output below a file", file("a.txt", "text"),
             ("config.yaml/out: cannot write there", "choose another folder"),
             "a.txt", "--out", "config.yaml/out"),
    prepared("val_fraction", file("a.txt", "text"), ("val_fraction", "not 2.0", "below 1"),
             "a.txt", "--out", "out", "--val-fraction", "2"),
    prepared("no validation", file("a.txt", "text"), ("val_fraction 0.5", "change the fraction"),
             "a.txt", "--out", "new/out", "--val-fraction", "0.5"),
    prepared("tokenizer", file("a.txt", "text"), ("tokenizer: 'gpt5'", "use 'gpt2'"),
             "a.txt", "--out", "out", "--tokenizer", "gpt5"),
]  # fmt: skip

USE = [
    Case("no run folder", nothing, ("nope is not a folder", "name a run folder"),
         ("generate", "nope")),
    Case("no checkpoint", lambda room: (room / "empty").mkdir(),
         ("empty holds no checkpoint", "name a folder"), ("generate", "empty")),
    Case("absent step", nothing, ("step 3 in run", "steps available: 2, 4"),
         ("generate", "run", "--opt-step", "3")),
    Case("empty prompt", nothing, ("--prompt is empty", "give at least one character"),
         ("generate", "run", "--prompt", "")),
    Case("prompt outside the vocabulary", nothing, ("outside 0 to 96", "--tokenizer"),
         ("generate", "run", "--prompt", "Hello world")),
    Case("top_p", nothing, ("top_p", "got 2.0", "between 0 and 1"),
         ("generate", "run", "--top-p", "2")),
    Case("temperature", nothing, ("temperature", "got -1.0", "must be 0 (greedy) or a positive"),
         ("generate", "run", "--temperature", "-1")),
    Case("number of tokens", nothing, ("--max-new-tokens", "got -1", "must be 0 or more"),
         ("generate", "run", "--max-new-tokens", "-1")),
    Case("backend", nothing, ("ssd_dispatch='nope'", "choose one of pytorch"),
         ("parity", "--backend", "nope")),
    Case("no such device", nothing, ("--device 'nonsense'", "cpu or cuda"),
         ("parity", "--device", "nonsense")),
    Case("quickstart override", nothing, ("'training.total_step'", "did you mean 'total_steps'?"),
         ("quickstart", "--run-dir", "new", "training.total_step=5")),
    Case("quickstart folder", nothing, ("train.bin: cannot write there", "another --run-dir"),
         ("quickstart", "--run-dir", "train.bin")),
    Case("unknown command", nothing, ("'pretrian'", "did you mean 'pretrain'?"), ("pretrian",)),
]  # fmt: skip


@cases(RUN_FOLDERS)
def test_bad_run_folders_and_resumes(case: Case, room: Path, refused: Any) -> None:
    case.arrange(room)
    line = refused(case.argv)
    assert [text for text in case.says if text not in line] == [], line


@cases(PREPARE)
def test_bad_input_of_prepare(case: Case, room: Path, refused: Any) -> None:
    case.arrange(room)
    line = refused(case.argv)
    assert [text for text in case.says if text not in line] == [], line


@cases(USE)
def test_bad_use_of_the_other_commands(case: Case, room: Path, refused: Any) -> None:
    case.arrange(room)
    line = refused(case.argv)
    assert [text for text in case.says if text not in line] == [], line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_asked_for_where_there_is_none(room: Path, refused: Any) -> None:
    line = refused(["parity", "--device", "cuda"])
    assert "no CUDA device" in line and "--device cpu" in line


@contextlib.contextmanager
def without_privilege() -> Iterator[None]:
    """Root may write anywhere, so root becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("mode", "argv", "says"),
    [
        (0o555, [*PRETRAIN, "--checkpoint-dir", "locked/new"], ["locked/new", "make it writable"]),
        (0o000, [*PRETRAIN, "--checkpoint-dir", "locked/new"], ["locked/new", "choose another"]),
        (0o000, [*PRETRAIN, "--data-path", "locked/x"], ["data path locked/x", "correct the path"]),
        (0o000, [*PRETRAIN[:2], "locked/x"], ["locked/x", "check --config"]),
        (0o000, ["prepare", "locked/x.txt", "--out", "o"], ["locked/x.txt", "check the path"]),
        (
            0o555,
            ["prepare", "good.txt", "--out", "locked/o"],
            ["locked/o", "choose another folder"],
        ),
    ],
)
def test_folders_without_permission(
    mode: int,
    argv: list[str],
    says: list[str],
    healthy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Not below tmp_path, whose parents only their owner may enter.
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        room, locked = Path(name), Path(name, "locked")
        shutil.copytree(healthy, room, dirs_exist_ok=True)
        locked.mkdir()
        locked.chmod(mode)
        room.chmod(0o755)
        before = tree(room)
        capsys.readouterr()
        with without_privilege(), pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        line = the_one_line(capsys.readouterr().err)
        assert [text for text in says if text not in line] == [], line
        assert tree(room) == before
        locked.chmod(0o755)


@pytest.mark.parametrize("kind", [ZeroDivisionError, ValueError, OSError, RuntimeError, KeyError])
def test_any_other_exception_keeps_its_traceback(
    kind: type[Exception],
    room: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def planted(self: Pretrainer) -> None:
        raise kind("planted")

    monkeypatch.setattr(Pretrainer, "_open_data", planted)
    with pytest.raises(kind, match="planted") as caught:
        main(PRETRAIN)
    assert not isinstance(caught.value, UserError)
    assert any(entry.name == "planted" for entry in caught.traceback)
    assert capsys.readouterr().err == ""


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, user_errors_as_one_line():
        raise UserError("strange\nname.yaml:\r\n  does not exist")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: strange name.yaml: does not exist\n"


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs this Python on this checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-m", "mamba3_lite.cli", *PRETRAIN], "unknown key 'training.lrr' in config.yaml"),
        ([str(ROOT / "training" / "pretrain.py"), *PRETRAIN[1:]], "did you mean 'lr'?"),
        (["-m", "mamba3_lite.cli", "prepare", "nope.txt", "--out", "new/out"], "nope.txt: no such"),
    ],
    ids=["mamba3-lite pretrain", "training/pretrain.py", "mamba3-lite prepare"],
)
def test_a_process_ends_the_same_way(room: Path, arguments: list[str], says: str) -> None:
    setting("training.lrr", 1)(room)
    before = tree(room)
    done = python(*arguments, cwd=room)
    assert done.returncode == 2
    assert says in the_one_line(done.stderr)
    assert tree(room) == before


def test_a_process_shows_the_traceback_of_a_fault(room: Path) -> None:
    planted = (
        "import mamba3_lite.data.prepare as module\n"
        "module.open_source = lambda *ignored, **also: 1 / 0\n"
        "from mamba3_lite.cli import main\n"
        "main(['prepare', 'a.txt', '--out', 'out'])\n"
    )
    done = python("-c", planted, cwd=room)
    assert done.returncode == 1
    assert re.search(r"(?m)^Traceback ", done.stderr)
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert not re.search(r"(?m)^error: ", done.stderr)

"""Random damage: ``python -m tests.fuzz --times 2000``. Configurations, shards and checkpoints.

Whatever the damage, either a ``UserError`` of one line says so, or what is loaded is what was
there (in a configuration: is valid). Any other exception, another content, and a hang are wrong.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from mamba3_lite import hardware
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.errors import UserError
from mamba3_lite.measure.bench_cases import write_shards
from mamba3_lite.training.config import load_training_config
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils.checkpoint import CheckpointManager
from tests import runs

VOCAB = 50257
ODD_VALUES = (
    "", "null", "~", "nan", ".inf", "-1", "0", "1e999", "3e-4", "true", "[]", "{}", "[1, 2]",
    "{a: 1}", "2020-01-01", "0x10", "1_000", "'5'", "\"\\u0000\"", "é", "99999999999999999999",
    "-.5", "fused", "auto", "../..", "&a 1", "*a", "!!python/object:os.system x", "|", "- x", ": :",
)  # fmt: skip
SECONDS_OF_A_HANG = 20.0


def damaged_text(text: str, rng: random.Random) -> str:
    """A configuration with one thing or more that is odd."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        match rng.randrange(8):
            case 0:
                lines[at] = f"{key}{colon} {rng.choice(ODD_VALUES)}"
            case 1:
                lines[at] = f"{key}x{colon} 1"
            case 2:
                del lines[at]
            case 3:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 4:
                lines[at] = rng.choice(("\t", "  ", "      ")) + lines[at]
            case 5:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case 6:
                lines[at] += chr(rng.choice((0, 7, 0x7F, 0x85, 0xFEFF, 0x1F600)))
            case _:
                lines[at] = (
                    f"  {rng.choice(('lr', 'seed', 'mode', 'order'))}: {rng.choice(ODD_VALUES)}"
                )
        if not lines:
            return ""
    return "\n".join(lines) + "\n"


def damage_file(path: Path, rng: random.Random) -> str:
    """Breaks a file in place; what was done."""
    content = bytearray(path.read_bytes())
    size = len(content)
    kind = rng.choice(("flip", "flip", "cut", "grow", "zeros", "delete", "empty", "folder", "link"))
    if kind == "flip" and size:
        content[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "cut" and size:
        del content[rng.randrange(size) :]
    elif kind == "grow":
        content += rng.randbytes(rng.choice((1, 2, 4, 4096)))
    elif kind == "zeros" and size:
        start = rng.randrange(size)
        stop = min(size, start + rng.choice((1, 8, 512)))
        content[start:stop] = bytes(stop - start)
    elif kind == "empty":
        content.clear()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.with_name("nowhere"))
    elif kind != "delete":
        path.write_bytes(content)
    return f"{kind} {path.name}"


class Target:
    """Something that is damaged and then loaded."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def attempt(self, rng: random.Random) -> tuple[str, Callable[[], Any]]:
        """What was damaged, and how to load it: None when what came is right, else what is not."""
        raise NotImplementedError


class Configurations(Target):
    def __init__(self, work: Path) -> None:
        super().__init__(work)
        shipped = Path(hardware.__file__).parents[1] / "configs"
        self.texts = [path.read_text(encoding="utf-8") for path in sorted(shipped.glob("*.yaml"))]

    def attempt(self, rng: random.Random) -> tuple[str, Callable[[], Any]]:
        text = damaged_text(rng.choice(self.texts), rng)
        path = self.work / "run.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))

        def load() -> str | None:
            config, _ = load_training_config(path)
            again = yaml.safe_load(text)
            return None if isinstance(again, dict) and config.max_steps >= 1 else "not a mapping"

        return text, load


class Folder(Target):
    """A folder whose files are damaged one at a time."""

    whole: Path

    def attempt(self, rng: random.Random) -> tuple[str, Callable[[], Any]]:
        folder = self.work / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.whole, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        what = damage_file(rng.choice(files), rng)
        return what, lambda: self.load(folder)

    def load(self, folder: Path) -> str | None:
        raise NotImplementedError


class Shards(Folder):
    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.whole = work / "shards"
        write_shards(self.whole, 20_000, 100, VOCAB)
        self.truth = self._content(self.whole)

    def _content(self, folder: Path) -> str:
        digest = hashlib.sha256()
        data = PretrainDataset(folder, 128, VOCAB, document_mode=True, mask_boundary_targets=True)
        for index in range(len(data)):
            for part in data[index]:
                digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def load(self, folder: Path) -> str | None:
        return None if self._content(folder) == self.truth else "other tokens were read"


class Checkpoints(Folder):
    def __init__(self, work: Path, checkpoint_format: str) -> None:
        super().__init__(work)
        home = work / checkpoint_format
        home.mkdir()
        settings = runs.config(home, max_steps=9, save_every=3, checkpoint_format=checkpoint_format)
        Pretrainer(settings).train()
        self.whole = home / "run"
        manager = CheckpointManager(self.whole, log=_silent)
        self.truth = {step: self._content(manager.load(step)) for step in manager.steps()}

    def _content(self, checkpoint: Any) -> str:
        digest = hashlib.sha256(json.dumps(checkpoint.meta, sort_keys=True).encode())
        for name in sorted(checkpoint.model):
            digest.update(torch.view_as_real(t).numpy().tobytes() if (t := checkpoint.model[name])
                          .is_complex() else t.numpy().tobytes())  # fmt: skip
        for index, moments in sorted(checkpoint.training["optimizer"]["state"].items()):
            for name in sorted(moments):
                digest.update(f"{index} {name}".encode() + moments[name].numpy().tobytes())
        return digest.hexdigest()

    def load(self, folder: Path) -> str | None:
        checkpoint = CheckpointManager(folder, log=_silent).load(None)
        if checkpoint is None:
            return "nothing was found and nothing was said"
        right = self._content(checkpoint) == self.truth[checkpoint.opt_step]
        return None if right else f"step {checkpoint.opt_step} is not what was saved"


def _silent(line: str) -> None:
    pass


def judge(load: Callable[[], str | None]) -> tuple[str, str | None]:
    """("refused" or "loaded", what is wrong)."""
    start = time.monotonic()
    try:
        problem, outcome = load(), "loaded"
    except UserError as error:
        outcome, problem = "refused", None
        if not str(error).strip():
            problem = "an empty error"
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {str(error)[:200]}"
    if time.monotonic() - start > SECONDS_OF_A_HANG:
        problem = "took too long"
    return outcome, problem


def campaign(times: int, seed: int, work: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Counts by target, and every wrong case with what makes it again."""
    targets = {
        "configurations": (Configurations(work), times // 2),
        "shards": (Shards(work), times // 4),
        "checkpoints in files": (Checkpoints(work, "files"), times // 8),
        "sharded checkpoints": (Checkpoints(work, "sharded"), times - 7 * (times // 8)),
    }
    counts, wrong = {}, []
    for name, (target, each) in targets.items():
        found = {"mutations": each, "refused": 0, "loaded": 0, "wrong": 0}
        for number in range(each):
            what, load = target.attempt(random.Random(f"{name} {seed} {number}"))
            outcome, problem = judge(load)
            if problem is not None:
                found["wrong"] += 1
                wrong.append(f"{name} {seed} {number}: {problem} ({what!r:.300})")
            elif outcome in found:
                found[outcome] += 1
        counts[name] = found
    return counts, wrong


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--times", type=int, default=2000)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", type=Path, help="appends a JSON row")
    args = ap.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        counts, wrong = campaign(args.times, args.seed, Path(work))
    for line in wrong:
        print("WRONG", line)
    print(json.dumps(counts, indent=1))
    if args.out is not None:
        row = {"benchmark": "fuzz", "seed": args.seed, "counts": counts, "wrong": wrong,
               "environment": hardware.environment_record()}  # fmt: skip
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Speed and memory of `mamba3-lite prepare`, beside bare tiktoken in two processes; or its mixture.

The documents are those of the given JSON-lines files, or of Python's own standard library. Both
rates are of the same texts in the same run; peak memory is measured at 1, 4 and 10 times the input,
each in a fresh process (the one that reads and writes). Appends one JSON row to
benchmarks/results/prepare.jsonl.

    python benchmarks/prepare.py [FILE.jsonl ...] [--workers 2] [--repeats 3]

With --mix nothing is timed. Folders of JSON-lines files are mixed by weight, cleaned, freed of
duplicates, split and verified, and every document that came out is compared with what a plain loop
makes of the files (by the same rules of cleaning, tokenizer and hash): shares, documents lost,
doubled, or in both splits. Appends one row to benchmarks/results/prepare_mix.jsonl.

    python benchmarks/prepare.py --mix FOLDER=WEIGHT ... [--workers 2]
"""

import argparse
import datetime
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite.data.clean import CleanConfig, reason_to_drop
from mamba3_lite.data.mixture import validation_mask
from mamba3_lite.data.parts import document_key
from mamba3_lite.data.shards import open_shards
from mamba3_lite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The prose of the corpus is few documents, and some must fall into validation.
VAL_FRACTION = 0.02
GROWTH = (1, 4, 10)
# A batch large enough that passing it on costs nothing.
BATCH_BYTES = 1 << 20

# VmHWM and not ru_maxrss, which begins with the size of the process that started this one.
PREPARE = """
import json, re, sys, time
from dataclasses import replace
from pathlib import Path
from mamba3_lite.data.config import CleanConfig, DedupConfig, files_job
from mamba3_lite.data.prepare import prepare_job

if __name__ == "__main__":
    out, workers, *inputs = sys.argv[1:]
    job = files_job(inputs, out)
    job = replace(
        job,
        prepare=replace(job.prepare, workers=int(workers), val_fraction=0.005),
        clean=CleanConfig(),
        dedup=DedupConfig(),
    )
    begun = time.perf_counter()
    report = prepare_job(job, log=lambda message: None, progress=False)
    seconds = time.perf_counter() - begun
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    print(json.dumps({
        "seconds": seconds, "documents": report.documents, "tokens": report.tokens,
        "text_bytes": report.text_bytes, "peak_bytes": int(peak) * 1024,
    }))
"""


def measure_prepare(inputs: list[Path], workers: int, folder: Path) -> dict[str, float]:
    """One whole run in a fresh process, output removed again."""
    out = folder / "out"
    program = folder / "program.py"
    program.write_text(PREPARE)
    done = subprocess.run(
        [sys.executable, str(program), str(out), str(workers), *map(str, inputs)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    shutil.rmtree(out)
    return json.loads(done.stdout)


def tokenise(texts: list[str]) -> int:
    """Bare tiktoken: nothing but the ids' number comes back."""
    encode = load_tokenizer("gpt2").encode
    return sum(len(encode(text)) for text in texts)


def measure_tiktoken(inputs: list[Path], workers: int) -> float:
    """Seconds for all texts in `workers` warm processes; reading is not counted."""
    batches: list[list[str]] = [[]]
    size = 0
    for path in inputs:
        with path.open(encoding="utf-8") as file:
            for line in file:
                batches[-1].append(json.loads(line)["text"])
                size += len(line)
                if size >= BATCH_BYTES:
                    batches.append([])
                    size = 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(tokenise, [["warm"]] * workers * 4, chunksize=1)
        begun = time.perf_counter()
        sum(pool.imap_unordered(tokenise, batches))
        return time.perf_counter() - begun


def grow(inputs: list[Path], times: int, target: Path) -> Path:
    """The documents `times` over, each round's made different by a prefix."""
    with target.open("w", encoding="utf-8") as out:
        for number in range(times):
            for path in inputs:
                with path.open(encoding="utf-8") as file:
                    for line in file:
                        text = json.loads(line)["text"]
                        out.write(json.dumps({"text": f"{number}\n{text}"}) + "\n")
    return target


def reference(folders: list[Path]) -> list[list[bytes]]:
    """The documents of each folder in the order of reading, made without `prepare`.

    A document is the bytes of its uint16 ids, without EOS, so that it can be counted.
    """
    encode = load_tokenizer("gpt2").encode
    seen: set[str] = set()
    found = []
    for folder in folders:
        texts: dict[str, None] = {}
        for path in sorted(folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as file:
                texts |= dict.fromkeys(json.loads(line)["text"] for line in file)
        kept = [t for t in texts if t not in seen and not reason_to_drop(t, CleanConfig())]
        seen.update(kept)
        found.append([np.array(encode(text), "<u2").tobytes() for text in kept])
    return found


def packed(folder: Path, sources: int) -> list[list[bytes]]:
    """The documents of each source in one split, in the order of the shards."""
    opened = open_shards(folder)
    ids = np.concatenate([shard.tokens() for shard in opened.shards])
    found: list[list[bytes]] = [[] for _ in range(sources)]
    parts = np.split(ids, opened.document_starts()[1:].astype(np.int64))
    for part, source in zip(parts, opened.document_sources().tolist(), strict=True):
        found[source].append(part[:-1].tobytes())
    return found


def compare(found: list[bytes], expected: list[bytes]) -> Counter[str]:
    """Documents that are missing, there too often, or cut; the last of a source may be cut."""
    expected = expected[: len(found)]
    cut = found[-1] != expected[-1] and expected[-1].startswith(found[-1])
    whole = len(found) - cut
    have, want = Counter(found[:whole]), Counter(expected[:whole])
    return Counter(lost=(want - have).total(), doubled=(have - want).total(), cut=int(cut))


def measure_mix(weights: dict[Path, float], workers: int, out: Path) -> dict[str, Any]:
    """Mix, verify and compare; `UserError` where verifying finds a fault."""
    # Not at the top, for the same reason as in main.
    from mamba3_lite.data.config import PrepareConfig, PrepareJob
    from mamba3_lite.data.prepare import prepare_job
    from mamba3_lite.data.records import SourceConfig

    job = PrepareJob(
        prepare=PrepareConfig(out=str(out), workers=workers, val_fraction=VAL_FRACTION),
        sources=tuple(
            SourceConfig(name=folder.name, weight=weight, paths=(str(folder),))
            for folder, weight in weights.items()
        ),
    )
    report = prepare_job(job, check=True, log=lambda message: None, progress=False)
    assert report is not None
    counts: Counter[str] = Counter()
    train, val = (packed(out / split, len(weights)) for split in ("train", "val"))
    for number, documents in enumerate(reference(list(weights))):
        dtype = np.dtype("<u2")
        keys = [document_key(np.frombuffer(document, dtype), dtype) for document in documents]
        in_val = validation_mask(
            np.array(keys, np.uint64), seed=job.prepare.seed, val_fraction=VAL_FRACTION
        )
        for found, wanted in ((train[number], ~in_val), (val[number], in_val)):
            counts.update(compare(found, [documents[i] for i in np.flatnonzero(wanted)]))
    return {
        "inputs": [path.name for folder in weights for path in sorted(folder.glob("*.jsonl"))],
        "seed": job.prepare.seed,
        "val_fraction": VAL_FRACTION,
        "on_exhausted": job.prepare.on_exhausted,
        "sources": [
            {
                key: getattr(source, key)
                for key in (
                    "name", "weight", "share", "tokens", "documents", "val_tokens",
                    "val_documents", "read_documents", "skipped",
                )
            }
            for source in report.sources
        ],
        "largest_share_error": max(abs(source.share - source.weight) for source in report.sources),
        **{f"documents_{what}": counts[what] for what in ("lost", "doubled", "cut")},
        "documents_in_both_splits": len(set(sum(train, [])) & set(sum(val, []))),
    }  # fmt: skip


def folder_and_weight(text: str) -> tuple[Path, float]:
    folder, _, weight = text.rpartition("=")
    return Path(folder), float(weight)


def measure_speed(inputs: list[Path], workers: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Both rates, by turns, and peak memory as the input grows."""
    bare, whole = [], []
    # By turns, so that a slow minute of the machine hits both.
    for _ in range(repeats):
        bare.append(measure_tiktoken(inputs, workers))
        whole.append(measure_prepare(inputs, workers, folder))
    text_bytes = whole[0]["text_bytes"]
    seconds = [run["seconds"] for run in whole]
    ratios = [b / w for b, w in zip(bare, seconds, strict=True)]
    memory = {}
    for times in GROWTH:
        grown = grow(inputs, times, folder / "grown.jsonl")
        run = measure_prepare([grown], workers, folder)
        memory[f"{times}x"] = {key: run[key] for key in ("text_bytes", "peak_bytes")}
        grown.unlink()
    return {
        "inputs": [path.name for path in inputs],
        "workers": workers,
        "documents": whole[0]["documents"],
        "tokens": whole[0]["tokens"],
        "text_bytes": text_bytes,
        "tiktoken_mb_per_sec": text_bytes / 1e6 / statistics.median(bare),
        "prepare_mb_per_sec": text_bytes / 1e6 / statistics.median(seconds),
        "share_of_tiktoken": statistics.median(ratios),
        "share_of_tiktoken_spread": [min(ratios), max(ratios)],
        "memory": memory,
    }


def main() -> None:
    # Here, because the tokenising processes import this file, and these two bring torch.
    from mamba3_lite.hardware import environment_record
    from mamba3_lite.quickstart import write_corpus

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="*", type=Path)
    parser.add_argument("--mix", nargs="+", type=folder_and_weight, metavar="FOLDER=WEIGHT")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    what = "prepare_mix" if arguments.mix else "prepare"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.mix:
            measured = measure_mix(dict(arguments.mix), arguments.workers, folder / "out")
        else:
            inputs = arguments.inputs or [folder / "corpus.jsonl"]
            if not arguments.inputs:
                write_corpus(inputs[0])
            measured = measure_speed(inputs, arguments.workers, arguments.repeats, folder)
    row = {
        "what": what,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment_record(),
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{what}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({key: row[key] for key in row if key != "environment"}, indent=2))


if __name__ == "__main__":
    main()

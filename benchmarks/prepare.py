"""Speed and memory of `mamba3-lite prepare`, beside bare tiktoken in two processes.

The documents are those of the given JSON-lines files, or of Python's own standard library. Both
rates are of the same texts in the same run; peak memory is measured at 1, 4 and 10 times the input,
each in a fresh process (the one that reads and writes). Appends one JSON row to
benchmarks/results/prepare.jsonl.

    python benchmarks/prepare.py [FILE.jsonl ...] [--workers 2] [--repeats 3]
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "prepare.jsonl"
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


def main() -> None:
    # Here, because the tokenising processes import this file, and these two bring torch.
    from mamba3_lite.hardware import environment_record
    from mamba3_lite.quickstart import write_corpus

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = arguments.inputs or [folder / "corpus.jsonl"]
        if not arguments.inputs:
            write_corpus(inputs[0])
        bare, whole = [], []
        # By turns, so that a slow minute of the machine hits both.
        for _ in range(arguments.repeats):
            bare.append(measure_tiktoken(inputs, arguments.workers))
            whole.append(measure_prepare(inputs, arguments.workers, folder))
        text_bytes = whole[0]["text_bytes"]
        seconds = [run["seconds"] for run in whole]
        ratios = [b / w for b, w in zip(bare, seconds, strict=True)]
        memory = {}
        for times in GROWTH:
            grown = grow(inputs, times, folder / "grown.jsonl")
            run = measure_prepare([grown], arguments.workers, folder)
            memory[f"{times}x"] = {key: run[key] for key in ("text_bytes", "peak_bytes")}
            grown.unlink()
    row = {
        "what": "prepare",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment_record(),
        "inputs": [path.name for path in inputs],
        "workers": arguments.workers,
        "documents": whole[0]["documents"],
        "tokens": whole[0]["tokens"],
        "text_bytes": text_bytes,
        "tiktoken_mb_per_sec": text_bytes / 1e6 / statistics.median(bare),
        "prepare_mb_per_sec": text_bytes / 1e6 / statistics.median(seconds),
        "share_of_tiktoken": statistics.median(ratios),
        "share_of_tiktoken_spread": [min(ratios), max(ratios)],
        "memory": memory,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({key: row[key] for key in row if key != "environment"}, indent=2))


if __name__ == "__main__":
    main()

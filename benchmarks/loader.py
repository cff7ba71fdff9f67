"""Times the loader alone, one row a variant: how many tokens a second it can hand over.

    python benchmarks/loader.py --out benchmarks/results/loader.jsonl

The data are seeded random documents in our own shards, written to a temporary folder and warm in
the page cache, so a row measures the program and not the disk. A variant is an order, document
mode (with the boundary targets masked) or not, and a number of workers (0: the reading thread). A
row states the median and the spread of its rounds, the machine, the versions and the commit.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite import hardware
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.loader import ORDERS, SampleOrder, make_loader
from mamba3_lite.data.tokenizer import GPT2_VOCAB_SIZE
from mamba3_lite.measure.bench_cases import write_shards


def rates(
    data: PretrainDataset, order: str, *, batch: int, tokens: int, rounds: int, **options: Any
) -> list[float]:
    """Tokens a second of each round; the start of workers and thread is left out."""
    plan = SampleOrder(len(data), order)
    loader = make_loader(data, plan, start_sample=0, batch_size=batch, **options)
    batches = max(1, tokens // (batch * data.max_seq_len))
    for _ in itertools.islice(loader, 8):
        pass
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in itertools.islice(loader, batches):
            pass
        found.append(batches * batch * data.max_seq_len / (time.perf_counter() - start))
    return sorted(found)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--corpus-tokens", type=int, default=100_000_000)
    ap.add_argument("--document-tokens", type=int, default=700, help="mean length of a document")
    ap.add_argument("--tokens", type=int, default=20_000_000, help="tokens of a timed round")
    ap.add_argument("--pin-memory", action="store_true", help="as a run on CUDA does")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    environment = hardware.environment_record()
    if args.commit:
        environment["git"] = {"commit": args.commit, "dirty": False}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "shards"
        documents = write_shards(folder, args.corpus_tokens, args.document_tokens, GPT2_VOCAB_SIZE)
        for order, mode, workers in itertools.product(ORDERS, (False, True), args.workers):
            data = PretrainDataset(
                folder, args.length, GPT2_VOCAB_SIZE, document_mode=mode, mask_boundary_targets=mode
            )
            found = rates(
                data, order, batch=args.batch, tokens=args.tokens, rounds=args.rounds,
                num_workers=workers, pin_memory=args.pin_memory,
            )  # fmt: skip
            row = {
                "benchmark": "loader",
                "order": order,
                "document_mode": mode,
                "mask_boundary_targets": mode,
                "num_workers": workers,
                "pin_memory": args.pin_memory,
                "batch": args.batch,
                "seq_len": args.length,
                "tokens_per_sec": round(found[len(found) // 2]),
                "min_tokens_per_sec": round(found[0]),
                "max_tokens_per_sec": round(found[-1]),
                "rounds": len(found),
                "round_tokens": args.tokens,
                "corpus_tokens": data.n_tokens,
                "corpus_documents": documents,
            }
            print(json.dumps(row), flush=True)
            row |= {
                "environment": environment,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

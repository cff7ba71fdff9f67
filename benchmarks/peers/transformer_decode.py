"""Decoding speed of a Transformer of equal size (433 M parameters) with a KV cache, in bfloat16.

    python benchmarks/peers/transformer_decode.py [BATCH:CONTEXT ...]

Needs a CUDA GPU. A step is compiled block by block and captured as one CUDA graph; the cache is
full of random numbers, since speed does not depend on them. Prints a line per BATCH:CONTEXT.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_PADDED, D_MODEL, LAYERS, HEADS, FFN = 50304, 1024, 28, 16, 3072
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.gate_up = nn.Linear(D_MODEL, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, D_MODEL, bias=False)
        self.norm1 = nn.Parameter(torch.ones(D_MODEL))
        self.norm2 = nn.Parameter(torch.ones(D_MODEL))

    def before(self, x, cos, sin):
        q, k, v = (
            self.qkv(F.rms_norm(x, (D_MODEL,), self.norm1, 1e-5))
            .view(len(x), 3, HEADS, -1)
            .unbind(1)
        )

        def rotate(a):
            a1, a2 = a.chunk(2, -1)
            return torch.cat([a1 * cos - a2 * sin, a1 * sin + a2 * cos], -1)

        return rotate(q), rotate(k), v

    def after(self, x, y):
        x = x + self.out(y)
        gate, up = self.gate_up(F.rms_norm(x, (D_MODEL,), self.norm2, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_PADDED, D_MODEL)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm_f = nn.Parameter(torch.ones(D_MODEL))

    def step(self, ids, cos, sin, caches, slot):
        """ids (B,) at the last place of a full cache (B, H, context, D)."""
        x = self.embed(ids)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            q, k, v = layer.before(x, cos, sin)
            keys[:, :, slot], values[:, :, slot] = k, v
            y = F.scaled_dot_product_attention(q[:, :, None], keys, values)
            x = layer.after(x, y.flatten(1))
        return F.linear(F.rms_norm(x, (D_MODEL,), self.norm_f, 1e-5), self.embed.weight).argmax(-1)


@torch.no_grad()
def measure(model, batch, context, steps=100):
    shape = (batch, HEADS, context, D_MODEL // HEADS)
    caches = [
        tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(LAYERS)
    ]
    half = D_MODEL // HEADS // 2
    angle = context * 10000 ** (-torch.arange(half, device=DEVICE) / half)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    for _ in range(3):
        ids.copy_(model.step(ids, cos, sin, caches, context - 1))
    if DEVICE == "cpu":
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids.copy_(model.step(ids, cos, sin, caches, context - 1))
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(steps):
        graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    us = 1e3 * marks[0].elapsed_time(marks[1]) / steps
    params = sum(p.numel() for p in model.parameters()) / 1e6
    kv = sum(c.nbytes for pair in caches for c in pair) / 2**20
    print(
        f"transformer {params:.0f}M batch {batch} context {context}: {us:.0f} us a step "
        f"{batch / us * 1e6:,.0f} tok/s KV cache {kv:,.0f} MiB",
        flush=True,
    )


def main():
    model = Transformer().to(DEVICE).bfloat16()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    if DEVICE == "cuda":
        for layer in model.layers:
            layer.before, layer.after = torch.compile(layer.before), torch.compile(layer.after)
    for spec in sys.argv[1:] or ["1:2048", "1:32768", "1:131072", "64:2048"]:
        torch.cuda.empty_cache()
        try:
            measure(model, *(int(n) for n in spec.split(":")))
        except torch.cuda.OutOfMemoryError:
            print(f"transformer batch:context {spec}: out of memory", flush=True)


if __name__ == "__main__":
    main()

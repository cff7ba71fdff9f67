"""Tokenizer files for transformers: `AutoTokenizer` on them gives the ids of `data/tokenizer.py`.

Three settings make that so. Text that spells a special token stays text (`split_special_tokens`);
nothing is added around a text (no post-processor); and decoding changes no space.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from mamba3_lite.data.tokenizer import (
    EOS_TEXT,
    GPT2_EOS_ID,
    Gpt2Tokenizer,
    Tokenizer,
    gpt2_encoding,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """JSON content by file name."""
    if isinstance(tokenizer, Gpt2Tokenizer):
        whole, eos = _gpt2_json(), EOS_TEXT
    else:
        whole = json.loads(Path(tokenizer.name).read_bytes())
        whole |= {"truncation": None, "padding": None, "post_processor": None}
        eos = _token_of(whole, tokenizer.eos_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        "padding_side": "left",  # what a batched `generate` needs
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return dict(zip(TOKENIZER_FILES, (whole, settings), strict=True))


def _token_of(whole: dict[str, Any], token_id: int) -> str:
    for added in whole.get("added_tokens") or []:
        if added["id"] == token_id:
            return added["content"]
    vocab = whole["model"]["vocab"]  # of a unigram model a list of [token, score]
    names = {i: token for token, i in vocab.items()} if isinstance(vocab, dict) else vocab
    token = names[token_id]
    return token if isinstance(token, str) else token[0]


def _gpt2_json() -> dict[str, Any]:
    """The vendored ranks as a byte-level BPE: a token's rank is its id and its merge's priority."""
    encoding = gpt2_encoding()
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(GPT2_EOS_ID)}
    visible = _visible_bytes()

    def shown(token: bytes) -> str:
        return "".join(visible[byte] for byte in token)

    merges = [[shown(part) for part in _halves(t, ranks)] for t in ranks if len(t) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": GPT2_EOS_ID, "content": EOS_TEXT, "single_word": False, "lstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"rstrip": False, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {shown(t): i for t, i in ranks.items()} | {EOS_TEXT: GPT2_EOS_ID},
            "merges": merges,
        },
    }


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge made this one: what earlier merges leave of its bytes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        merged = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        at = merged.index(min(merged))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    first, second = parts
    return first, second


def _visible_bytes() -> list[str]:
    """GPT-2's alphabet: a printable character for every byte, itself where it is one."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]

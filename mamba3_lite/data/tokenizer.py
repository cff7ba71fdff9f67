"""Tokenizers: the vendored GPT-2 BPE, or any `tokenizer.json`.

Nothing here touches the network: the GPT-2 ranks ship with the package and are checked by length
and SHA-256 before use. Text that spells a special token ("<|endoftext|>") is encoded as ordinary
text, so a document cannot forge a boundary.
"""

import base64
import functools
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tiktoken

from mamba3_lite.errors import UserError

if TYPE_CHECKING:
    import tokenizers

GPT2_BYTES = 835_554
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_VOCAB_SIZE = 50_257
GPT2_EOS_ID = 50_256
EOS_TEXT = "<|endoftext|>"

# Possessive forms of GPT-2's published pattern: the same tokens, without the backtracking that
# makes long runs of one kind slow.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# A tokenizer.json does not say which token ends a document; these are the usual names.
_EOS_NAMES = (EOS_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

MAX_PIECE_CHARS = 65_536
_CUT = re.compile(r"[ \t\n\r](?=\S)")
_CUT_SEARCH_CHARS = 4_096


class Tokenizer(Protocol):
    """What the rest of the project needs of a tokenizer. Ids are ints in 0..vocab_size-1."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` was given."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the file that defines the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no EOS added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on two threads where the library allows it."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""


class Gpt2Tokenizer:
    """GPT-2 BPE from the vendored ranks: 50,257 ids, EOS = 50,256."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB_SIZE
    eos_id = GPT2_EOS_ID
    fingerprint = GPT2_SHA256

    def encode(self, text: str) -> list[int]:
        if len(text) <= MAX_PIECE_CHARS:
            return gpt2_encoding().encode_ordinary(text)
        ids: list[int] = []
        for piece in split_text(text):
            ids += gpt2_encoding().encode_ordinary(piece)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) > MAX_PIECE_CHARS for text in texts):
            return [self.encode(text) for text in texts]
        return gpt2_encoding().encode_ordinary_batch(list(texts), num_threads=2)

    def decode(self, ids: Iterable[int]) -> str:
        return gpt2_encoding().decode([int(i) for i in ids])


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`; special-token text stays ordinary, nothing is added."""

    def __init__(self, path: str | Path) -> None:
        self._tokenizer, raw = _read_tokenizer_json(Path(path))
        # Otherwise "</s>" inside a document would become the real token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_id = _find_eos(Path(path), vocab)
        self.fingerprint = hashlib.sha256(raw).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "gpt2", or the path of a `tokenizer.json`.

    Raises `UserError` for an unknown name, a missing or damaged file, or a file without an EOS.
    """
    if name == "gpt2":
        gpt2_encoding()
        return Gpt2Tokenizer()
    _check_name(name)
    return JsonTokenizer(name)


def fingerprint_of(name: str) -> str:
    """The `fingerprint` of `load_tokenizer(name)`, without loading it: that may need an extra."""
    if name == "gpt2":
        return GPT2_SHA256
    _check_name(name)
    return hashlib.sha256(_read_json(Path(name))).hexdigest()


def split_text(text: str, limit: int = MAX_PIECE_CHARS) -> Iterator[str]:
    """Yield `text` in pieces of at most `limit` characters whose GPT-2 ids join to the whole's ids.

    A token never crosses the point before a white-space character that a visible one follows, so
    pieces end there. Only where the last 4,096 characters of a piece have no such point is it cut
    hard. Short pieces matter: tiktoken's regex engine overflows its stack on blank runs of some
    10^5 characters.
    """
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        search_from = max(start + 1, stop - _CUT_SEARCH_CHARS)
        # The lookahead may see the character at `stop`: it is text that really follows.
        cuts = [m.start() for m in _CUT.finditer(text, search_from, stop + 1)]
        cut = cuts[-1] if cuts else stop
        yield text[start:cut]
        start = cut
    yield text[start:]


@functools.lru_cache(maxsize=1)
def gpt2_encoding() -> tiktoken.Encoding:
    ranks = {}
    for line in _gpt2_ranks_file().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=GPT2_VOCAB_SIZE,
        pat_str=_GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={EOS_TEXT: GPT2_EOS_ID},
    )


def _gpt2_ranks_file() -> bytes:
    asset = resources.files("mamba3_lite.data").joinpath("assets", "gpt2.tiktoken.xz")
    try:
        raw = lzma.decompress(asset.read_bytes())
    except (OSError, lzma.LZMAError) as exc:
        raise UserError(f"{asset}: missing or damaged ({exc}); reinstall mamba3-lite") from exc
    if len(raw) != GPT2_BYTES or hashlib.sha256(raw).hexdigest() != GPT2_SHA256:
        raise UserError(
            f"{asset}: damaged (length or SHA-256 of the GPT-2 ranks is wrong); "
            "reinstall mamba3-lite"
        )
    return raw


def _check_name(name: str) -> None:
    if not name.endswith(".json"):
        raise UserError(
            f"tokenizer: {name!r} is not known; use 'gpt2' or the path of a tokenizer.json"
        )


def _read_json(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise UserError(f"tokenizer: cannot read {path} ({exc.strerror})") from exc


def _read_tokenizer_json(path: Path) -> "tuple[tokenizers.Tokenizer, bytes]":
    try:
        import tokenizers
    except ImportError as exc:
        raise UserError(
            f"tokenizer: {path} needs the `tokenizers` package; "
            'run pip install "mamba3-lite[tokenizers]"'
        ) from exc
    raw = _read_json(path)
    # The library raises a bare Exception for a file it cannot parse.
    try:
        return tokenizers.Tokenizer.from_str(raw.decode("utf-8")), raw
    except Exception as exc:
        raise UserError(f"tokenizer: {path} is not a usable tokenizer.json ({exc})") from exc


def _find_eos(path: Path, vocab: dict[str, int]) -> int:
    """The EOS id: what a `tokenizer_config.json` beside the file names, else a usual name."""
    names: tuple[str, ...] = _EOS_NAMES
    config_path = path.with_name("tokenizer_config.json")
    if config_path.is_file():
        try:
            config: Any = json.loads(config_path.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise UserError(f"tokenizer: {config_path} is not JSON ({exc})") from exc
        named = config.get("eos_token") if isinstance(config, dict) else None
        named = named.get("content") if isinstance(named, dict) else named
        names = (named,) if isinstance(named, str) else names
    for name in names:
        if name in vocab:
            return vocab[name]
    raise UserError(
        f"tokenizer: {path} has no end-of-document token (looked for {', '.join(names)}); "
        'name it as "eos_token" in a tokenizer_config.json beside it'
    )

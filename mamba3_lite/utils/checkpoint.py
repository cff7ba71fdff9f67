"""Checkpoints that survive a kill at any instant.

A checkpoint of optimizer step N is three files in one folder:

- ``model_step_N.safetensors``: the weights, tied tensors stored once;
- ``optim_step_N.pt``: the training state (optimizer, schedule, random state, counters);
- ``meta_step_N.json``: size and SHA-256 of the other two, the caller's metadata, its own SHA-256.

Order of a save, and why no kill can lose anything:

1. All three files are written and fsynced under temporary names, meta last. A kill here leaves
   older checkpoints (an older version of the same step included) as they were.
2. Once the temporary meta file is durable, its hashes name a complete new checkpoint. An existing
   meta file of the step is removed *first*, so the step never mixes an old record with new data;
   then model, optimizer state and meta are renamed in that order. A kill here is put right by the
   next ``load`` or ``save``: it finds the temporary meta file, checks every hash and finishes.

A removal runs backwards (rename to temporary names, then delete), so it leaves no orphans either.
One process publishes in a folder; any number may read.

A sharded checkpoint has a folder ``shards_step_N`` in the place of the two data files, into which
every rank has written its part (:mod:`mamba3_lite.utils.sharded`). Whoever loads gets the same
:class:`Checkpoint` either way.
"""

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mamba3_lite.errors import UserError, reading
from mamba3_lite.utils.sharded import read_whole
from mamba3_lite.utils.weights import name_some, store_once

FORMAT = "mamba3-lite checkpoint 1"
# In the order of publishing; shards are a folder.
_SUFFIX = {"shards": "", "model": "safetensors", "optim": "pt", "meta": "json"}
_LAYOUTS = ({"model", "optim", "meta"}, {"shards", "meta"})
_FILE = re.compile(r"(model|optim|meta|shards)_step_(0|[1-9]\d*)(?:\.(safetensors|pt|json))?")
_TEMPORARY_PREFIX = ".mamba3lite-tmp-"
_TEMPORARY = re.compile(re.escape(_TEMPORARY_PREFIX) + r"([1-9]\d{0,6})-(.+)")
_PLAIN_TYPES = frozenset(
    {type(None), bool, int, float, str, bytes, Tensor, nn.Parameter, torch.Size, torch.dtype}
)


class NonFiniteWeights(RuntimeError):
    """The weights hold NaN or Inf; such a checkpoint would poison every later rollback."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; older ones are untouched, ``__cause__`` tells why."""


class _NotIntact(Exception):
    """Why a step or one of its files cannot be used; never leaves this module."""


@dataclass(frozen=True)
class Checkpoint:
    """One verified checkpoint, on the CPU.

    ``model`` maps names to tensors (tied names share one tensor object), ``training`` is the
    caller's training state, ``meta`` its JSON metadata.
    """

    opt_step: int
    model: dict[str, Tensor]
    training: dict[str, Any]
    meta: dict[str, Any]


class CheckpointManager:
    """Writes, verifies, finds and prunes the checkpoints of one folder.

    The ``keep_last`` newest checkpoints are kept (0 = all), and with ``keep_every`` = K > 0 every
    one whose opt_step is a multiple of K for ever. ``log`` receives one line for each thing worth
    knowing; the attribute may be set anew. Nothing is created before ``save``.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        log: Callable[[str], None] = print,
    ) -> None:
        assert keep_last >= 0 and keep_every >= 0
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.log = log
        self._last_saved: int | None = None

    def save(
        self,
        opt_step: int,
        model_tensors: Mapping[str, Tensor],
        training_state: dict[str, Any],
        meta: dict[str, Any],
    ) -> None:
        """Write the checkpoint of ``opt_step`` (replacing one of the same step), then prune.

        ``training_state`` holds tensors, numbers, strings, None, lists, tuples and dicts; anything
        else could not be loaded with ``weights_only=True`` and raises ``TypeError`` here rather
        than at the next resume. ``meta`` must be JSON without NaN. Raises ``NonFiniteWeights`` or
        ``CheckpointWriteError``; in both cases nothing older is touched.
        """
        _require_finite(opt_step, model_tensors)
        _require_plain(training_state, "training_state")
        with self._writing(opt_step):
            self._clear()
            self._write_temporaries(opt_step, model_tensors, training_state, meta)
            self._publish(opt_step, os.getpid())
        self._last_saved = opt_step
        self.prune()

    def sharded_folder(self, opt_step: int) -> Path:
        """A new folder for the shards of a checkpoint, which every rank then writes to.

        Raises:
            CheckpointWriteError: it cannot be made.
        """
        with self._writing(opt_step):
            self._clear()
            folder = self._temporary("shards", opt_step, os.getpid())
            folder.mkdir()
        return folder

    def publish_sharded(
        self, opt_step: int, fingerprints: Mapping[str, dict[str, Any]], meta: dict[str, Any]
    ) -> None:
        """Makes a checkpoint of what lies in the :meth:`sharded_folder`, then prunes.

        Args:
            fingerprints: :func:`fingerprint` by name in that folder, of every file in it.

        Raises:
            CheckpointWriteError: as ``save``.
        """
        folder = self._path("shards", opt_step).name
        with self._writing(opt_step):
            record = self._temporary("meta", opt_step, os.getpid())
            files = {f"{folder}/{name}": found for name, found in fingerprints.items()}
            record.write_bytes(_render_record(opt_step, files, meta))
            fsync(record)
            fsync(self.directory)
            self._publish(opt_step, os.getpid())
        self._last_saved = opt_step
        self.prune()

    @contextmanager
    def _writing(self, opt_step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointWriteError(
                f"checkpoint of step {opt_step} could not be written to {self.directory}: {error}; "
                "older checkpoints are untouched; make room or mend the folder"
            ) from error

    def _clear(self) -> None:
        """Finishes what a kill has interrupted, and removes what cannot be finished."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._finish_interrupted()
        for path, *_ in self._temporaries():
            _remove(path)

    def steps(self) -> list[int]:
        """Opt steps whose files are all present, ascending; ``verify`` tells which are intact."""
        return [step for step, kinds in self._found().items() if kinds in _LAYOUTS]

    def verify(self, opt_step: int) -> str | None:
        """Why the checkpoint of ``opt_step`` is not intact, or None. Reads and hashes all of it."""
        try:
            self._verified_record(opt_step)
        except _NotIntact as reason:
            return str(reason)
        return None

    def load(self, opt_step: int | None) -> Checkpoint | None:
        """The checkpoint of ``opt_step``, or for None the newest intact one.

        One log line tells which was loaded, one each which was passed over and why. Every hash is
        checked before anything is deserialised. Returns None only for None and a folder without any
        checkpoint file; raises ``UserError`` when the step asked for is absent or damaged, or when
        checkpoints are there and none is intact, or the folder may not be read.
        """
        with reading(str(self.directory), "mend its permissions or choose another run folder"):
            self._finish_interrupted()
            found = list(self._found())
            if opt_step is not None:
                try:
                    return self._read(opt_step)
                except _NotIntact as reason:
                    raise UserError(
                        f"checkpoint of step {opt_step} in {self.directory} cannot be used: "
                        f"{reason}; steps available: {', '.join(map(str, self.steps())) or 'none'}"
                    ) from None
            for step in reversed(found):
                try:
                    return self._read(step)
                except _NotIntact as reason:
                    self.log(f"[checkpoint] step {step} passed over: {reason}")
            if not found:
                return None
            raise UserError(
                f"{self.directory} holds no intact checkpoint (damaged or partial: steps "
                f"{', '.join(map(str, found))}); restore one, or start in another checkpoint folder"
            )

    def prune(self) -> None:
        """Remove complete checkpoints of ours that ``keep_last`` and ``keep_every`` do not keep.

        The one saved last stays whatever its number: after a rollback it is not the highest.
        """
        if self.keep_last == 0:
            return
        ours = [step for step in self.steps() if _is_ours(self._path("meta", step), step)]
        kept = {*ours[-self.keep_last :], self._last_saved}
        for step in ours:
            if step in kept or (self.keep_every and step % self.keep_every == 0):
                continue
            kinds = [k for k in reversed(_SUFFIX) if self._path(k, step).exists()]
            for kind in kinds:
                os.replace(self._path(kind, step), self._temporary(kind, step, os.getpid()))
            for kind in kinds:
                _remove(self._temporary(kind, step, os.getpid()))

    def _path(self, kind: str, opt_step: int) -> Path:
        suffix = _SUFFIX[kind]
        return self.directory / f"{kind}_step_{opt_step}{suffix and '.'}{suffix}"

    def _temporary(self, kind: str, opt_step: int, pid: int) -> Path:
        return self.directory / f"{_TEMPORARY_PREFIX}{pid}-{self._path(kind, opt_step).name}"

    def _found(self) -> dict[int, set[str]]:
        """Kinds of file present for each opt step, ascending."""
        found: dict[int, set[str]] = {}
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if (named := _parse_name(path.name)) and path.is_dir() == (named[0] == "shards"):
                found.setdefault(named[1], set()).add(named[0])
        return dict(sorted(found.items()))

    def _write_temporaries(
        self,
        opt_step: int,
        model_tensors: Mapping[str, Tensor],
        training_state: dict[str, Any],
        meta: dict[str, Any],
    ) -> None:
        data = ("model", "optim")
        model, optim, record = (
            self._temporary(kind, opt_step, os.getpid()) for kind in (*data, "meta")
        )
        try:
            unique, aliases = store_once(model_tensors)
            save_file(unique, model, metadata={"aliases": json.dumps(aliases, sort_keys=True)})
            _save_training_state(training_state, optim)
            files = {}
            for kind, path in zip(data, (model, optim), strict=True):
                fsync(path)
                files[self._path(kind, opt_step).name] = fingerprint(path)
            record.write_bytes(_render_record(opt_step, files, meta))
            fsync(record)
            fsync(self.directory)
        except BaseException:
            for path in (record, model, optim):
                path.unlink(missing_ok=True)
            raise

    def _publish(self, opt_step: int, pid: int) -> None:
        """Rename the temporary files of ``opt_step``; may be run again after a kill inside it."""
        old_record = self._path("meta", opt_step)
        if old_record.exists():
            old_record.unlink()
            fsync(self.directory)
        for kind in _SUFFIX:
            if kind == "meta":
                fsync(self.directory)  # a durable meta file promises two durable others
            if (temporary := self._temporary(kind, opt_step, pid)).exists():
                if kind == "shards" and self._path(kind, opt_step).exists():
                    _remove(self._path(kind, opt_step))  # no rename goes over a folder
                os.replace(temporary, self._path(kind, opt_step))
        fsync(self.directory)

    def _temporaries(self) -> list[tuple[Path, int, str, int]]:
        """(path, pid, kind, opt_step) of our temporary files that no live process is writing."""
        found = []
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or (named := _parse_name(match[2])) is None:
                continue
            pid = int(match[1])
            # Files under our own id are left from an earlier save: none is in progress now.
            if pid == os.getpid() or not _is_alive(pid):
                found.append((path, pid, *named))
        return found

    def _finish_interrupted(self) -> None:
        """Publish every complete checkpoint that a kill left under temporary names."""
        if not os.access(self.directory, os.W_OK):
            return
        for path, pid, kind, step in self._temporaries():
            if kind != "meta":
                continue
            try:
                for name, found in _read_record(path, step)["files"].items():
                    temporary = self.directory / f"{_TEMPORARY_PREFIX}{pid}-{name}"
                    source = temporary if temporary.exists() else self.directory / name
                    _require_match(source, found)
            except _NotIntact:
                continue  # a half-written save, not a checkpoint: the next save removes it
            self._publish(step, pid)
            self.log(f"[checkpoint] finished the interrupted save of step {step}")

    def _verified_record(self, opt_step: int) -> dict[str, Any]:
        if not self._path("shards", opt_step).is_dir():
            for kind in ("model", "optim"):
                if not (path := self._path(kind, opt_step)).is_file():
                    raise _NotIntact(f"{path.name} is missing")
        record = _read_record(self._path("meta", opt_step), opt_step)
        for name, found in record["files"].items():
            _require_match(self.directory / name, found)
        return record

    def _read(self, opt_step: int) -> Checkpoint:
        record = self._verified_record(opt_step)
        if (shards := self._path("shards", opt_step)).is_dir():
            model, training = read_whole(shards)
            self.log(f"[checkpoint] loaded step {opt_step} from {self.directory}")
            return Checkpoint(opt_step, model, training, record["meta"])
        path = self._path("model", opt_step)
        with safe_open(path, framework="pt") as header:
            aliases = json.loads(header.metadata()["aliases"])
        model = load_file(path)
        for alias, name in aliases.items():
            model[alias] = model[name]
        training = torch.load(self._path("optim", opt_step), map_location="cpu", weights_only=True)
        self.log(f"[checkpoint] loaded step {opt_step} from {self.directory}")
        return Checkpoint(opt_step, model, training, record["meta"])


def estimate_bytes(model_tensors: Mapping[str, Tensor]) -> int:
    """Bytes one checkpoint will take: weights once, two AdamW moments each, 1 MiB for the rest."""
    unique, _ = store_once(model_tensors)
    return 3 * sum(tensor.nbytes for tensor in unique.values()) + 2**20


def require_free_space(directory: str | Path, needed_bytes: int) -> None:
    """``UserError`` unless ``directory`` (it need not exist yet) has ``needed_bytes`` free."""
    folder = Path(directory).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"{directory} needs {needed_bytes / 2**30:.2f} GiB for checkpoints but only "
            f"{free / 2**30:.2f} GiB are free; make room or choose another checkpoint folder"
        )


def _is_ours(path: Path, opt_step: int) -> bool:
    with suppress(_NotIntact):
        return bool(_read_record(path, opt_step))
    return False


def _parse_name(name: str) -> tuple[str, int] | None:
    """(kind, opt_step) of one of our names, else None."""
    match = _FILE.fullmatch(name)
    if match is None or (match[3] or "") != _SUFFIX[match[1]]:
        return None
    return match[1], int(match[2])


def _require_finite(opt_step: int, tensors: Mapping[str, Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        which = name_some("tensors with NaN or Inf", bad)
        raise NonFiniteWeights(f"checkpoint of step {opt_step} not written: {which}")


def _require_plain(value: Any, where: str) -> None:
    """``TypeError`` for what ``torch.load(weights_only=True)`` refuses, numpy scalars included."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _require_plain(key, f"key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN_TYPES:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a training state "
            "holds only tensors, numbers, strings, None, lists, tuples and dicts"
        )


def _save_training_state(training_state: dict[str, Any], path: Path) -> None:
    try:
        with open(path, "wb") as file:
            torch.save(training_state, file)
    except RuntimeError as error:
        # After a failed write torch closes its archive and reports only that failure.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def fsync(path: Path) -> None:
    """Make a file's data, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and another user's
    return True


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as a record holds them."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _require_match(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise _NotIntact(f"{path.name} is missing")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise _NotIntact(f"{path.name} has {size} bytes instead of {expected['bytes']}")
    if fingerprint(path) != expected:
        raise _NotIntact(f"{path.name} is damaged (SHA-256 differs)")


def _canonical(value: Any) -> bytes:
    # NaN would be a token that other JSON readers refuse, so it is refused here.
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _self_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _render_record(opt_step: int, files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> bytes:
    # A round trip turns tuples and number keys into what a reader gets, so the hash covers that.
    plain = json.loads(_canonical(meta))
    body = {"format": FORMAT, "opt_step": opt_step, "files": files, "meta": plain}
    return _canonical(body | {"self_sha256": _self_hash(body)})


def _read_record(path: Path, opt_step: int) -> dict[str, Any]:
    """Parsed meta file, or ``_NotIntact``: any byte unlike what was written is noticed."""
    if not path.is_file():
        raise _NotIntact(f"{path.name} is missing")
    raw = path.read_bytes()
    try:
        record = json.loads(raw)
        rendered = _canonical(record)
    except ValueError:
        raise _NotIntact(f"{path.name} is damaged (not JSON)") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _NotIntact(f"{path.name} is damaged or not a record of ours ({FORMAT!r})")
    body = {key: value for key, value in record.items() if key != "self_sha256"}
    # Comparing the bytes, too, catches a change that parses to the same values (white space, say).
    if record.get("self_sha256") != _self_hash(body) or raw != rendered:
        raise _NotIntact(f"{path.name} is damaged (its own SHA-256 differs)")
    if record["opt_step"] != opt_step:
        raise _NotIntact(f"{path.name} belongs to step {record['opt_step']}")
    return record

"""Whole steps of one sequence by the kernel of ``kernels/decode_resident.cu``.

That is CUDA C++, which NVRTC compiles; both it and the bindings to the driver come with a CUDA
build of PyTorch.
"""

import ctypes
import functools
import hashlib
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba3_lite.errors import UserError
from mamba3_lite.inference.decode_weights import Buffers, Weights
from mamba3_lite.models.ssd_plans import choices_path, keep_bytes

SOURCE = Path(__file__).parent.parent / "kernels" / "decode_resident.cu"
# As in the source: of the 8 warps that compute, and with 4 of which one loads.
_THREADS, _ALL_THREADS = 256, 384
_UNITS = (1024, 512, 256)
_MOST_PIECES, _MOST_ROWS = 4, 32
# Of a thread, for weights that wait for x; and whose partial sums have room.
_MOST_REGISTERS, _MOST_TILES = 128, 15
_UNIT_PADDING = 64
# Bytes, of what a copy engine reads.
_ALIGNMENT = 16
# What a program may have on Hopper, less what it needs beside the ring.
_SHARED_BYTES, _FIXED_BYTES = 227 * 2**10, 12 * 2**10
# Units of weights asked for at once and clocks between, found by timing whole steps of the
# production model (docs/LOG.md): without rests they stand in the way of the results that travel.
_BURST, _REST = 8, 1100
_DIGEST = 32


class ResidentError(UserError):
    """The kernel cannot be compiled, loaded or launched here; says why."""


class Cut(NamedTuple):
    """How a model is shared out: see the legend of the source."""

    unit: int
    programs: int
    slots: int

    @property
    def ring_bytes(self) -> int:
        return self.slots * (2 * self.unit + _UNIT_PADDING)


def cut(weights: Weights, buffers: Buffers, multiprocessors: int) -> Cut | None:
    """None: the kernel cannot take this model, or not on so few multiprocessors."""
    (vocabulary, width), projected = weights.head.shape, buffers.proj.shape[1]
    inputs = (width, buffers.y.shape[1], buffers.act.shape[1])
    layers, batch, heads, rows, channels = buffers.state.shape
    unit = next((u for u in _UNITS if not any(n % u for n in inputs)), None)
    read = (t for layer in weights.layers for t in layer)
    aligned = not any(t.data_ptr() % _ALIGNMENT for t in (*read, weights.norm_f, weights.head))
    taken = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)
    narrow = (buffers.x.dtype, buffers.state.dtype) in taken
    if batch != 1 or not narrow or unit is None or not aligned:
        return None
    pieces = [n // unit for n in inputs]
    proj_rows = -(-projected // multiprocessors)
    # Every program has rows of in_proj: the kernel relies on it.
    programs = -(-projected // proj_rows)
    model_rows, act_rows = -(-width // programs), -(-inputs[2] // programs)
    units = (
        proj_rows * pieces[0], model_rows * pieces[1], 2 * act_rows * pieces[0],
        model_rows * pieces[2],
    )  # fmt: skip
    in_proj, mixer, gate_up, down = (-(-n // 8) * unit // 64 for n in units)
    state_width = rows // 2
    slice_width = 2 * _THREADS // state_width
    fixed = _FIXED_BYTES + 68 * layers + 2 * unit * (max(pieces) + pieces[0])
    slots = (_SHARED_BYTES - fixed) // (2 * unit + _UNIT_PADDING) // 2 * 2
    fits = (
        state_width in (16, 32, 64, 128)
        and slice_width * buffers.state.element_size() >= 16
        and channels % slice_width == 0
        and heads * (channels // slice_width) <= programs
        and max(pieces) <= _MOST_PIECES
        and max(units) <= min(slots, 8 * _MOST_TILES)
        and down + max(in_proj, mixer + gate_up) <= _MOST_REGISTERS
        and max(model_rows, act_rows) <= _MOST_ROWS
        and vocabulary >= programs
    )
    return Cut(unit, programs, slots) if fits else None


def macros(weights: Weights, buffers: Buffers, shared_out: Cut) -> list[str]:
    """What the source is compiled with."""
    (vocabulary, width), (layers, _, heads, rows, channels) = (
        weights.head.shape, buffers.state.shape,
    )  # fmt: skip
    values = {
        "UNIT": shared_out.unit, "D": width, "I": buffers.y.shape[1], "F": buffers.act.shape[1],
        "V": vocabulary, "LAYERS": layers, "H": heads, "P": channels, "N": rows // 2,
        "PROGRAMS": shared_out.programs, "SLOTS": shared_out.slots, "BURST": _BURST,
        "REST": _REST, "EPS": weights.eps,
    }  # fmt: skip
    found = [f"-D{name}={value}" for name, value in values.items()]
    return found + ["-DSTATE_IS_BF16"] * (buffers.state.dtype == torch.bfloat16)


def compile_source(source: str, options: list[str]) -> bytes:
    """Machine code.

    Raises:
        ResidentError: what the compiler says.
    """
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), SOURCE.name.encode(), 0, [], []))
    every = ["--gpu-architecture=sm_90a", "--std=c++17", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(every), [o.encode() for o in every])
    if int(status):
        # Two bytes at least: one alone is an object that others share, and it is written into.
        log = b" " * max(2, _checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip("\0 \n")
        raise ResidentError(f"NVRTC: {status.name}: {said}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


@functools.lru_cache(maxsize=8)
def _load(source: str, options: tuple[str, ...]) -> Any:
    """The compiled kernel, kept on disk for the next process."""
    try:
        from cuda.bindings import driver, nvrtc

        version = _checked(nvrtc.nvrtcVersion())
        name = hashlib.sha256(repr((source, options, version)).encode()).hexdigest()[:20]
        path = choices_path(f"decode_resident-{name}.cubin")
        kept = path.read_bytes() if path.is_file() else b""
        code = kept[_DIGEST:]
        # A damaged one can crash the driver.
        if not code or hashlib.sha256(code).digest() != kept[:_DIGEST]:
            code = compile_source(source, list(options))
            keep_bytes(path, hashlib.sha256(code).digest() + code)
        library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        return _checked(driver.cuLibraryGetKernel(library, b"decode_steps"))
    except (ImportError, OSError, RuntimeError) as problem:  # a library or a driver is not there
        raise ResidentError(str(problem)) from problem


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call to the driver or the compiler gives, without its status."""
    status, *rest = result
    if int(status):
        raise ResidentError(f"CUDA: {status.name}")
    return rest[0] if len(rest) == 1 else rest


class Resident:
    """The kernel for these weights and buffers, on the current device.

    Raises:
        ResidentError: it cannot be compiled or loaded here.
    """

    def __init__(self, weights: Weights, buffers: Buffers):
        device = buffers.x.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        shared_out = cut(weights, buffers, processors)
        if shared_out is None:
            raise ResidentError("no cut of this model fits")
        self.weights, self.buffers, self.cut = weights, buffers, shared_out
        kernel = _load(SOURCE.read_text(), tuple(macros(weights, buffers, shared_out)))
        from cuda.bindings import driver

        self._function = _checked(driver.cuKernelGetFunction(kernel))
        most_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, most_shared, shared_out.ring_bytes))
        rows = [
            [t.data_ptr() for t in (w.norm1, w.in_proj, w.a, w.mixer, w.norm2, w.gate_up, w.down)]
            for w in weights.layers
        ]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        # Tags count from 1 on, so that none is that of an empty mailbox.
        self._epoch = torch.ones(1, dtype=torch.int32, device=device)
        widths = [buffers.x, buffers.proj, buffers.y, buffers.x, buffers.act]
        words = sum(-(-t.shape[1] // 4) * 4 for t in widths) + 4 * shared_out.programs
        self._boxes = torch.zeros(words, dtype=torch.int32, device=device)

    def run(self, steps: int, *, first: int = 0, layers: int | None = None) -> None:
        """See :func:`mamba3_lite.inference.decode_step.run_steps`.

        Args:
            first, layers: as if the model had only these layers; for tests.
        """
        from cuda.bindings import driver

        w, b = self.weights, self.buffers
        tensors = (
            self._table[first], w.embed, w.norm_f, w.head, b.ids, b.logits, b.best, b.state[first],
            self._boxes, self._epoch,
        )  # fmt: skip
        count = len(w.layers) - first if layers is None else layers
        values = (*(t.data_ptr() for t in tensors), count, steps, steps == 1)
        packed = struct.pack(f"{len(tensors)}Q3i4x", *values)
        argument = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        how = driver.CUlaunchConfig()
        how.gridDimX, how.gridDimY, how.gridDimZ = self.cut.programs, 1, 1
        how.blockDimX, how.blockDimY, how.blockDimZ = _ALL_THREADS, 1, 1
        how.sharedMemBytes = self.cut.ring_bytes
        how.hStream = torch.cuda.current_stream().cuda_stream
        # All programs run at once, or none: they wait for each other.
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        how.attrs, how.numAttrs = [together], 1
        _checked(driver.cuLaunchKernelEx(how, self._function, ctypes.addressof(pointers), 0))

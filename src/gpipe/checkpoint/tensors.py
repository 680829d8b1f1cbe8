"""Tensors as safetensors files, which the library reads, and which are written here.

The format: the length of a header (8 bytes), the header (JSON: type, shape and place of each tensor), the bytes.

Note "By hand". The library's `save_file` opens and writes by itself: the file would have to be read again for its
hash, nobody could sync it, a full disk would be a SafetensorError and no OSError, and no test could stop a process
between two writes. Its `serialize` gives all bytes at once, a second copy of the weights in memory. What is here is a
header and the bytes of each tensor in turn, for `write_file`, which hashes, writes and syncs them.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe._torch.modules import is_wrapper
from gpipe.checkpoint.files import opened as plainly_opened

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
LONGEST_HEADER = 10**8  # bytes, as safetensors itself has it
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def why_not_storable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be put into a file, if so."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet; run a step first"
    if tensor.is_meta:
        return "is on the meta device and has no values; build the layer for real first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {str(tensor.layout).removeprefix('torch.')} or quantized; only plain dense tensors can be stored"
    if tensor.dtype not in DTYPE_NAMES:
        return f"is of {tensor.dtype}, which safetensors has no name for; convert it"
    if is_wrapper(tensor) and not hasattr(tensor, "full_tensor"):
        return f"is a {type(tensor).__name__}, which is no plain tensor; convert it"
    return None


def encoded(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces; widest types first, so that each tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        if tensors[name].numel():
            yield _bytes_of(tensors[name])


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class Shelf:
    """The tensors of some files, found by name; values are read when asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.findings: list[str] = []
        self.home: dict[str, str] = {}  # the file of each tensor
        self._open: dict[str, safe_open] = {}
        for path in paths:
            if wrong := self._why_unreadable(path):
                self.findings.append(f"{path.name} {wrong}")
                continue
            try:
                opened = self._open[path.name] = safe_open(path, framework="pt")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]  # untyped in safetensors
            except (SafetensorError, OSError, RuntimeError) as error:
                self.findings.append(f"{path.name} is no safetensors file: {error}")
                continue
            for name in names:
                other = self.home.setdefault(name, path.name)
                if other != path.name:
                    self.findings.append(f"{path.name} and {other} both hold {name!r}; they are of different runs")

    @staticmethod
    def _why_unreadable(path: Path) -> str | None:
        """What is wrong with a file, if it cannot be opened without harm: safetensors opens whatever is there."""
        try:
            with plainly_opened(path, follow=True) as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(8)
        except (ValueError, OSError) as error:
            return str(error)
        if len(head) < 8 or struct.unpack("<Q", head)[0] > min(size - 8, LONGEST_HEADER):
            return "is no safetensors file: its header would be larger than the file, or than any"
        return None

    def look(self, name: str) -> Tensor:
        """A tensor as it lies in its file: nothing of it is read yet."""
        mapped: Tensor = self._open[self.home[name]].get_tensor(name)  # type: ignore[no-untyped-call]  # untyped in safetensors
        return mapped

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        return self.look(name).clone()

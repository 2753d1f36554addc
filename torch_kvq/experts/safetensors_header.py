"""Where the tensors of a safetensors file lie, without reading them."""

import json
import math
import os
import struct
from dataclasses import dataclass

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its first byte, shape and dtype."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ValueError: no safetensors file, one of a dtype unknown here, or one that is shorter than its header says, named.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise ValueError(f"{path} is no safetensors file, or truncated: its header needs {length:,} of {size:,} bytes")
        header = json.loads(file.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{path} is truncated: {name} ends at {8 + length + end:,} of {size:,} bytes")
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} must be of a dtype among {sorted(DTYPES)}, got {entry['dtype']}")
        tensors[name] = StoredTensor(path, 8 + length + begin, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return tensors

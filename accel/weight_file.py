"""Opening and writing weight files: what a file really is, whether it is whole, and its tensors mapped from disk. Knows nothing of models.

A pickle is read by ``torch.load(weights_only=True)`` and nothing else, so code inside a file never runs. Tensors stay mapped: a page is read when it is used.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import pickletools
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")

# The dtype names of the safetensors format (https://github.com/huggingface/safetensors, "Format").
_DTYPES = {
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
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

Reader = Callable[[str], tuple[Mapping[str, Tensor], Mapping[str, str] | None]]


class WeightFileError(ValueError):
    """A file is not what was asked for, or not whole; the message says what was found and what would work."""


@dataclass(frozen=True)
class WeightFile:
    """An opened file. ``content`` is what was stored (a mapping, possibly nested); ``metadata`` is the text header of a safetensors file."""

    path: Path
    kind: str  # "safetensors" or "pickle"
    content: Mapping
    metadata: Mapping[str, str]


def read_weight_file(path: str | Path, *, safetensors_reader: Reader | None = None) -> WeightFile:
    """Open ``path`` after checking that it is whole and is what its name says.

    ``safetensors_reader`` replaces the mapping of a checked safetensors file (the host's own reader, where that has one that streams). Raises WeightFileError.
    """
    path = Path(path)
    _refuse_what_is_no_weight_file(path)
    if path.suffix.lower() in SAFETENSORS_SUFFIXES:
        header, data_start = _safetensors_header(path)
        metadata = header.pop("__metadata__", None) or {}
        _check_safetensors_size(path, header, data_start)
        if safetensors_reader is not None:
            tensors, _ = safetensors_reader(str(path))
        else:
            tensors = _map_safetensors(path, header, data_start)
        return WeightFile(path, "safetensors", tensors, metadata)
    return WeightFile(path, "pickle", _load_pickle(path), {})


def read_safetensors_metadata(path: str | Path) -> dict[str, str]:
    """Return the text header of a safetensors file without touching its tensors; raises WeightFileError."""
    return _safetensors_header(Path(path))[0].get("__metadata__") or {}


def write_safetensors(
    path: str | Path,
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file tensor by tensor, so that no second copy of the model is held.

    ``specs`` gives shape and dtype by name; ``tensors`` yields the values in the same order. The file appears under its name only when it is
    whole: until then it is ``<name>.part``, which is removed on any failure. An existing file is never replaced.
    """
    path = Path(path)
    if path.exists():
        raise WeightFileError(f"{path} exists already and is not overwritten; move or delete it to write it again")
    header, offset = {"__metadata__": {str(key): str(value) for key, value in metadata.items()}}, 0
    for name, (shape, dtype) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < offset + len(encoded):
        raise WeightFileError(f"writing {path} needs {_size(offset + len(encoded))}, and {_size(free)} are free there; free the difference or turn saving off")
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.write(struct.pack("<Q", len(encoded)) + encoded)
            for name, tensor in tensors:
                shape, dtype = specs[name]
                assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype, f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
                stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _refuse_what_is_no_weight_file(path: Path) -> None:
    """Name the usual impostors: nothing, a pointer, a web page, another format under this name."""
    if not path.is_file():
        raise WeightFileError(f"no file at {path}; pick one that exists")
    size = path.stat().st_size
    if size == 0:
        raise WeightFileError(f"{path.name} is empty (0 bytes): the download did not finish; download it again")
    with open(path, "rb") as stream:
        head = stream.read(512)
    if head.startswith(b"version https://git-lfs"):
        raise WeightFileError(
            f"{path.name} is a Git LFS pointer of {size} bytes, not the weights it points to; run `git lfs pull` in that repository or download the file itself"
        )
    if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|head)", head, re.IGNORECASE):
        raise WeightFileError(
            f"{path.name} is a web page ({_size(size)}), not weights: the link led to a page or asked for a login; download the file itself"
        )
    is_pickle = head.startswith((b"PK\x03\x04", b"\x80"))
    if path.suffix.lower() in SAFETENSORS_SUFFIXES:
        if is_pickle:
            raise WeightFileError(
                f"{path.name} is named {path.suffix} but its content is a PyTorch pickle; give it the name {path.stem}.pt, and its weights are read"
            )
    elif not is_pickle:
        if len(head) > 9 and head[8:9] == b"{" and 2 <= struct.unpack("<Q", head[:8])[0] <= _MAX_HEADER_BYTES:
            raise WeightFileError(f"{path.name} is named {path.suffix} but its content is safetensors; give it the name {path.stem}.safetensors")
        raise WeightFileError(f"{path.name} is neither a PyTorch file nor safetensors: it begins with {head[:8]!r}; download it again or pick another file")


def _safetensors_header(path: Path) -> tuple[dict, int]:
    """Return the parsed header and the position of the first tensor byte."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise WeightFileError(f"{path.name} is not a safetensors file: it begins with {prefix!r}; download it again or pick another file")
        if size < 8 + length:
            raise WeightFileError(f"{path.name} is truncated inside its header: {size} bytes are there, the header alone needs {8 + length}; download it again")
        text = stream.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("it is no table of tensors")
        for name, entry in header.items():
            if name != "__metadata__":
                numbers = [*entry["shape"], *entry["data_offsets"]]
                if not isinstance(entry["dtype"], str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
                    raise ValueError(name)
    except (ValueError, KeyError, TypeError) as error:
        raise WeightFileError(f"{path.name} is not a readable safetensors file: its header is damaged ({error}); download it again") from error
    return header, 8 + length


def _check_safetensors_size(path: Path, header: Mapping, data_start: int) -> None:
    """Raise unless the tensors fill the file exactly, each with the bytes its shape needs."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise WeightFileError(f"{path.name}: tensor {name} has the type {entry['dtype']}; known are {', '.join(_DTYPES)}")
        begin, stop = entry["data_offsets"]
        if begin != end or stop - begin != math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize:
            raise WeightFileError(
                f"{path.name} is damaged: tensor {name} ({entry['dtype']} {entry['shape']}) lies at bytes {begin} to {stop}, "
                f"expected to start at {end}; download it again"
            )
        end = stop
    size, needed = path.stat().st_size, data_start + end
    if size < needed:
        raise WeightFileError(f"{path.name} is truncated: {size} bytes are there, its header promises {needed}; download it again")
    if size > needed:
        raise WeightFileError(f"{path.name} has {size - needed} bytes after its last tensor: the download was joined or resumed wrongly; download it again")


def _map_safetensors(path: Path, header: Mapping, data_start: int) -> dict[str, Tensor]:
    """Map the file copy-on-write and cut the tensors out of it."""
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    tensors = {}
    for name, entry in header.items():
        dtype, (begin, stop) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        raw = data[data_start + begin : data_start + stop]
        if (data_start + begin) % dtype.itemsize:
            raw = raw.clone()  # a header that is not padded leaves tensors between the steps of their dtype
        tensors[name] = raw.view(dtype).reshape(entry["shape"])
    return tensors


def _load_pickle(path: Path) -> Mapping:
    with open(path, "rb") as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
    if is_zip:
        _check_zip_end(path)
    try:
        # Only the zip form (torch 1.6 and newer) can be mapped; the older one is read whole.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        name = found.group(1) if found else None if is_zip else _first_import(path)
        if name:
            raise WeightFileError(
                f"{path.name} is a pickle that asks to run or build `{name}`. Only tensors and plain values are read (weights only), so it was "
                "refused and nothing in it was run. Use a safetensors file, or one saved by torch.save from a plain state dict"
            ) from error
        raise WeightFileError(f"{path.name} is a pickle without readable weights, or damaged; download it again or pick another file") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError, TypeError, AssertionError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightFileError(f"{path.name} is damaged or truncated and cannot be read as a PyTorch file ({reason}); download it again") from error
    if not isinstance(content, Mapping):
        raise WeightFileError(f"{path.name} holds a {type(content).__name__}, not a dictionary of tensors; pick a file saved from a state dict")
    return content


def _first_import(path: Path) -> str | None:
    """Name the first thing a bare pickle would import, by reading its instructions without following them."""
    strings: list[str] = []
    try:
        with open(path, "rb") as stream:
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "GLOBAL" and not argument.startswith(("torch", "collections")):
                    return argument.replace(" ", ".")
                if opcode.name == "STACK_GLOBAL" and len(strings) > 1 and strings[-2].split(".")[0] not in ("torch", "collections"):
                    return ".".join(strings[-2:])
                if isinstance(argument, str):
                    strings.append(argument)
    except ValueError:
        return None  # not a pickle after all
    return None


def _check_zip_end(path: Path) -> None:
    """Raise unless the zip's end record closes the file and its directory lies where the record says (PKWARE APPNOTE 4.3.14–4.3.16)."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        start = max(0, size - 66_000)
        stream.seek(start)
        tail = stream.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < 22:
        raise WeightFileError(f"{path.name} is truncated: {size} bytes are there and the end of the archive is missing; download it again")
    directory_size, directory_start, comment = struct.unpack("<IIH", tail[at + 12 : at + 22])
    end = start + at + 22 + comment
    if end < size:
        raise WeightFileError(f"{path.name} has {size - end} bytes after its end: the download was joined or resumed wrongly; download it again")
    directory_end = start + at
    wide = tail.rfind(b"PK\x06\x06", 0, at)
    if 0xFFFFFFFF in (directory_size, directory_start) and wide >= 0:
        directory_size, directory_start = struct.unpack("<QQ", tail[wide + 40 : wide + 56])
        directory_end = start + wide
    elif wide >= 0 and directory_start + directory_size == start + wide:
        directory_end = start + wide
    if end > size or directory_start + directory_size != directory_end:
        raise WeightFileError(
            f"{path.name} is damaged: its table of contents should end at byte {directory_start + directory_size} and does at {directory_end}, "
            "so a part in between is missing or extra; download it again"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count} bytes"

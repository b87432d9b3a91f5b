"""Packed NVFP4 ("four over six") weights to plain tensors. Owns the layout; which checkpoints hold such weights is checkpoint.py's.

Layout and formulas: LongLive 2.0 ``model_4o6.pt``, package fouroversix. Two E2M1 codes a byte (low nibble = even column), one E4M3 scale
per 1 x 16 values in the 128 x 4 tile order that block-scaled matmuls take, one float32 maximum for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BLOCK = 16
# What the largest representable weight is divided into, by scale rule: largest E2M1 value times largest E4M3 scale that the rule uses.
DIVISORS = {"mse": 6 * 256, "mae": 6 * 256, "abs_max": 6 * 256, "static_6": 6 * 448, "static_4": 4 * 448}
SUFFIXES = ("quantized_weight_values", "quantized_weight_scale_factors", "quantized_weight_amax", "quantized_weight_metadata")

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class PackedWeight:
    """One packed linear weight.

    ``values`` [rows, columns / 2] uint8; ``scales`` flat E4M3 over the padded shape; ``amax`` float32. ``shape`` is (out, in), ``padded`` the
    same rounded up to multiples of (128, 64).
    """

    values: Tensor
    scales: Tensor
    amax: Tensor
    shape: tuple[int, int]
    padded: tuple[int, int]
    rule: str

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight, (out, in), computed in float32 and rounded once to ``dtype``."""
        columns = self.values.shape[1] * 2
        step = self.amax.float().reshape(()) / DIVISORS[self.rule]
        scales = unswizzle_scales(self.scales, self.padded[0], self.padded[1] // SCALE_BLOCK)[:, : columns // SCALE_BLOCK].float() * step
        # A byte gives two values; the low nibble comes first.
        codes = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
        pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=1)  # (256, 2)
        out = torch.empty(self.shape, dtype=dtype)
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, self.shape[0])
            block = pairs.index_select(0, self.values[first:last].reshape(-1).int()).reshape(last - first, -1, SCALE_BLOCK)
            block = (block * scales[first:last, :, None]).reshape(last - first, columns)
            out[first:last] = block[:, : self.shape[1]].to(dtype)
        return out


def packed_weight(name: str, tensors: Mapping[str, Tensor], rule: str) -> PackedWeight:
    """Build the packed weight of layer ``name`` from its four tensors, keyed by SUFFIXES. Raises ValueError where they do not belong together."""
    missing = [suffix for suffix in SUFFIXES if suffix not in tensors]
    if missing:
        raise ValueError(f"the packed weight of {name} lacks {', '.join(missing)}; the file is incomplete")
    if rule not in DIVISORS:
        raise ValueError(f"the packed weights use the scale rule {rule!r}; known are {', '.join(DIVISORS)}")
    values, scales, amax, metadata = (tensors[suffix] for suffix in SUFFIXES)
    rows, columns, padded_rows, padded_columns = (int(number) for number in metadata.tolist())
    shape, padded = (rows, columns), (padded_rows, padded_columns)
    count = padded_rows * padded_columns // SCALE_BLOCK
    is_sound = (
        values.dtype == torch.uint8
        and tuple(values.shape) in ((rows, columns // 2), (padded_rows, padded_columns // 2))
        and scales.dtype == torch.float8_e4m3fn
        and scales.numel() == count
        and amax.numel() == 1
        and padded_rows % 128 == 0
        and padded_columns % 64 == 0
        and columns % SCALE_BLOCK == 0
        and 0 < rows <= padded_rows
        and 0 < columns <= padded_columns
    )
    if not is_sound:
        raise ValueError(
            f"the packed weight of {name} does not fit its own note, (out, in) = {shape} padded to {padded}: expected {rows} x {columns // 2} bytes and "
            f"{count} E4M3 scales, found {tuple(values.shape)} {values.dtype} and {scales.numel()} {scales.dtype}; the file is damaged"
        )
    return PackedWeight(values, scales.reshape(-1), amax, shape, padded, rule)


def unswizzle_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return flat scales in plain (rows, columns) order.

    Scale (r, c) lies at ((r // 128) * (columns / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4.
    """
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)  # (row tile, column tile, r % 32, r % 128 // 32, c % 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)

"""Keys and values of the window: allocated once, written in place, viewed without a copy.

One cache per branch (conditional, unconditional); each layer holds ``keys`` and ``values`` ``(B, capacity * frame_tokens, heads * head_dim)``. Which slot a
frame lives in is ``window.py``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .window import Placement


@dataclass(frozen=True)
class CacheShape:
    """What one branch's cache holds; ``capacity_frames`` latent frames of ``frame_tokens`` tokens, ``width`` = heads * head_dim."""

    layers: int
    batch: int
    capacity_frames: int
    frame_tokens: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values over all layers."""
        return 2 * self.layers * self.batch * self.capacity_frames * self.frame_tokens * self.width * self.dtype.itemsize


class KVCache:
    """One branch's keys and values. Raises torch.OutOfMemoryError, with the size in the message, when it does not fit."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.batch, shape.capacity_frames * shape.frame_tokens, shape.width)
        try:
            # Zeros, not empty: LongLive 1.0 attends its whole sink region from the first chunk on.
            self.keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
            self.values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self.keys = self.values = []
            raise torch.OutOfMemoryError(
                f"the KV cache needs {shape.num_bytes / 1e9:.2f} GB on {device} ({shape.capacity_frames} latent frames x {shape.frame_tokens} tokens, "
                f"{shape.layers} layers, {shape.dtype}) and it could not be allocated; a smaller window, a smaller picture or batch 1 would need less"
            ) from error

    def write(self, layer: int, keys: Tensor | None, values: Tensor | None, placement: Placement) -> None:
        """Copy a chunk's ``(B, f * frame_tokens, width)`` keys and values into their slots; either may be None."""
        tokens = self.shape.frame_tokens
        for first, slot, length in placement.runs():
            source = slice(first * tokens, (first + length) * tokens)
            target = slice(slot * tokens, (slot + length) * tokens)
            if keys is not None:
                self.keys[layer][:, target].copy_(keys[:, source])
            if values is not None:
                self.values[layer][:, target].copy_(values[:, source])

    def view(self, layer: int, frames: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``frames`` slots, as views."""
        end = frames * self.shape.frame_tokens
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def parked(self) -> dict[str, Tensor]:
        """A copy on the CPU: ``keys.N`` and ``values.N`` per layer. The host must have room for ``shape.num_bytes``."""
        stacked = {"keys": self.keys, "values": self.values}
        return {f"{name}.{layer}": tensor.detach().to("cpu", copy=True) for name, layers in stacked.items() for layer, tensor in enumerate(layers)}

    def restore(self, parked: dict[str, Tensor]) -> None:
        """Copy what ``parked`` returned back in place."""
        for layer in range(self.shape.layers):
            self.keys[layer].copy_(parked[f"keys.{layer}"])
            self.values[layer].copy_(parked[f"values.{layer}"])

"""The slow truth for the KV window: real tensors are rolled, cut and joined at every forward, exactly as upstream's cache does it.

No slots, no in-place writes, no memo, complex128 RoPE, text keys computed anew each time. Upstream: ``CausalWanSelfAttention.forward`` of LongLive 2.0
(``wan_5b/modules/causal_model.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from longlive.tests.reference.tiny_dit import attention
from torch import Tensor, nn


@dataclass
class RolledCache:
    """Keys and values per layer as tensors (1, tokens, D) in window order; counts are latent frames."""

    capacity: int
    sink: int
    shot_pin: bool
    tokens: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    frames: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    end: int = 0
    pin: tuple[int, int] | None = None

    def store(self, layer: int, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        if len(self.keys) == layer:
            self.keys.append(keys[:, :0])
            self.values.append(values[:, :0])
        length = keys.shape[1] // self.tokens
        self.keys[layer] = self._placed(self.keys[layer], keys, start, length)
        self.values[layer] = self._placed(self.values[layer], values, start, length)
        return self.keys[layer], self.values[layer]

    def _placed(self, old: Tensor, new: Tensor, start: int, length: int) -> Tensor:
        held = old.shape[1] // self.tokens
        if start + length <= self.end:  # the newest frames again
            return torch.cat((old[:, : (held - length) * self.tokens], new), 1)
        evicted = max(0, length + held - self.capacity)
        prefix = self.prefix()
        kept = torch.cat((old[:, : prefix * self.tokens], old[:, (prefix + evicted) * self.tokens :]), 1)
        return torch.cat((kept[:, : (held - evicted) * self.tokens], new), 1)

    def prefix(self) -> int:
        anchored = self.sink if self.shot_pin else 0
        if self.pin is None:
            return max(anchored, self.sink)
        return anchored + self.pin[1] if self.pin[0] == anchored else anchored

    def done(self, start: int, length: int) -> None:
        """After all layers: move the counters and the list of frames."""
        fresh = torch.arange(start, start + length)
        if start + length > self.end:
            evicted = max(0, length + len(self.frames) - self.capacity)
            prefix = self.prefix()
            if evicted and self.pin is not None and self.pin[0] >= prefix:
                self.pin = (self.pin[0] - evicted, self.pin[1])
            kept = torch.cat((self.frames[:prefix], self.frames[prefix + evicted :]))[: len(self.frames) - evicted]
            self.frames = torch.cat((kept, fresh))
            self.end = start + length
        else:
            self.frames = torch.cat((self.frames[:-length], fresh))

    def pin_newest(self, length: int) -> None:
        self.pin = (len(self.frames) - length, min(self.sink, length))


def rope(x: Tensor, times: list[float], rows: int, columns: int, heads: int) -> Tensor:
    """Rotate (1, tokens, D) with complex128 angles; 22/21/21 of 64 pairs for time, row, column at head dim 128."""
    x = x.unflatten(2, (heads, -1)).double()
    pairs = x.shape[-1] // 2
    spatial = 2 * (x.shape[-1] // 6)
    sizes = (x.shape[-1] - 2 * spatial, spatial, spatial)
    angles = []
    for time in times:
        for row in range(rows):
            for column in range(columns):
                angles.append(torch.cat([position * 10000.0 ** (-torch.arange(0, n, 2).double() / n) for position, n in zip((time, row, column), sizes)]))
    turn = torch.polar(torch.ones(len(angles), pairs, dtype=torch.float64), torch.stack(angles))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn[None, :, None]
    return torch.view_as_real(turned).flatten(-2).flatten(2).float()


def forward(dit: nn.Module, x: Tensor, timesteps: list[float], context: Tensor, cache: RolledCache, start: int, times: list[float]) -> Tensor:
    """One forward of a chunk (1, C, f, H, W) at absolute frame ``start``; returns the flow. Every layer runs to its end, also in a clean pass."""
    frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
    x = dit.patch_embedding(x)
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)
    half = dit.freq_dim // 2
    angle = torch.outer(torch.tensor(timesteps).double(), 10000.0 ** (-torch.arange(half).double() / half))
    e = dit.time_embedding(torch.cat((angle.cos(), angle.sin()), 1).float())
    e0 = dit.time_projection(e).unflatten(1, (6, dit.dim))
    text = dit.text_embedding(nn.functional.pad(context, (0, 0, 0, 512 - context.shape[1])))
    per_frame = rows * columns

    def spread(vector: Tensor) -> Tensor:
        return vector.repeat_interleave(per_frame, 0).unsqueeze(0)

    for layer, block in enumerate(dit.blocks):
        m = [spread(part) for part in (block.modulation + e0).unbind(1)]
        a = block.norm1(x) * (1 + m[1]) + m[0]
        attn, heads = block.self_attn, block.self_attn.num_heads
        q = rope(attn.norm_q(attn.q(a)), times, rows, columns, heads)
        k, v = cache.store(layer, rope(attn.norm_k(attn.k(a)), times, rows, columns, heads), attn.v(a), start)
        x = x + attn.o(attention(q, k, v, heads)) * m[2]
        cross = block.cross_attn
        x = x + cross.o(attention(cross.norm_q(cross.q(block.norm3(x))), cross.norm_k(cross.k(text)), cross.v(text), heads))
        x = x + block.ffn(block.norm2(x) * (1 + m[4]) + m[3]) * m[5]
    cache.done(start, frames)
    return dit.unpatchify(dit.head(x, e.unsqueeze(0)), grid)

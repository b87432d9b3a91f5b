"""A Wan text-to-video DiT with the submodules that the engine walks, in plain torch: for tests that run without ComfyUI."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.norm3 = nn.LayerNorm(dim, eps=1e-6)
        self.self_attn, self.cross_attn = Attention(dim, heads), Attention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))


class Head(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.head = nn.Linear(dim, out)
        self.modulation = nn.Parameter(torch.empty(1, 2, dim))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        shift, scale = (self.modulation.unsqueeze(0) + e.unsqueeze(2)).unbind(2)  # (1, f, D)
        repeats = x.shape[1] // shift.shape[1]
        return self.head(self.norm(x) * (1 + scale.repeat_interleave(repeats, 1)) + shift.repeat_interleave(repeats, 1))


class TinyDit(nn.Module):
    """``channels`` latent channels, ``dim`` wide, head dim 128 by default; weights drawn from ``seed``."""

    def __init__(self, channels: int = 4, dim: int = 128, heads: int = 1, layers: int = 2, text_dim: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.dim, self.freq_dim, self.patch_size, self.channels = dim, 32, (1, 2, 2), channels
        self.patch_embedding = nn.Conv3d(channels, dim, self.patch_size, self.patch_size)
        self.text_embedding = nn.Sequential(nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(self.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = Head(dim, channels * 4)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)

    def unpatchify(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        frames, rows, columns = grid
        x = x.reshape(x.shape[0], frames, rows, columns, 1, 2, 2, self.channels)
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(x.shape[0], self.channels, frames, rows * 2, columns * 2)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, transformer_options: dict | None = None) -> Tensor:
    """Softmax attention over (B, N, heads * head_dim), like the host's."""
    q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

"""Tiny state dicts with the key names and the structure of Wan 2.1, Wan 2.2 and their VAEs. Torch only; every value comes from the seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

HEAD_DIM = 128
TEXT_DIM = 4096
FREQUENCIES = 256


def dit_state_dict(channels: int, seed: int, *, dim: int = 2 * HEAD_DIM, layers: int = 2) -> dict[str, Tensor]:
    """A text-to-video DiT with ``channels`` latent channels (48: Wan 2.2 5B's structure, 16: Wan 2.1's), float32."""
    shapes: dict[str, tuple[int, ...]] = {"patch_embedding.weight": (dim, channels, 1, 2, 2), "patch_embedding.bias": (dim,)}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        shapes[f"{name}.bias"] = (outputs,)

    linear("text_embedding.0", dim, TEXT_DIM)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, FREQUENCIES)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)
    for layer in range(layers):
        block = f"blocks.{layer}"
        for attention in ("self_attn", "cross_attn"):
            for projection in "qkvo":
                linear(f"{block}.{attention}.{projection}", dim, dim)
            shapes[f"{block}.{attention}.norm_q.weight"] = (dim,)
            shapes[f"{block}.{attention}.norm_k.weight"] = (dim,)
        shapes[f"{block}.norm3.weight"] = (dim,)
        shapes[f"{block}.norm3.bias"] = (dim,)
        linear(f"{block}.ffn.0", 2 * dim, dim)
        linear(f"{block}.ffn.2", dim, 2 * dim)
        shapes[f"{block}.modulation"] = (1, 6, dim)
    linear("head.head", channels * 4, dim)
    shapes["head.modulation"] = (1, 2, dim)

    generator = torch.Generator().manual_seed(seed)
    return {name: _values(name, shape, generator) for name, shape in shapes.items()}


def fill(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The state dict of ``module``, with every value drawn from the seed by the same rule as the DiT's."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _values(name, tuple(value.shape), generator) for name, value in module.state_dict().items()}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Scales that keep activations near 1: norms at 1, modulation small, everything else by the square root of its inputs."""
    if name.endswith("gamma") or ("norm" in name and name.endswith("weight")):
        return torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return noise * 0.02
    if name.endswith("modulation"):
        return noise / math.sqrt(shape[-1])
    return noise / math.sqrt(math.prod(shape[1:]))

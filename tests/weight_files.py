"""Makes DiT and LoRA files of two narrow layers from seeds, in every published form. Used by the loader's tests only."""

import struct
from pathlib import Path

import torch
from torch import Tensor

DIM, FFN, TEXT_DIM = 256, 512, 4096
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def dit_state_dict(
    seed: int = 0, *, channels: int = 48, dim: int = DIM, ffn: int = FFN, layers: int = 2, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """A Wan text-to-video DiT under Wan's own names; about 3 M values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(dtype)

    def linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
        return {f"{name}.weight": draw(rows, columns), f"{name}.bias": draw(rows)}

    state = {"patch_embedding.weight": draw(dim, channels, 1, 2, 2), "patch_embedding.bias": draw(dim)}
    state |= linear("text_embedding.0", dim, TEXT_DIM) | linear("text_embedding.2", dim, dim)
    state |= linear("time_embedding.0", dim, 256) | linear("time_embedding.2", dim, dim) | linear("time_projection.1", 6 * dim, dim)
    for layer in range(layers):
        block = f"blocks.{layer}"
        state[f"{block}.modulation"] = draw(1, 6, dim)
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                state |= linear(f"{block}.{attention}.{name}", dim, dim)
            state |= {f"{block}.{attention}.{name}.weight": 1 + draw(dim) for name in ("norm_q", "norm_k")}
        state |= {f"{block}.norm3.weight": 1 + draw(dim), f"{block}.norm3.bias": draw(dim)}
        state |= linear(f"{block}.ffn.0", ffn, dim) | linear(f"{block}.ffn.2", dim, ffn)
    state |= {"head.modulation": draw(1, 2, dim)} | linear("head.head", 4 * channels, dim)
    return state


def block_linears(state: dict[str, Tensor]) -> list[str]:
    """The layers that LongLive's adapters and packed files cover: every linear inside a block."""
    return [name.removesuffix(".weight") for name, value in state.items() if name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2]


def lora_factors(state: dict[str, Tensor], seed: int = 1, *, rank: int = 8, strength: float = 0.05) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) for every block linear."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name in block_linears(state):
        rows, columns = state[f"{name}.weight"].shape
        down, up = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
        factors[name] = ((down * strength).bfloat16(), (up * strength).bfloat16())
    return factors


def peft_names(factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    named = {}
    for name, (down, up) in factors.items():
        named |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    return named


def quantize(weight: Tensor, rule: str = "mse") -> dict[str, Tensor]:
    """Pack a weight as upstream's files do, each scale placed by the index formula.

    weight: (out, in) with out a multiple of 128 and in of 64.
    """
    x = weight.float()
    rows, columns = x.shape
    amax = x.abs().max()
    blocks = x.reshape(rows, columns // 16, 16)
    peak = blocks.abs().amax(-1, keepdim=True)

    def candidate(largest: float, ceiling: float, divisor: float) -> tuple[Tensor, Tensor, Tensor]:
        scale = (peak / largest * (divisor / amax)).clamp(max=ceiling).to(torch.float8_e4m3fn).float()
        y = torch.where(scale > 0, blocks / (scale * (amax / divisor)), torch.zeros_like(blocks))
        size = y.abs()
        rounded = torch.where(size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2)).clamp(max=6.0)
        codes = torch.searchsorted(E2M1, rounded.contiguous()) + 8 * (y < 0)
        error = (rounded * y.sign() * scale * (amax / divisor) - blocks).square().sum(-1, keepdim=True)
        return scale, codes, error

    if rule == "mse":
        six, four = candidate(6.0, 448.0, 1536.0), candidate(4.0, 448.0, 1536.0)
        take_four = four[2] < six[2]
        scale, codes = torch.where(take_four, four[0], six[0]), torch.where(take_four, four[1], six[1])
    else:
        scale, codes, _ = {"static_6": candidate(6.0, 448.0, 2688.0), "static_4": candidate(4.0, 448.0, 1792.0)}[rule]
    codes = codes.reshape(rows, columns).to(torch.uint8)
    flat, width = torch.zeros(rows * columns // 16), columns // 16
    r, c = torch.arange(rows)[:, None], torch.arange(width)[None]
    flat[((r // 128) * (width // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scale[..., 0]
    return {
        "quantized_weight_values": codes[:, 0::2] | (codes[:, 1::2] << 4),
        "quantized_weight_scale_factors": flat.to(torch.float8_e4m3fn),
        "quantized_weight_amax": amax.reshape(1),
        "quantized_weight_metadata": torch.tensor([rows, columns, rows, columns], dtype=torch.int32),
    }


def packed_container(state: dict[str, Tensor], rule: str = "mse") -> dict:
    """The content of a model_4o6.pt."""
    linears = block_linears(state)
    generator = {f"model.{name}": value for name, value in state.items() if name.removesuffix(".weight") not in linears}
    for layer in linears:
        generator |= {f"model.{layer}.{suffix}": value for suffix, value in quantize(state[f"{layer}.weight"], rule).items()}
    return {
        "generator": generator,
        "checkpoint_format": "longlive_generator_nvfp4",
        "checkpoint_version": 1,
        "merged_lora": True,
        "quantization": {"format": "nvfp4", "scale_rule": "static_6", "weight_scale_rule": rule},
    }


def save_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    return path


def save_pt(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def save_upstream(path: Path, state: dict[str, Tensor], **notes: object) -> Path:
    """A published container: ``generator`` with the prefix ``model.``, and notes beside it."""
    return save_pt(path, {"generator": {f"model.{name}": value for name, value in state.items()}, **notes})


def safetensors_bytes(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data

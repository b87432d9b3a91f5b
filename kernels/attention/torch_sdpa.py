"""Dense attention through torch's scaled_dot_product_attention: torch's own choice, or one backend by name.

All three read (B, N, heads, head_dim) through transposed views; nothing is copied on the way in.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..dispatch import Problem


def attention(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
    """q: (B, Nq, heads, head_dim); k, v: (B, Nk, kv_heads, head_dim). Returns q's shape and dtype; any device."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, N, head_dim)
    out = scaled_dot_product_attention(q, k, v, scale=problem.scale, enable_gqa=problem.is_grouped)
    return out.transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
    """As attention(), by cuDNN or not at all."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention(q, k, v, problem=problem)


def flash(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
    """As attention(), by the flash-attention 2 inside torch or not at all."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention(q, k, v, problem=problem)


def cudnn_unavailable() -> str | None:
    """None when this torch has cuDNN, else why not."""
    if not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN, or it is switched off"
    return None

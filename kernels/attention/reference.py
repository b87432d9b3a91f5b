"""Attention in plain torch float32: the definition that every other row is compared with, and the documentation."""

import torch
from torch import Tensor

from ..dispatch import Problem

# Largest score matrix held at a time. With its exponential and the operands of one head, the extra memory stays under
# four times this at any length.
TILE_BYTES = 64 * 2**20


def attention(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
    """softmax(scale * q k^T) v, row by row over all keys.

    q: (B, Nq, heads, head_dim); k, v: (B, Nk, kv_heads, head_dim). Returns (B, Nq, heads, head_dim) in q's dtype.
    """
    return attention_with_lse(q, k, v, problem=problem)[0]


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, problem: Problem, precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As attention(), with the natural logarithm of each row's softmax sum.

    precision: what the sums run in; float64 gives the truth that float32 is judged by.
    Returns (output as above, lse (B, heads, Nq) in precision). Without keys the output is 0 and the lse -inf, so that
    merging it with another part changes nothing.
    """
    batch, q_len, heads, _ = q.shape
    group = heads // k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, q_len), dtype=precision)
    if problem.k_len == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    rows = max(1, TILE_BYTES // (problem.k_len * precision.itemsize))
    for b in range(batch):
        for h in range(heads):
            keys = k[b, :, h // group].to(precision)  # (Nk, head_dim)
            values = v[b, :, h // group].to(precision)
            for start in range(0, q_len, rows):
                tile = slice(start, min(start + rows, q_len))
                scores = q[b, tile, h].to(precision) * problem.softmax_scale @ keys.T  # (rows, Nk)
                row_lse = torch.logsumexp(scores, dim=-1)
                out[b, tile, h] = (torch.exp(scores - row_lse[:, None]) @ values).to(q.dtype)
                lse[b, h, tile] = row_lse
    return out, lse

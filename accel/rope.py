"""Three-axis rotary positions, computed from the positions themselves (no table, no limit at 1,024 latent frames).

Head dim d is split into d/2 adjacent pairs: time first, then rows, then columns (22/21/21 pairs at d = 128). Angles are formed in float64, because
position * frequency grows without bound in a long video, and rotated in float32. Source: RoFormer (arXiv 2104.09864), Wan 2.1's 3-D split.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Dimensions of the time, row and column axes: 44, 42, 42 at head dim 128."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_tables(times: tuple[float, ...], rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``(len(times) * rows * columns, 1, head_dim / 2)`` float32 for frames at the time positions ``times``."""
    positions = (
        torch.tensor(times, dtype=torch.float64),
        torch.arange(rows, dtype=torch.float64),
        torch.arange(columns, dtype=torch.float64),
    )
    size = (len(times), rows, columns)
    tables: tuple[list[Tensor], list[Tensor]] = ([], [])
    for axis, (position, dim) in enumerate(zip(positions, axis_dims(head_dim), strict=True)):
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(position, frequency)
        shape = [1, 1, 1, -1]
        shape[axis] = len(position)
        for table, values in zip(tables, (angle.cos(), angle.sin()), strict=True):
            table.append(values.to(torch.float32).to(device).reshape(shape).expand(*size, -1))
    return tuple(torch.cat(table, dim=-1).reshape(-1, 1, head_dim // 2) for table in tables)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, keep_float: bool = False) -> Tensor:
    """Rotate the pairs of ``x`` ``(B, N, heads, head_dim)``; float32 inside, result in ``x``'s dtype or, if ``keep_float``, in float32. Differentiable."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if x.is_cuda:
        # One pass over memory instead of six; other devices lack or slow down complex arithmetic.
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    else:
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    turned = turned.flatten(-2)
    return turned if keep_float else turned.to(x.dtype)

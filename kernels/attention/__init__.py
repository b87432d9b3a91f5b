"""Attention: the public function, and the Problem read off its tensors. The mathematics is in reference.py."""

from torch import Tensor, is_grad_enabled

from ..arch import arch_of
from ..dispatch import Problem, select

__all__ = ["attention", "problem_of"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem | None = None, want: str = "auto") -> Tensor:
    """Attend queries to all keys: softmax(scale * q k^T) v.

    q:    (B, Nq, heads, head_dim); any strides with the last dimension contiguous.
    k, v: (B, Nk, kv_heads, head_dim), the same dtype and device as q; Nk may differ from Nq.
    problem: what is wanted, from problem_of(q, k, v) when left out.
    want: "auto" or the name of a row of the table in dispatch.py.
    Returns (B, Nq, heads, head_dim) in q's dtype.

    Chooses at every call; code that calls often makes an accel.plan.Plan once and keeps its function.
    """
    problem = problem or problem_of(q, k, v)
    return select("attention", problem, arch_of(q.device), want).load()(q, k, v, problem=problem)


def problem_of(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Problem:
    """The Problem of three tensors shaped as for attention(); ValueError when they do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k and v must be (B, N, heads, head_dim), got {_shapes(q, k, v)}")
    batch, q_len, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim or heads % max(k.shape[2], 1):
        raise ValueError(f"k and v must be ({batch}, N, a divisor of {heads}, {head_dim}), got {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise ValueError(f"q, k and v must share one dtype and device, got {kinds}")
    return Problem(
        q_len=q_len,
        k_len=k.shape[1],
        heads=heads,
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device.type,
        batch=batch,
        kv_heads=None if k.shape[2] == heads else k.shape[2],
        scale=scale,
        needs_grad=is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)

"""Adapter to the optional package flash-attn-4 (module flash_attn.cute, BSD-3-Clause), imported on first use.

Written against 4.0.0b36. Its kernels are compiled by CuTe DSL when first called and kept by that package.
"""

from torch import Tensor

from ..dispatch import Problem


def attention(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
    """q: (B, Nq, heads, head_dim); k, v: (B, Nk, kv_heads, head_dim), half precision. Returns q's shape and dtype."""
    from flash_attn.cute import flash_attn_func

    # It answers (output, lse or None), also when no lse was asked for.
    return flash_attn_func(q, k, v, softmax_scale=problem.softmax_scale)[0]


def unavailable() -> str | None:
    """None when the package imports, else what stopped it."""
    try:
        from flash_attn.cute import flash_attn_func  # noqa: F401 - asking whether the import works
    except Exception as error:  # a broken CUDA toolchain raises whatever it likes while importing
        return f"flash-attn-4 is installed but does not import: {type(error).__name__}: {error}"
    return None

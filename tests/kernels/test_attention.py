"""kernels.attention: every row against attention written out naively in float64."""

import sys
import types

import pytest
import torch
from longlive.kernels.arch import arch_of
from longlive.kernels.attention import attention, problem_of, reference
from longlive.kernels.dispatch import explain

# batch, queries, keys, heads, key heads, head dim: cached (q != k), plain, one token, lengths off every tile, grouped
SHAPES = [(1, 12, 24, 2, 2, 16), (2, 33, 33, 3, 3, 64), (1, 1, 1, 1, 1, 8), (1, 7, 129, 2, 2, 128), (2, 48, 5, 4, 2, 24)]
CAN_RUN = [
    name
    for name, reason in explain("attention", problem_of(*[torch.zeros(1, 1, 1, 8)] * 3), arch_of("cpu")).items()
    if reason is None
]


def random_qkv(batch, q_len, k_len, heads, kv_heads, head_dim, dtype=torch.float32):
    """q and strided views of k and v, as a KV cache hands them over."""
    generator = torch.Generator().manual_seed(q_len * 1000 + k_len)
    q = torch.randn(batch, q_len, heads, head_dim, generator=generator) * 2
    kv = torch.randn(2, batch, k_len + 3, kv_heads, head_dim, generator=generator)
    return q.to(dtype), kv[0, :, 2 : 2 + k_len].to(dtype), kv[1, :, 1 : 1 + k_len].to(dtype)


def naive(q, k, v, scale=None):
    """Attention in float64 with the whole matrix at once: (B, N, heads, head_dim) and the row's log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CAN_RUN)
def test_every_row_that_runs_here_equals_the_definition(name, shape):
    q, k, v = random_qkv(*shape)
    expected, _ = naive(q, k, v)
    out = attention(q, k, v, want=name)
    assert out.shape == q.shape and out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CAN_RUN)
def test_scale_and_half_precision(name):
    q, k, v = random_qkv(1, 21, 40, 2, 2, 32, dtype=torch.bfloat16)
    problem = problem_of(q, k, v, scale=0.31)
    expected, _ = naive(q, k, v, scale=0.31)
    out = attention(q, k, v, problem=problem, want=name)
    assert out.dtype == torch.bfloat16
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 6e-3, f"relative L2 {error:.1e}"  # bfloat16 rounds the probabilities and the output
    assert not torch.allclose(attention(q, k, v, want=name).double(), expected, rtol=2e-2, atol=2e-2), "scale had no effect"


@pytest.mark.parametrize("tile_bytes", [1, 1000, 2**20])
def test_the_reference_does_not_depend_on_its_tiles(monkeypatch, tile_bytes):
    monkeypatch.setattr(reference, "TILE_BYTES", tile_bytes)
    q, k, v = random_qkv(2, 37, 61, 2, 2, 16)
    out, lse = reference.attention_with_lse(q, k, v, problem=problem_of(q, k, v), precision=torch.float64)
    expected, expected_lse = naive(q, k, v)
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_two_parts_merge_by_their_lse():
    """The LSE is the natural logarithm, without which no partial result can be merged."""
    q, k, v = random_qkv(1, 9, 50, 2, 2, 32)
    whole, whole_lse = reference.attention_with_lse(q, k, v, problem=problem_of(q, k, v))
    parts = [(k[:, :13], v[:, :13]), (k[:, 13:], v[:, 13:]), (k[:, :0], v[:, :0])]
    results = [reference.attention_with_lse(q, *part, problem=problem_of(q, *part)) for part in parts]
    lse = torch.stack([part_lse for _, part_lse in results])  # (parts, B, heads, Nq)
    weights = lse.softmax(0).transpose(-1, -2)[..., None]  # (parts, B, Nq, heads, 1)
    merged = (weights * torch.stack([out for out, _ in results])).sum(0)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.logsumexp(lse, 0), whole_lse, rtol=1e-6, atol=1e-6)
    assert (results[2][0] == 0).all() and (results[2][1] == float("-inf")).all()


def test_large_logits_stay_finite():
    q, k, v = random_qkv(1, 4, 6, 1, 1, 8)
    k = k.clone()
    k[0, 3] = q[0, 0] * 1e4
    out = attention(q, k, v, want="reference")
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 0], v[0, 3])


@pytest.mark.parametrize("name", CAN_RUN)
def test_gradients_flow(name):
    tensors = [t.requires_grad_() for t in random_qkv(1, 6, 10, 2, 2, 8)]
    assert problem_of(*tensors).needs_grad
    attention(*tensors, want=name).square().sum().backward()
    got = [t.grad for t in tensors]
    copies = [t.detach().double().requires_grad_() for t in tensors]
    naive(*copies)[0].square().sum().backward()
    for grad, copy in zip(got, copies):
        torch.testing.assert_close(grad.double(), copy.grad, rtol=1e-4, atol=1e-4)


def test_problem_of_refuses_what_does_not_fit():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"\(B, N, heads, head_dim\), got \(1, 4, 16\)"):
        problem_of(q.flatten(2), q, q)
    with pytest.raises(ValueError, match=r"\(1, N, a divisor of 2, 8\)"):
        problem_of(q, q, q[:, :3])
    with pytest.raises(ValueError, match="float16"):
        problem_of(q, q.half(), q)


def test_the_flash_attn_4_adapter_calls_the_package_as_it_documents(monkeypatch):
    """flash_attn_func answers (output, lse or None) and knows softmax_scale, not scale (4.0.0b36)."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None):
        calls.append(softmax_scale)
        return naive(q, k, v, scale=softmax_scale)[0].to(q.dtype), None

    package = types.ModuleType("flash_attn")
    package.__path__ = []
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    from longlive.kernels.attention import flash_attn_4

    assert flash_attn_4.unavailable() is None
    q, k, v = random_qkv(1, 5, 9, 2, 2, 16)
    out = flash_attn_4.attention(q, k, v, problem=problem_of(q, k, v))
    torch.testing.assert_close(out.double(), naive(q, k, v)[0], rtol=1e-5, atol=1e-5)
    assert calls == [16**-0.5]

"""Every attention row that this GPU can run, against float64. By hand: python -m pytest tests/gpu/test_attention.py -q"""

from __future__ import annotations

import pytest
import torch
from longlive.accel.override import AttentionOverride
from longlive.accel.plan import AttentionRequest
from longlive.kernels.arch import arch_of
from longlive.kernels.attention import attention, problem_of
from longlive.kernels.dispatch import explain, names

DEVICE = "cuda"
if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

# queries, keys: a whole chunk on a short window, 1.0's chunk with a tail of 48, one latent frame, text, single tokens
LENGTHS = [(880, 1760), (3120, 4680), (880, 880), (880, 512), (1, 129), (129, 1)]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 6e-3}


def qkv(q_len: int, k_len: int, dtype: torch.dtype, heads: int = 3, head_dim: int = 128):
    """q as a model makes it; k and v as views into a longer cache."""
    generator = torch.Generator(DEVICE).manual_seed(q_len + k_len)
    q = torch.randn(2, q_len, heads, head_dim, generator=generator, device=DEVICE)
    cache = torch.randn(2, 2, k_len + 64, heads, head_dim, generator=generator, device=DEVICE).to(dtype)
    return q.to(dtype), cache[0, :, 64:], cache[1, :, :k_len]


def truth(q, k, v):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", names("attention"))
def test_row(name, lengths, dtype):
    q, k, v = qkv(*lengths, dtype)
    reason = explain("attention", problem_of(q, k, v), arch_of(DEVICE))[name]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    out = attention(q, k, v, want=name)
    expected = truth(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[dtype], f"relative L2 {error:.1e}"
    assert torch.equal(out, attention(q, k, v, want=name)), "two runs differ"


@pytest.mark.parametrize("name", ["flash-attn-4", "cudnn", "torch-flash"])
def test_the_output_is_laid_out_as_the_model_reads_it(name):
    """(B, N, heads * head_dim) must be a view of what the row wrote: a copy would cost 43 MB a call at the 5B's chunk."""
    q, k, v = qkv(880, 1760, torch.bfloat16)
    reason = explain("attention", problem_of(q, k, v), arch_of(DEVICE))[name]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    out = attention(q, k, v, want=name)
    assert out.flatten(2).data_ptr() == out.data_ptr()


def test_the_override_computes_on_the_gpu_what_the_host_would():
    q, k, v = (t.flatten(2) for t in qkv(880, 1760, torch.bfloat16))
    override = AttentionOverride(AttentionRequest("auto"))

    def host(*args, **kwargs):
        raise AssertionError("the call was handed down")

    out = override(host, q, k, v, 3, transformer_options={"longlive": {"kind": "self", "layer": 0}})
    expected = truth(*(t.unflatten(-1, (3, 128)) for t in (q, k, v))).flatten(2)
    assert ((out.double() - expected).norm() / expected.norm()).item() <= TOLERANCE[torch.bfloat16]
    assert override.counts.to_dict()["cached"] == 1 and override.failed == {}

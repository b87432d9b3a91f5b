"""The packed decoder against the format's text, followed value by value."""

import pytest
import torch
from longlive.accel.nvfp4 import DIVISORS, packed_weight, unswizzle_scales
from longlive.tests.weight_files import E2M1, quantize


def _by_hand(packed: dict, divisor: float) -> torch.Tensor:
    """One value at a time, as the format's text says it."""
    rows, columns, _, _ = packed["quantized_weight_metadata"].tolist()
    out, width = torch.zeros(rows, columns), columns // 16
    scales = packed["quantized_weight_scale_factors"].float()
    for r in range(rows):
        for k in range(columns):
            byte = int(packed["quantized_weight_values"][r, k // 2])
            code = byte & 15 if k % 2 == 0 else byte >> 4
            c = k // 16
            scale = scales[((r // 128) * (width // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]
            out[r, k] = E2M1[code & 7] * (-1 if code & 8 else 1) * scale * packed["quantized_weight_amax"][0] / divisor
    return out


@pytest.mark.parametrize("rule", ["mse", "static_6", "static_4"])
def test_decode_agrees_with_the_text_value_by_value(rule):
    weight = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    packed = quantize(weight, rule)
    found = packed_weight("layer", packed, rule).decode(torch.float32)
    expected = _by_hand(packed, DIVISORS[rule])
    assert torch.allclose(found, expected, rtol=3e-7, atol=0)
    assert torch.equal(packed_weight("layer", packed, rule).decode(), found.bfloat16())


def test_decode_error_is_that_of_the_format():
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(4))
    for rule, expected in (("mse", 0.087), ("static_6", 0.095)):
        found = packed_weight("layer", quantize(weight, rule), rule).decode(torch.float32)
        assert (found - weight).square().mean().sqrt().item() == pytest.approx(expected, abs=0.002)


def test_decode_crops_padding_in_both_ways_files_may_store_it():
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(5))
    whole = packed_weight("layer", quantize(weight), "mse").decode(torch.float32)
    packed = quantize(weight)
    packed["quantized_weight_metadata"] = torch.tensor([100, 48, 128, 64], dtype=torch.int32)
    assert torch.equal(packed_weight("layer", packed, "mse").decode(torch.float32), whole[:100, :48])
    packed["quantized_weight_values"] = packed["quantized_weight_values"][:100, :24].contiguous()
    assert torch.equal(packed_weight("layer", packed, "mse").decode(torch.float32), whole[:100, :48])


def test_many_rows_are_decoded_in_blocks_without_a_seam():
    narrow = quantize(torch.randn(128, 64, generator=torch.Generator().manual_seed(6)))
    tall = {name: value.repeat(20, 1) if value.ndim == 2 else value.repeat(20) if value.numel() > 4 else value for name, value in narrow.items()}
    tall["quantized_weight_metadata"] = torch.tensor([2560, 64, 2560, 64], dtype=torch.int32)
    found = packed_weight("layer", tall, "mse").decode(torch.float32)
    assert torch.equal(found, packed_weight("layer", narrow, "mse").decode(torch.float32).repeat(20, 1))


def test_unswizzle_is_a_bijection():
    flat = torch.arange(256 * 8)
    assert torch.equal(unswizzle_scales(flat, 256, 8).flatten().sort().values, flat)


def test_refuses_parts_that_do_not_belong_together():
    packed = quantize(torch.randn(128, 64, generator=torch.Generator().manual_seed(7)))
    with pytest.raises(ValueError, match="rule 'best'; known are mse"):
        packed_weight("layer", packed, "best")
    with pytest.raises(ValueError, match="lacks quantized_weight_amax"):
        packed_weight("layer", {k: v for k, v in packed.items() if k != "quantized_weight_amax"}, "mse")
    packed["quantized_weight_scale_factors"] = packed["quantized_weight_scale_factors"][:-1]
    with pytest.raises(ValueError, match="does not fit its own note"):
        packed_weight("layer", packed, "mse")

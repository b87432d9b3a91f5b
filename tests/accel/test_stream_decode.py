"""accel.stream_decode without ComfyUI: options and messages. Values are compared in tests/nodes/test_stream_decode.py."""

import pytest
import torch
from longlive.accel.stream_decode import StreamDecoder22, StreamOptions, unpatchify, walk_reason
from torch import nn


def test_unpatchify_orders_channels_by_colour_column_row():
    x = torch.arange(12.0).reshape(1, 12, 1, 1, 1)
    green = unpatchify(x)[0, 1, 0]  # channels 4..7: (column 0, row 0), (column 0, row 1), (column 1, row 0), (column 1, row 1)
    assert green.tolist() == [[4.0, 6.0], [5.0, 7.0]]


def test_options_for_device_stay_exact_on_the_cpu_and_in_float32():
    assert StreamOptions.for_device(torch.device("cpu"), torch.bfloat16).is_exact
    assert StreamOptions.for_device(torch.device("cuda"), torch.float32).is_exact
    fast = StreamOptions.for_device(torch.device("cuda"), torch.bfloat16)
    assert fast.channels_last and fast.fused_norm and not fast.is_exact


def test_options_refuse_a_layout_without_the_walk():
    with pytest.raises(ValueError, match="need walk=True"):
        StreamOptions(walk=False, channels_last=True)


def test_a_foreign_decoder_is_refused_with_what_is_missing():
    foreign = nn.Module()
    foreign.conv2 = nn.Conv3d(4, 4, 1)
    foreign.decoder = nn.Sequential(nn.Conv3d(4, 4, 1))
    assert "no conv1, middle, upsamples, head" in walk_reason(foreign)
    with pytest.raises(ValueError, match="cannot walk this decoder: its decoder has no conv1"):
        StreamDecoder22(foreign)

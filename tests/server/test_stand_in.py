"""The stand-in pack gives core's own nodes something to work with."""

from __future__ import annotations

import io

import pytest
from PIL import Image


@pytest.mark.parametrize(("model", "size"), [("LongLive 2.0", 64), ("LongLive 1.0", 32)])
def test_core_text_encode_and_vae_decode_accept_the_stand_ins(client, model, size):
    workflow = {
        "vae": {"class_type": "LongLiveStandInVAE", "inputs": {"model": model, "seed": 1}},
        "clip": {"class_type": "LongLiveStandInCLIP", "inputs": {"seed": 1}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox in the snow", "clip": ["clip", 0]}},
        "image": {"class_type": "EmptyImage", "inputs": {"width": size, "height": size, "batch_size": 1, "color": 0x4080C0}},
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["encode", 0], "vae": ["vae", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "stand-in"}},
        "show": {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["text", 0]}},
    }
    (file,) = client.files(client.run(workflow))
    picture = Image.open(io.BytesIO(client.download(file)))
    assert picture.size == (size, size)
    low, high = picture.convert("L").getextrema()
    assert high - low > 5

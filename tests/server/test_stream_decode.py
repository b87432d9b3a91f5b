"""VAE Stream Decode in the running server: files, metadata and what hangs on the two outputs."""

from __future__ import annotations

import io
import json

import av
import numpy as np
import pytest


def workflow(model: str, output: str) -> dict:
    size = {"LongLive 2.0": 64, "LongLive 1.0": 32}[model]
    return {
        "vae": {"class_type": "LongLiveStandInVAE", "inputs": {"model": model, "seed": 1}},
        "image": {"class_type": "EmptyImage", "inputs": {"width": size, "height": size, "batch_size": 9, "color": 0x4080C0}},
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "decode": {
            "class_type": "LongLiveStreamDecode",
            "inputs": {"samples": ["encode", 0], "vae": ["vae", 0], "output": output, "filename_prefix": f"stream/{output}", "fps": 0.0, "first_frame": 0},
        },
        "video": {"class_type": "SaveVideo", "inputs": {"video": ["decode", 0], "filename_prefix": "copy", "format": "auto", "codec": "auto"}},
        "image_out": {"class_type": "SaveImage", "inputs": {"images": ["decode", 1], "filename_prefix": "frames"}},
    }


def open_video(client, file) -> tuple[dict, float, np.ndarray, list[bytes]]:
    """(metadata, fps, frames, packets)"""
    data = client.download(file)
    with av.open(io.BytesIO(data)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        metadata, rate = dict(container.metadata), float(container.streams.video[0].average_rate)
    with av.open(io.BytesIO(data)) as container:
        return metadata, rate, frames, [bytes(packet) for packet in container.demux(video=0) if packet.size]


@pytest.mark.parametrize(("model", "fps"), [("LongLive 2.0", 24), ("LongLive 1.0", 16)])
def test_video_is_written_and_copied_without_encoding(client, model, fps):
    files = client.files(client.run(client.with_defaults(workflow(model, "video"))))
    assert sorted(file["filename"].split("_")[0] for file in files) == ["copy", "video"]
    by_name = {file["filename"].split("_")[0]: open_video(client, file) for file in files}
    metadata, rate, frames, packets = by_name["video"]
    assert frames.shape[0] == 9 and rate == fps and frames.std() > 1
    assert json.loads(metadata["prompt"])["decode"]["class_type"] == "LongLiveStreamDecode"
    assert json.loads(metadata["longlive"])["decode"]["bit_exact"] is True
    assert by_name["copy"][3] == packets
    assert json.loads(by_name["copy"][0]["longlive"]) == json.loads(metadata["longlive"])


def test_images_only_blocks_what_hangs_on_the_video(client):
    files = client.files(client.run(client.with_defaults(workflow("LongLive 2.0", "images"))))
    assert len(files) == 9 and {file["filename"].split("_")[0] for file in files} == {"frames"}

"""A whole video through the queue of a running server: text to a finished mp4, with tiny random weights."""

from __future__ import annotations

import io
import time

import av
import numpy as np
import pytest
from longlive.tests.host.server import QueueError

WIDTH, HEIGHT, FPS = 64, 32, 24
# 10 latent frames: a chunk of 8 and a part of the next.
FRAMES = 37


def workflow(seed: int = 7, frames: int = FRAMES, prefix: str = "video/test") -> dict[str, dict]:
    """Text to video at LongLive 2.0's structure."""
    return {
        "dit": {"class_type": "LongLiveStandInDiT", "inputs": {"model": "LongLive 2.0", "seed": 0}},
        "clip": {"class_type": "LongLiveStandInCLIP", "inputs": {"seed": 0}},
        "vae": {"class_type": "LongLiveStandInVAE", "inputs": {"model": "LongLive 2.0", "seed": 0}},
        "attention": {"class_type": "LongLiveAttentionAccelerator", "inputs": {"model": ["dit", 0]}},
        "prompt": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["clip", 0], "text": "a red fox in the snow"}},
        "latent": {"class_type": "LongLiveEmptyLatent", "inputs": {"width": WIDTH, "height": HEIGHT, "frames": frames}},
        "sampler": {
            "class_type": "LongLiveChunkedSampler",
            "inputs": {"model": ["attention", 0], "positive": ["prompt", 0], "latent": ["latent", 0], "seed": seed},
        },
        "decode": {"class_type": "LongLiveStreamDecode", "inputs": {"samples": ["sampler", 0], "vae": ["vae", 0], "filename_prefix": prefix}},
    }


def run(client, **options) -> tuple[np.ndarray, float, dict]:
    """Queue it; return (frames, height, width, 3) uint8 of the one mp4 that came out, its frame rate, and the history entry."""
    entry = client.run(client.with_defaults(workflow(**options)))
    (file,) = [file for file in client.files(entry) if file["filename"].endswith(".mp4")]
    with av.open(io.BytesIO(client.download(file))) as video:
        stream = video.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(stream)])
        return frames, float(stream.average_rate), entry


@pytest.fixture(scope="module")
def video(client):
    return run(client)


def test_video_has_the_frames_and_the_size_asked_for(video):
    frames, rate, _ = video
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert rate == FPS


def test_video_shows_something_and_moves(video):
    frames = video[0].astype(float)
    assert frames[0].std() > 5
    # Four frames share a latent frame, and latent frames differ.
    assert min(np.abs(frames[index + 4] - frames[index]).mean() for index in range(0, FRAMES - 4, 4)) > 1


def test_nodes_tell_what_ran(video):
    texts = {node: " ".join(output["text"]) for node, output in video[2]["outputs"].items() if "text" in output}
    assert "4 steps" in texts["sampler"] and "attention: auto" in texts["attention"] and "2 chunks" in texts["latent"]


def test_another_seed_makes_another_video(client, video):
    other, _, _ = run(client, seed=8, prefix="video/other")
    assert np.abs(other.astype(float) - video[0]).mean() > 1


def test_interrupted_and_emptied_server_makes_the_same_video_again(client, video):
    """A long run is stopped while it samples, then models and cached outputs go: nothing of it may show in the next run, which equals the first."""
    prompt = client.queue(client.with_defaults(workflow(seed=99, frames=24 * 600, prefix="video/stopped")))
    while not client.get("/queue")["queue_running"] and prompt not in client.get(f"/history/{prompt}"):
        time.sleep(0.1)
    time.sleep(2)
    client.interrupt()
    with pytest.raises(QueueError, match="interrupted"):
        client.wait(prompt, seconds=120)
    client.post("/free", {"unload_models": True, "free_memory": True})
    again, _, _ = run(client, prefix="video/again")
    assert np.array_equal(again, video[0])

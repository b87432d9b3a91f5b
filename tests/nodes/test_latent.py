"""The Empty LongLive Latent node: shapes, the asked length, what it shows, and bad input."""

import dataclasses

import pytest
import torch
from longlive.accel.presets import LONGLIVE_2
from longlive.nodes.latent import LongLiveEmptyLatent
from longlive.tests.nodes.tiny_wan import tiny_wan


def run(**inputs):
    output = LongLiveEmptyLatent.execute(**({"width": 1280, "height": 704} | inputs))
    return output.args[0], output.ui.as_dict()["text"][0]


def test_five_seconds_of_longlive_2():
    latent, shown = run(seconds=5.0)
    assert latent["samples"].shape == (1, 48, 31, 44, 80)
    assert not latent["samples"].any()
    assert latent["longlive"] == {"asked_frames": 31, "asked_pixel_frames": 120, "fps": 24}
    assert "asked 5 s = 120 frames at 24 fps -> 31 latent frames -> 4 chunks (32 latents, 125 frames = 5.21 s)" in shown
    assert "VAE Stream Decode keeps the first 120 frames" in shown
    assert "880 tokens a latent frame, 7040 a chunk" in shown and "10.38 GB" in shown
    assert "assumed: no model is connected" in shown
    assert "trained at" not in shown


def test_longlive_1_by_frames():
    latent, shown = run(width=832, height=480, frames=81, release="LongLive 1.0", seconds=99.0)
    assert latent["samples"].shape == (1, 16, 21, 60, 104)
    assert latent["longlive"] == {"asked_frames": 21, "asked_pixel_frames": 81, "fps": 16}
    assert "asked 81 frames at 16 fps -> 21 latent frames -> 7 chunks (21 latents, 81 frames = 5.06 s)" in shown
    assert "chunks are whole" not in shown
    assert "3.45 GB" in shown


def test_never_fewer_frames_than_asked():
    for frames in range(1, 70):
        latent, _ = run(width=64, height=64, frames=frames)
        assert 4 * latent["samples"].shape[2] - 3 >= frames
        assert latent["longlive"]["asked_pixel_frames"] == frames


def test_own_fps_chunk_and_batch():
    latent, shown = run(width=64, height=96, seconds=1.0, fps=10, chunk_frames=2, batch_size=3)
    assert latent["samples"].shape == (3, 48, 4, 6, 4)
    assert latent["longlive"]["fps"] == 10
    assert "10 frames at 10 fps -> 4 latent frames -> 2 chunks (4 latents, 13 frames = 1.30 s)" in shown
    # 2 (K, V) * 30 layers * batch 3 * 32 frames * 6 tokens * 3072 * 2 bytes
    assert f"{2 * 30 * 3 * 32 * 6 * 3072 * 2 / 1e9:.2f} GB" in shown
    assert "trained at 1280x704" in shown


def test_the_recipe_of_a_connected_model_wins():
    model = tiny_wan(48)
    latent, shown = run(width=64, height=64, seconds=1.0, model=model)
    assert "LongLive 2.0, from the connected model's 48 latent channels" in shown
    assert latent["longlive"]["fps"] == 24
    # 2 layers of width 256, 32 frames of 4 tokens in bfloat16
    assert f"{2 * 2 * 32 * 4 * 256 * 2 / 1e9:.2f} GB" in shown
    tuned = model.clone()
    tuned.set_attachments("longlive_recipe", dataclasses.replace(LONGLIVE_2, chunk_frames=4, fps=12))
    latent, shown = run(width=64, height=64, seconds=1.0, model=tuned)
    assert "LongLive 2.0, from the connected model" in shown
    assert latent["longlive"] == {"asked_frames": 4, "asked_pixel_frames": 12, "fps": 12}
    assert "1 chunk (4 latents" in shown


def test_a_16_channel_model_is_longlive_1():
    latent, shown = run(width=832, height=480, frames=1, model=tiny_wan(16))
    assert latent["samples"].shape == (1, 16, 1, 60, 104)
    assert "asked 1 frame at 16 fps" in shown
    assert "LongLive 1.0" in shown


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"width": 1000}, ("1000x704", "multiples of 32", "992 or 1024")),
        ({"width": 840, "height": 480, "release": "LongLive 1.0"}, ("multiples of 16", "832 or 848")),
        ({"seconds": 0.0}, ("0.0 s and 0 frames", "above 0")),
        ({"release": "LongLive 3"}, ("LongLive 3", "is not known", "auto, LongLive 2.0, LongLive 1.0 would work")),
        ({"release": "LongLive 1.0", "model": 48}, ("LongLive 1.0 was asked", "48-channel", "LongLive 2.0")),
    ],
)
def test_bad_input_is_refused_in_words(inputs, words):
    if "model" in inputs:
        inputs = inputs | {"model": tiny_wan(inputs["model"])}
    with pytest.raises(ValueError) as refused:
        run(**inputs)
    for word in words:
        assert word in str(refused.value)


def test_a_model_that_is_no_wan_is_refused():
    class ImageModel:
        def get_model_object(self, name):
            assert name == "latent_format"
            return type("Format", (), {"latent_channels": 4})

    with pytest.raises(ValueError, match="4 channels; LongLive 2.0"):
        run(model=ImageModel())


def test_the_latent_lies_where_core_keeps_its_latents():
    import comfy.model_management

    latent, _ = run(width=64, height=64)
    assert latent["samples"].device == torch.device(comfy.model_management.intermediate_device())

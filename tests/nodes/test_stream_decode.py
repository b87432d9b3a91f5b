"""accel.stream_decode against one decode of the whole video by core's own VAE modules, float32 on the CPU."""

import pytest
import torch
from longlive.accel import stream_decode
from longlive.accel.geometry import pixel_frames_of
from longlive.accel.stream_decode import StreamDecoder21, StreamDecoder22, StreamOptions
from longlive.tests import tiny_vae

CHUNKS = {"ones": [1] * 11, "threes": [3, 3, 3, 2], "eights": [8, 3], "mixed": [1, 4, 3, 2, 1], "all": [11]}
STEPS = {"walk": StreamOptions(), "own forward": StreamOptions(walk=False)}


@pytest.fixture(scope="module", params=["wan22", "wan21"])
def case(request):
    """(model, decoder class, 11 latents, what core makes of them)"""
    if request.param == "wan22":
        model, cls, z = tiny_vae.wan22(), StreamDecoder22, tiny_vae.latents(48, 11)
    else:
        model, cls, z = tiny_vae.wan21(), StreamDecoder21, tiny_vae.latents(16, 11)
    with torch.no_grad():
        return model, cls, z, model.decode(z)


def _stream(decoder, z, sizes):
    return torch.cat([*(decoder.push(part) for part in z.split(sizes, dim=2)), decoder.flush()], dim=2)


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_push_equals_one_decode_bit_for_bit(case, sizes, options):
    model, cls, z, expected = case
    assert torch.equal(_stream(cls(model, options), z, sizes), expected)
    assert expected.std() > 0.1


@pytest.mark.parametrize("num_latents", [1, 2, 3, 4, 9])
def test_every_length_equals_one_decode(case, num_latents):
    model, cls, z, _ = case
    # A lone frame of 2x3 latents is the one size where the CPU's matrix product rounds by the number of frames; 4x4 is large enough.
    z = tiny_vae.latents(z.shape[1], num_latents, 4, 4) if num_latents == 1 else z[:, :, :num_latents]
    with torch.no_grad():
        expected = model.decode(z)
    assert torch.equal(_stream(cls(model), z, [1] * num_latents), expected)


def test_batch_equals_one_decode(case):
    model, cls, z, _ = case
    z = tiny_vae.latents(z.shape[1], 4, batch=2)
    with torch.no_grad():
        expected = model.decode(z)
    assert torch.equal(_stream(cls(model), z, [3, 1]), expected)


def test_reduced_exactness_options_agree_to_rounding(case):
    model, cls, z, expected = case
    got = _stream(cls(model, StreamOptions(channels_last=True, fused_norm=True)), z, [8, 3])
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


def test_all_zero_latents_stay_finite_with_the_fused_norm(case):
    model, cls, z, _ = case
    for parameter in model.decoder.conv1.bias, model.conv2.bias:
        assert parameter is not None
    got = cls(model, StreamOptions(fused_norm=True)).push(torch.zeros_like(z))
    assert torch.isfinite(got).all()


def test_reset_starts_a_new_video(case):
    model, cls, z, expected = case
    decoder = cls(model)
    decoder.push(z[:, :, :4])
    decoder.reset()
    assert torch.equal(_stream(decoder, z, [11]), expected)


def test_wan21_holds_an_odd_latent_back():
    decoder = StreamDecoder21(tiny_vae.wan21())
    z = tiny_vae.latents(16, 4)
    assert decoder.push(z[:, :, :2]).shape == (1, 3, 1, 16, 24)
    assert decoder.push(z[:, :, 2:3]).shape[2] == 8
    assert decoder.push(z[:, :, 3:]).shape == (1, 3, 0, 16, 24)
    assert decoder.flush().shape[2] == 4
    assert decoder.flush().shape[2] == 0


@pytest.mark.parametrize("first_latent", [44, 45])
def test_a_start_40_latents_early_equals_one_long_decode(first_latent):
    for model, cls, channels in ((tiny_vae.wan22(4, 8), StreamDecoder22, 48), (tiny_vae.wan21(8), StreamDecoder21, 16)):
        assert stream_decode.warmup_latents(model) == 40
        z = tiny_vae.latents(channels, 47)
        with torch.no_grad():
            expected = model.decode(z)[:, :, pixel_frames_of(first_latent) :]
        decoder = cls(model)
        start = stream_decode.warmup_start(model, first_latent)
        assert start == first_latent - 40 - (first_latent % 2 if cls is StreamDecoder21 else 0)
        frames = _stream(decoder, z[:, :, start:], [z.shape[2] - start])
        assert torch.equal(frames[:, :, pixel_frames_of(first_latent) - 4 * start :], expected)
        # 20 latents are not enough, which the 40 are there to prevent.
        late = _stream(cls(model), z[:, :, first_latent - 20 :], [67 - first_latent])
        assert not torch.equal(late[:, :, 20 * 4 - 3 :], expected)


def test_memory_is_flat_over_300_latents(case):
    _, cls, z, _ = case
    model = tiny_vae.wan22(4, 8) if cls is StreamDecoder22 else tiny_vae.wan21(8)
    decoder = cls(model)

    def held_bytes():
        return sum(t.untyped_storage().nbytes() for t in decoder._history.values())

    sizes = []
    for index in range(300):
        frames = decoder.push(z[:, :, index % 11 : index % 11 + 1])
        assert frames.shape[2] in (0, 1, 4, 8)
        if index >= 2:
            sizes.append(held_bytes())
    assert len(set(sizes)) == 1
    estimate = stream_decode.decode_memory(model, 1, 2, 3, torch.float32)
    assert sizes[0] == estimate.history_bytes


def test_history_of_the_released_size_is_3_2_gb():
    with torch.device("meta"):
        from comfy.ldm.wan.vae2_2 import WanVAE

        model = WanVAE(dim=160, dec_dim=256, z_dim=48, **tiny_vae.LEVELS)
    memory = stream_decode.decode_memory(model, 1, 44, 80, torch.bfloat16)
    assert memory.history_bytes == pytest.approx(3.2e9, rel=0.01)
    assert memory.history_bytes + memory.working_bytes < 8e9


def test_on_step_is_called_before_every_latent_and_can_stop(case):
    model, cls, z, expected = case
    seen = []
    cls(model).push(z, seen.append)
    assert seen == (list(range(11)) if cls is StreamDecoder22 else [0, 1, 3, 5, 7, 9])

    class Stop(BaseException):
        pass

    def stop(done):
        if done >= 3:
            raise Stop

    decoder = cls(model)
    with pytest.raises(Stop):
        decoder.push(z, stop)
    assert decoder.num_latents == 3
    decoder.reset()
    assert torch.equal(_stream(decoder, z, [11]), expected)


def test_messages_name_what_was_found():
    decoder = StreamDecoder22(tiny_vae.wan22())
    with pytest.raises(ValueError, match="48 channels, got 16"):
        decoder.push(tiny_vae.latents(16, 1))
    with pytest.raises(ValueError, match="got 4 dimensions"):
        decoder.push(tiny_vae.latents(48, 1)[:, :, 0])
    decoder.push(tiny_vae.latents(48, 1))
    with pytest.raises(ValueError, match="2x3 latents, got 1 of 3x3"):
        decoder.push(tiny_vae.latents(48, 1, 3, 3))
    decoder.flush()
    with pytest.raises(RuntimeError, match="reset"):
        decoder.push(tiny_vae.latents(48, 1))

"""Frame, chunk, token and byte arithmetic against counting by hand and against the released models' numbers."""

import pytest
from longlive.accel import geometry as g


def test_pixel_frames_and_first_frames_against_counting():
    # The VAE's rule spelled out: one pixel frame for the first latent frame, four for each later one.
    owner = [0]
    for latent_frame in range(1, 50):
        owner += [latent_frame] * 4
    for count in range(1, 50):
        assert g.pixel_frames_of(count) == sum(latent_frame < count for latent_frame in owner)
        assert g.first_pixel_frame(count) == owner.index(count)
    assert g.first_pixel_frame(0) == 0
    assert g.pixel_frames_of(0) == 0


def test_latent_frames_for_is_the_fewest_that_suffice():
    for pixel_frames in range(1, 300):
        count = g.latent_frames_for(pixel_frames)
        assert g.pixel_frames_of(count) >= pixel_frames > g.pixel_frames_of(count - 1)
    assert g.latent_frames_for(0) == 0


def test_chunks_for_never_cuts_frames_off():
    for chunk_frames in (1, 3, 8):
        for count in range(1, 60):
            chunks = g.chunks_for(count, chunk_frames)
            assert chunks * chunk_frames >= count > (chunks - 1) * chunk_frames


def test_seconds_round_up_but_forgive_floating_point():
    assert g.pixel_frames_for_seconds(5.0, 24) == 120
    assert g.pixel_frames_for_seconds(1.1, 30) == 33
    assert g.pixel_frames_for_seconds(5.01, 24) == 121
    assert g.pixel_frames_for_seconds(0.0, 24) == 1
    assert g.seconds(125, 24) == pytest.approx(5.2083, abs=1e-4)


def test_released_models_numbers():
    size = g.WAN22_GRID.latent_size(1280, 704)
    assert (size.channels, size.height, size.width, size.tokens_per_frame) == (48, 44, 80, 880)
    old = g.WAN21_GRID.latent_size(832, 480)
    assert (old.channels, old.height, old.width, old.tokens_per_frame) == (16, 60, 104, 1560)
    # The published 10.4 GB and 3.45 GB of the BF16 windows.
    assert g.kv_cache_bytes(30, 3072, 32, 880) == 10_380_902_400
    assert g.kv_cache_bytes(30, 1536, 12, 1560) == 3_450_470_400
    assert g.pixel_frames_of(384) == 1533


def test_kv_cache_bytes_scales_with_batch_and_dtype():
    one = g.kv_cache_bytes(2, 256, 4, 6)
    assert one == 2 * 2 * 4 * 6 * 256 * 2
    assert g.kv_cache_bytes(2, 256, 4, 6, batch=3, element_bytes=4) == one * 3 * 2


@pytest.mark.parametrize("width, height, words", [(1000, 704, ("1000x704", "992 or 1024", "height 704")), (1280, 700, ("672 or 704",)), (8, 0, ("32",))])
def test_a_size_off_the_grid_names_sizes_that_work(width, height, words):
    with pytest.raises(ValueError, match="multiples of 32") as refused:
        g.WAN22_GRID.latent_size(width, height)
    for word in words:
        assert word in str(refused.value)


def test_the_two_grids_differ():
    assert g.WAN21_GRID.latent_size(848, 480).width == 106
    with pytest.raises(ValueError, match="multiples of 16"):
        g.WAN21_GRID.latent_size(840, 480)


@pytest.mark.parametrize("height, width", [(3, 4), (4, 5), (0, 4)])
def test_odd_latents_have_no_tokens(height, width):
    with pytest.raises(ValueError, match="even"):
        g.tokens_per_frame(height, width)

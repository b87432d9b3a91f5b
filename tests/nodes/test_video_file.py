"""nodes.video_file: frames in, a playable mp4 out, whatever happens in between."""

import json
import threading
import time

import av
import numpy as np
import pytest
import torch
from comfy_api.latest import InputImpl
from longlive.nodes import video_file
from longlive.nodes.video_file import VideoWriter, pick_encoder


def frames_of(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def moving_bar(count, height=48, width=64):
    """(count, height, width, 3) uint8: a bright bar one column further in every frame, on a gradient."""
    frames = torch.zeros(count, height, width, 3, dtype=torch.uint8)
    frames += torch.linspace(20, 120, width).to(torch.uint8)[None, None, :, None]
    for index in range(count):
        frames[index, :, 4 * (index % 12) : 4 * (index % 12) + 8] = 230
    return frames


def write(path, frames, fps=24.0, metadata=None, **options):
    writer = VideoWriter(path, frames.shape[2], frames.shape[1], fps, metadata, **options)
    for part in frames.split(5):
        writer.push(part)
    return writer.finish()


def test_finish_gives_a_plain_mp4_with_every_frame(tmp_path):
    frames = moving_bar(29)
    path = write(tmp_path / "v_00001_.mp4", frames, encoder=pick_encoder(crf=10))
    assert [found.name for found in tmp_path.iterdir()] == ["v_00001_.mp4"]
    decoded = frames_of(path)
    assert decoded.shape == (29, 48, 64, 3)
    assert np.abs(decoded.astype(int) - frames.numpy().astype(int)).mean() < 4
    video = InputImpl.VideoFromFile(str(path))
    assert video.get_frame_count() == 29 and float(video.get_frame_rate()) == 24.0
    assert video.get_duration() == pytest.approx(29 / 24, abs=1e-3)


@pytest.mark.parametrize("fps", [16.0, 24.0, 23.976])
def test_frame_rate_is_kept(tmp_path, fps):
    video = InputImpl.VideoFromFile(str(write(tmp_path / "v.mp4", moving_bar(12), fps)))
    assert float(video.get_frame_rate()) == pytest.approx(fps, abs=1e-3)
    assert video.get_frame_count() == 12


def test_metadata_is_in_the_part_and_in_the_result(tmp_path):
    metadata = {"prompt": {"1": {"class_type": "X"}}, "longlive": {"chunk_frames": 8, "text": "ä; = \\ \n#"}}
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24, metadata)
    writer.push(moving_bar(2))
    path = writer.finish()
    with av.open(str(path)) as container:
        assert {key: json.loads(container.metadata[key]) for key in metadata} == metadata


def test_core_saves_the_result_without_encoding_it_again(tmp_path):
    path = write(tmp_path / "v.mp4", moving_bar(10), metadata={"longlive": 1})
    copy = tmp_path / "copy.mp4"
    InputImpl.VideoFromFile(str(path)).save_to(str(copy), metadata={"prompt": {}})

    def packets(source):
        with av.open(str(source)) as container:
            return [bytes(packet) for packet in container.demux(video=0) if packet.size]

    assert packets(copy) == packets(path)
    with av.open(str(copy)) as container:
        assert container.metadata["longlive"] == "1" and container.metadata["prompt"] == "{}"


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63), (47, 63)])
def test_odd_sizes_are_padded_by_the_last_line(tmp_path, height, width):
    frames = moving_bar(3, height, width)
    decoded = frames_of(write(tmp_path / "v.mp4", frames, encoder=pick_encoder(crf=5)))
    assert decoded.shape == (3, 48, 64, 3)
    assert np.abs(decoded[:, :height, :width].astype(int) - frames.numpy().astype(int)).mean() < 6


@pytest.mark.parametrize("name", ["libx264", "mpeg4"])
def test_every_encoder_of_this_machine_writes_a_playable_file(tmp_path, name):
    frames = moving_bar(10)
    decoded = frames_of(write(tmp_path / "v.mp4", frames, encoder=pick_encoder((name,))))
    assert decoded.shape == (10, 48, 64, 3)
    assert np.abs(decoded.astype(int) - frames.numpy().astype(int)).mean() < 12


def test_pick_encoder_says_why_the_first_choice_is_not_taken():
    assert pick_encoder().name == "libx264"
    fallback = pick_encoder(("no_such_encoder", "mpeg4"))
    assert fallback.name == "mpeg4" and "no_such_encoder is not usable" in fallback.reason
    with pytest.raises(RuntimeError, match="no video encoder: no_such_encoder is not usable"):
        pick_encoder(("no_such_encoder",))


def test_every_frame_but_the_last_is_on_disk_before_the_end(tmp_path):
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24)
    writer.push(moving_bar(20))
    deadline = time.monotonic() + 30
    while writer.frames_written < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(frames_of(writer.part_path)) >= 19
    writer.abort()


def test_abort_keeps_what_was_encoded(tmp_path):
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24)
    writer.push(moving_bar(7))
    while writer.frames_written < 7:
        time.sleep(0.01)
    assert len(frames_of(writer.abort())) == 7
    assert not (tmp_path / "v.mp4").exists()


def test_abort_without_a_frame_leaves_no_file(tmp_path):
    assert VideoWriter(tmp_path / "v.mp4", 64, 48, 24).abort() is None
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_error_reaches_the_next_push(tmp_path, monkeypatch):
    def full(self, frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(VideoWriter, "_mux", full)
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24)
    with pytest.raises(RuntimeError, match="failed after 0 frames: OSError: .*No space left"):
        for _ in range(video_file.QUEUE_STEPS + 3):
            writer.push(moving_bar(1))
            time.sleep(0.05)
    writer.abort()
    assert threading.active_count() < 20


def test_push_waits_for_a_slow_encoder_and_polls(tmp_path, monkeypatch):
    gate = threading.Event()
    encode = VideoWriter._encode

    def slow(self, pixels):
        gate.wait(30)
        encode(self, pixels)

    monkeypatch.setattr(VideoWriter, "_encode", slow)
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24)
    polls = []

    class Interrupted(BaseException):
        pass

    def poll():
        polls.append(None)
        if len(polls) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        for _ in range(video_file.QUEUE_STEPS + 3):
            writer.push(moving_bar(1), poll=poll)
    assert len(polls) == 3
    gate.set()
    writer.abort()


def test_frames_of_another_size_are_refused(tmp_path):
    writer = VideoWriter(tmp_path / "v.mp4", 64, 48, 24)
    with pytest.raises(ValueError, match="uint8 of 48x64x3, got torch.uint8 of .2, 47, 64, 3."):
        writer.push(moving_bar(2, 47))
    with pytest.raises(ValueError, match="got torch.float32"):
        writer.push(moving_bar(2).float())
    writer.abort()

"""Writes frames into an mp4 while they are still being made, so that whatever ends the run early leaves a playable file.

While the video grows, it is a fragmented mp4 (``NAME.part.mp4``) whose every frame is flushed to the file; a plain mp4 cut off in the middle could not be read
at all. When it is complete, its packets are copied, without re-encoding, into a plain ``NAME.mp4`` and the part is deleted. Encoding runs in a thread of its
own behind a short queue. Knows PyAV and tensors, not ComfyUI.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

ENCODERS = ("libx264", "libopenh264", "mpeg4")
# Decoder steps that may wait for the encoder: enough to keep both busy, little enough to hold few frames.
QUEUE_STEPS = 4
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Encoder:
    """The video encoder that is used, a sentence on why it is this one, and its quality.

    ``crf``: 0 (lossless) to 51, for libx264 only; the others get a bit rate by size.
    """

    name: str
    reason: str
    crf: int = 18

    def options(self) -> dict[str, str]:
        """Encoder settings. zerolatency: a frame leaves the encoder as soon as it went in, so a killed run loses no finished frame."""
        if self.name == "libx264":
            return {"crf": str(self.crf), "preset": "fast", "tune": "zerolatency"}
        return {}


def pick_encoder(names: tuple[str, ...] = ENCODERS, crf: int = 18) -> Encoder:
    """The first encoder of ``names`` that this PyAV has and that opens; RuntimeError with every reason if none does."""
    refused: list[str] = []
    for name in names:
        try:
            context = av.CodecContext.create(name, "w")
            context.width, context.height, context.pix_fmt, context.time_base = 64, 64, "yuv420p", Fraction(1, 24)
            context.open()
        except (av.error.FFmpegError, ValueError) as error:
            refused.append(f"{name} is not usable in this PyAV ({type(error).__name__}: {error})")
            continue
        return Encoder(name, f"{name}, because {'; '.join(refused)}" if refused else f"{name}, the first choice", crf)
    raise RuntimeError(f"no video encoder: {'; '.join(refused)}. Install PyAV from its wheels (pip install av), which bring libx264")


class VideoWriter:
    """One mp4 file in the making. Use from one thread; ``finish`` or ``abort`` ends it."""

    def __init__(
        self,
        path: str | os.PathLike,
        width: int,
        height: int,
        fps: float,
        metadata: dict[str, object] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """``path`` ends in .mp4; ``width`` and ``height`` in pixels (an odd side is padded by repeating its last line); ``fps`` in frames per second.

        ``metadata`` values are written as JSON under their keys.
        """
        self.path = Path(path)
        self.part_path = self.path.with_suffix(".part.mp4")
        self.width, self.height = width, height
        self.rate = Fraction(round(fps * 1000), 1000)
        self.encoder = encoder or pick_encoder()
        self.frames_written = 0
        self._queue: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue(QUEUE_STEPS)
        self._error: BaseException | None = None
        self._is_aborted = False

        # empty_moov puts the header first, frag_every_frame makes each frame a fragment, flush_packets hands it to the system at once.
        flags = "frag_every_frame+empty_moov+default_base_moof+use_metadata_tags"
        self._container = av.open(str(self.part_path), "w", format="mp4", options={"movflags": flags, "flush_packets": "1"})
        for key, value in (metadata or {}).items():
            self._container.metadata[key] = json.dumps(value)
        self._stream = self._container.add_stream(self.encoder.name, rate=self.rate, options=self.encoder.options())
        self._stream.width, self._stream.height = width + width % 2, height + height % 2
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = 1 / self.rate
        self._stream.codec_context.gop_size = max(1, round(2 * self.rate))
        self._stream.codec_context.max_b_frames = 0
        if self.encoder.name != "libx264":
            self._stream.bit_rate = int(0.2 * width * height * self.rate)
        self._thread = threading.Thread(target=self._run, name=f"encode {self.path.name}", daemon=True)
        self._thread.start()

    def push(self, frames: Tensor, ready: torch.cuda.Event | None = None, poll: Callable[[], None] | None = None) -> None:
        """Queue frames for the encoder, waiting while it is behind.

        frames: (f, H, W, 3) uint8 on the CPU; must not be written to afterwards. ready: recorded after the copy that fills ``frames``.
        poll: called while waiting; may raise to give up. Raises RuntimeError when the encoder failed.
        """
        if frames.dtype != torch.uint8 or frames.shape[1:] != (self.height, self.width, 3):
            raise ValueError(f"frames must be uint8 of {self.height}x{self.width}x3, got {frames.dtype} of {tuple(frames.shape)}")
        self._put((frames, ready), poll)

    def finish(self, poll: Callable[[], None] | None = None) -> Path:
        """Encode what waits, turn the part into a plain mp4, delete the part and return the mp4's path."""
        self._put(None, poll)
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            if poll is not None:
                poll()
        self._raise_error()
        remuxed = self.path.with_suffix(".remux.mp4")
        try:
            remux(self.part_path, remuxed)
            os.replace(remuxed, self.path)
        except BaseException:
            remuxed.unlink(missing_ok=True)
            raise
        self.part_path.unlink()
        return self.path

    def abort(self) -> Path | None:
        """Stop, keep the frames encoded so far as a playable part and return its path; None (and no file) if there are none."""
        self._is_aborted = True
        # The thread may wait for work or the queue may be full: drop what waits, then wake it.
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.frames_written:
            return self.part_path
        self.part_path.unlink(missing_ok=True)
        return None

    def _put(self, item: tuple[Tensor, torch.cuda.Event | None] | None, poll: Callable[[], None] | None) -> None:
        while True:
            self._raise_error()
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                if poll is not None:
                    poll()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"writing {self.part_path} failed after {self.frames_written} frames: {type(self._error).__name__}: {self._error}. "
                "Is the disk full, or the output folder gone?"
            ) from self._error

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._is_aborted:
                frames, ready = item
                if ready is not None:
                    ready.synchronize()
                for frame in frames.numpy():
                    self._encode(frame)
            self._mux(None)
        except Exception as error:  # handed to the thread that pushes
            self._error = error
        finally:
            try:
                self._container.close()
            except Exception as error:
                self._error = self._error or error

    def _encode(self, pixels: np.ndarray) -> None:
        if self.width % 2 or self.height % 2:
            pixels = np.pad(pixels, ((0, self.height % 2), (0, self.width % 2), (0, 0)), mode="edge")
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
        frame.pts = self.frames_written
        frame.time_base = 1 / self.rate
        self._mux(frame)
        self.frames_written += 1

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            packet.duration = int(1 / self.rate / packet.time_base)
            self._container.mux(packet)


def remux(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copy a video's packets and metadata into a plain mp4 with its index in front, without re-encoding."""
    options = {"movflags": "use_metadata_tags+faststart"}
    with av.open(str(source)) as reader, av.open(str(target), "w", format="mp4", options=options) as writer:
        writer.metadata.update(reader.metadata)
        stream = reader.streams.video[0]
        copy = writer.add_stream_from_template(stream, opaque=True)
        for packet in reader.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                writer.mux(packet)
    logging.debug("remuxed %s into %s", source, target)

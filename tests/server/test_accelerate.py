"""The Attention Accelerator in a running server: what the frontend is told, also when the node's result was cached."""

from __future__ import annotations

import asyncio
import struct
import threading

import aiohttp
import pytest
from longlive.tests.host.server import QueueError

TEXT = 3  # binary message: type, length of the node id, node id, text (big-endian lengths)


class ProgressTexts:
    """Collects (node id, text) of every progress text the server sends, in a thread, while the block runs."""

    def __init__(self, url: str) -> None:
        self.url = url.replace("http", "ws", 1) + "/ws?clientId=progress-texts"
        self.found: list[tuple[str, str]] = []
        self._open, self._stop = threading.Event(), threading.Event()

    def __enter__(self) -> ProgressTexts:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self._thread.start()
        assert self._open.wait(30), "the server did not open a websocket"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    async def _listen(self) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(self.url) as socket:
            self._open.set()
            while True:
                try:
                    message = await socket.receive(timeout=0.5)
                except asyncio.TimeoutError:
                    if self._stop.is_set():  # only once nothing more is coming
                        return
                    continue
                if message.type == aiohttp.WSMsgType.BINARY:
                    kind, length = struct.unpack(">II", message.data[:8])
                    if kind == TEXT:
                        self.found.append((message.data[8 : 8 + length].decode(), message.data[8 + length :].decode()))

    def of(self, node_id: str) -> list[str]:
        return [text for node, text in self.found if node == node_id]


def workflow(seed: int, **accelerator: str) -> dict[str, dict]:
    return {
        "dit": {"class_type": "LongLiveStandInDiT", "inputs": {"model": "LongLive 2.0", "seed": 1}},
        "clip": {"class_type": "LongLiveStandInCLIP", "inputs": {"seed": 1}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox in the snow", "clip": ["clip", 0]}},
        "fast": {"class_type": "LongLiveAttentionAccelerator", "inputs": {"model": ["dit", 0], "attention": "auto", "implementation": "auto"} | accelerator},
        "empty": {"class_type": "LongLiveEmptyLatent", "inputs": {"width": 64, "height": 64, "frames": 13}},
        "sample": {
            "class_type": "LongLiveChunkedSampler",
            "inputs": {"model": ["fast", 0], "positive": ["text", 0], "latent": ["empty", 0], "seed": seed, "chunk": 2, "window": 4, "sink": 2, "steps": 2},
        },
        "save": {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0], "filename_prefix": "accelerated"}},
    }


def test_the_plan_and_the_counts_reach_the_node_also_when_it_was_cached(client, server):
    for seed, shown in ((1, 3), (2, 2)):  # execute shows the plan as well; a cached node does not execute
        with ProgressTexts(server.url) as texts:
            entry = client.run(client.with_defaults(workflow(seed)))
        sent = texts.of("fast")
        assert len(sent) == shown
        assert sent[-2].startswith("attention: auto → torch (") and "calls: " not in sent[-2]
        # 2 chunks of 2 latent frames: 2 layers x 2 steps, and the clean pass without the last layer; half of them look back.
        assert "calls: 20\n" in sent[-1] and "cached: 5\n" in sent[-1] and "passed_on: none\n" in sent[-1]
        assert ("fast" in {node for name, data in entry["status"]["messages"] if name == "execution_cached" for node in data["nodes"]}) is (seed == 2)


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"attention": "fastest"}, 'attention "fastest" is unknown to this version; it can be auto or off'),
        ({"implementation": "sage"}, 'implementation "sage" is unknown to this version; it can be auto, flash-attn-4, '),
        ({"implementation": "cudnn"}, "this device is cpu; what can run here: torch, reference"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(client, values, sentence):
    with pytest.raises(QueueError) as error:
        client.queue(client.with_defaults(workflow(1, **values)))
    problems = error.value.details["node_errors"]["fast"]["errors"]
    assert problems and all(sentence in problem["details"] for problem in problems)

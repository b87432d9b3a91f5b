"""Shows plain text on a node while it runs, where there is a server and a frontend to show it."""

from __future__ import annotations

import logging
import sys


def show_text(node_class, text: str) -> None:
    """Show ``text`` on the running node and put it into the log once.

    node_class: the class that ``execute`` got; its schema must ask for ``io.Hidden.unique_id``.
    """
    logging.info("LongLive: %s", text)
    send_text(getattr(node_class.hidden, "unique_id", None), text)


def send_text(node_id: str | None, text: str) -> None:
    """Show ``text`` on the node with this id, which need not be the running one; nothing is logged. None: no graph, nothing to show it on."""
    # A test or script runs nodes without a server, and importing one has side effects: use it only where it is loaded.
    server = sys.modules.get("server")
    instance = getattr(getattr(server, "PromptServer", None), "instance", None)
    if instance is not None and node_id is not None:
        instance.send_progress_text(text, node_id)

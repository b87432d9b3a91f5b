"""Shows plain text on a node while it runs, where there is a server and a frontend to show it."""

from __future__ import annotations

import logging
import sys


def show_text(node_class, text: str) -> None:
    """Show ``text`` on the running node and put it into the log once.

    node_class: the class that ``execute`` got; its schema must ask for ``io.Hidden.unique_id``.
    """
    logging.info("LongLive: %s", text)
    # A test or script runs nodes without a server, and importing one has side effects: use it only where it is loaded.
    server = sys.modules.get("server")
    instance = getattr(getattr(server, "PromptServer", None), "instance", None)
    node_id = getattr(node_class.hidden, "unique_id", None)
    if instance is not None and node_id is not None:
        instance.send_progress_text(text, node_id)

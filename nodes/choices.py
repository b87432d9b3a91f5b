"""One sentence for a choice that is not on offer, whichever node it was made on and however the value came in."""

from __future__ import annotations

from collections.abc import Iterable


def unknown_choice(*asked: tuple[str, object, Iterable[str]]) -> str | None:
    """About the first ``(input, value, values on offer)`` whose value is not on offer, else None.

    Called from ``validate_inputs``, which then replaces core's bare list, and again from ``execute``: a value that comes through a link is not validated.
    """
    for name, value, known in asked:
        if value not in known:
            return f"{name} {value!r} is not known; one of {', '.join(known)} would work"
    return None


def refuse_unknown(*asked: tuple[str, object, Iterable[str]]) -> None:
    """Raise ValueError with the sentence of ``unknown_choice``."""
    problem = unknown_choice(*asked)
    if problem is not None:
        raise ValueError(problem)

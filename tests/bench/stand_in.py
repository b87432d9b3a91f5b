"""Stands in for packages that a bare GPU machine lacks and a benchmark does not call."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from unittest.mock import MagicMock


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for packages that core's files import and the benchmark never calls; asked last, so an installed package always wins.

    ``used`` names those that were stood in for.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.used: set[str] = set()

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        self.used.add(name.split(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass

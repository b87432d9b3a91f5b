"""Lets PyPI's torchvision import beside a CPU-only torch.

PyPI's torchvision is built for CUDA. Beside a CPU torch its compiled operators are missing, and its import ends because two operator schemas that it
registers shape functions for do not exist. Declaring just those two schemas is enough for everything ComfyUI uses. This file is copied into the
environment as ``sitecustomize.py``, so it may import nothing of ours; beside a CUDA torch it does nothing.
"""

import sys


class _DeclareOperators:
    """A finder that never finds anything: it only sees the name ``torchvision`` go by, once, and declares the schemas first."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and _DeclareOperators.library is None:
            try:
                import torch
            except ImportError:
                return None
            if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _DeclareOperators.library = library
        return None


sys.meta_path.insert(0, _DeclareOperators())

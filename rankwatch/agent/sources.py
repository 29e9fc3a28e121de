"""Whose code a source file is."""

from __future__ import annotations

import os
import sys

_STDLIB = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep


def is_torch_or_stdlib(filename: str) -> bool:
    """Whether a file is torch's, the standard library's or none (`<frozen runpy>`); a model from an installed package is not."""
    if filename.startswith(("<", _OWN)) or "/torchinductor_" in filename:  # code that inductor generated
        return True
    if _installed(filename):
        torch_file = getattr(sys.modules.get("torch"), "__file__", None)
        return torch_file is not None and filename.startswith(os.path.dirname(torch_file) + os.sep)
    return filename.startswith(_STDLIB)


def is_users(filename: str) -> bool:
    """Whether a file is the user's own code: neither torch's nor the standard library's nor an installed package's."""
    return not _installed(filename) and not is_torch_or_stdlib(filename)


def _installed(filename: str) -> bool:
    return "/site-packages/" in filename or "/dist-packages/" in filename

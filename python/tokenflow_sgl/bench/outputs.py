"""Where results will go, looked at before the work: hours of simulation must not end in a file that cannot be written.

Owns the check and its words. Writes no result. Invariant: a check leaves no file behind that was not there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tokenflow_sgl.workload.files import is_folder
from tokenflow_sgl.workload.tables import shown


def check_file(name: str, *, field: str) -> Path:
    """The path, its folder made. Raises ValueError naming `field` where nothing can be written there."""
    path = Path(name)
    refused = f"{field}: {shown(name)}, {{}}, valid: a file that can be written"
    if not name or is_folder(path):
        raise ValueError(refused.format("a folder" if name else "empty"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not was_there:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise ValueError(refused.format(getattr(error, "strerror", None) or error)) from error
    return path


def check_folder(path: Path, *, field: str) -> None:
    """Makes the folder. Raises ValueError naming `field` where no file can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{field}: {shown(str(path))}, {reason}, valid: a folder that can be written to") from error

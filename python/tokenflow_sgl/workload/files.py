"""Files that people name: whether one is there, and its text.

Owns how the file system's refusals are told. Knows no format. Invariant: whatever is typed as a path ends in a file or
in one line that names it, never in an OSError.
"""

from __future__ import annotations

from pathlib import Path

from tokenflow_sgl.workload.tables import ScenarioError


def is_file(path: Path) -> bool:
    """False also for a path that no file system takes: a name of 5000 characters raises OSError in pathlib."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """The same for a folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_utf8(path: Path, *, field: str) -> str:
    """Raises ScenarioError naming `field` and the file: without it nobody knows which of several files is wrong."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{field}: {str(path)!r}, not text ({error}), valid: a file in UTF-8") from error
    except OSError as error:
        raise ScenarioError(f"{field}: {str(path)!r}, {error.strerror}, valid: a file that can be read") from error


def beside_scenario(name: str, folder: Path | None) -> str:
    """A hardware's or model's name as it is; a file's or folder's path as seen from the scenario's folder.

    As typed, the same scenario would be of another GPU wherever it is started from.
    """
    if folder is None:
        return name
    folder = folder.absolute()  # "own.toml" is a path, and is told from a name by the slash in it
    looks_like_path = "/" in name or name.endswith((".toml", ".json")) or is_file(folder / name / "config.json")
    return str(folder / name) if looks_like_path else name

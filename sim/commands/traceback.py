"""Where in a user's code an error was raised: the frames that are neither torch's nor ours."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Final

MOST_FRAMES: Final = 6
_BENCH: Final = (Path(__file__).parents[1], Path(__file__).parents[2] / "real" / "watch")
_LIBRARY: Final = tuple(
    Path(sysconfig.get_path("purelib")) / name for name in ("torch", "_pytest", "pluggy")
)


def frames_of(error: BaseException | None) -> list[str]:
    """Returns the innermost frames of an error as "FILE:LINE in FUNCTION: code", outermost first.

    Frames of torch, of the standard library and of the bench are left out.
    """
    if error is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{_shown(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in frames
        if _is_told(Path(frame.filename))
    ][-MOST_FRAMES:]


def _is_told(path: Path) -> bool:
    if not path.is_file() or any(map(path.is_relative_to, _BENCH)):
        return False
    if path.is_relative_to(sysconfig.get_path("purelib")):
        return not any(path.is_relative_to(folder) for folder in _LIBRARY)
    return not path.is_relative_to(sysconfig.get_path("stdlib"))


def _shown(filename: str) -> str:
    """Returns a path below the current folder, or below the installed packages, without that."""
    path = Path(filename)
    for base in (Path(sysconfig.get_path("purelib")), Path.cwd()):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return filename

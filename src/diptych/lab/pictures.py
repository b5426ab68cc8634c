"""Files of pictures: which endings they have, told before anything is measured or simulated, and how one is written.

Matplotlib is loaded by those who draw; to check a name needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diptych.ground.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")


def check_picture(path: Path | None) -> None:
    """Raise ConfigError for a name whose ending is none of ENDINGS; one without an ending is a PNG, and None is no picture."""
    if path is not None and path.suffix and path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"the picture {path} ends in {path.suffix}; it must be {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        )


def write_picture(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write it to this very name, in the format of its ending. ConfigError when that cannot be done."""
    check_picture(path)
    try:
        figure.savefig(path, dpi=dpi, format=path.suffix[1:].lower() or "png")  # else matplotlib writes to another name
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from None

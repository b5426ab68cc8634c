"""The planner's dataclasses as JSON: the same names as in Python, units in the names, enums as their values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from diptych.ground.shape import StepShape


def dump(value: Any) -> str:
    """Indented JSON text."""
    return json.dumps(plain(value), indent=1)


def plain(value: Any) -> Any:
    """Lists, dicts and scalars only. Infinite times become null: JSON has no infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, StepShape):
        return [plain(one._asdict()) for one in value.shapes]
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

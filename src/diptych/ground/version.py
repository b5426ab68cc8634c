"""The version, for answers, reports and whatever decides the bits of a result."""

from __future__ import annotations

VERSION = "0.1.0"

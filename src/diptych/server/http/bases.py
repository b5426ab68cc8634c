"""What all request bodies are made of, in whichever protocol."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, FailFast
from pydantic_core import PydanticCustomError

MAX_TOOLS = 128


class Body(BaseModel):
    """Base of all request bodies: strict types, unknown fields ignored, no infinities."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Fields that nobody here knows, as far as that is looked at."""
        return ()


class StopAtFirst(FailFast):
    """FailFast that may stand in a union: a union hashes its members, and the dataclass it comes from has no hash."""

    def __hash__(self) -> int:
        return hash(type(self))


def conflict(field: str, message: str) -> PydanticCustomError:
    """What fields that exclude or need each other raise; `field` is the one to change."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": field})


def branch_of_type(value: object) -> str | None:
    """Which branch of a union an object's `type` names. The mark before it keeps it out of the paths of messages."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None

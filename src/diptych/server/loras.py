"""The routes that load and unload adapters while the server runs, by vLLM's names. Off unless the server was told so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from diptych.engine.adapters import MAX_NAME_CHARS
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from diptych.server.http.bases import Body
from diptych.server.http.errors import ApiError
from diptych.server.http.openapi import body_of, responses
from diptych.server.state import ServerState

MAX_PATH_CHARS = 4096
LoraName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadLoraBody(Body):
    """`POST /v1/load_lora_adapter`. load_inplace: in place of the adapter that has the name."""

    lora_name: LoraName
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    load_inplace: bool | None = None
    is_3d_lora_weight: Literal[False] | None = None  # experts in one tensor each, which are not adapted here


class UnloadLoraBody(Body):
    """`POST /v1/unload_lora_adapter`. lora_int_id: vLLM counts its adapters; here the name tells."""

    lora_name: LoraName
    lora_int_id: int | None = None


BODIES = (LoadLoraBody, UnloadLoraBody)


def add_loras(app: FastAPI, state: ServerState) -> None:
    """`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""
    refusals = responses(400, 403, 404, 413, 503)

    def refuse_unless_asked_for() -> None:
        if not state.config.loads_loras:
            raise ApiError(
                403, "adapters are not loaded at run time here; the option for it is --runtime-lora", code="not_allowed"
            )
        state.desk.refuse_when_draining()

    @app.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadLoraBody), responses=refusals)
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter from a folder on the server's machine, to be asked for as a model."""
        refuse_unless_asked_for()
        body = await state.bodies.read(request, LoadLoraBody)
        name = body.lora_name
        if name in state.generation.names:
            raise ApiError(400, f"lora_name is {name!r}, which is the model's own", param="lora_name")
        if not _is_folder(body.lora_path):
            raise ApiError(404, f"lora_path {body.lora_path[:200]!r} is no folder here", param="lora_path")
        try:
            await state.engine.load_lora(name, body.lora_path, replaces=bool(body.load_inplace))
        except LoadError as error:
            raise ApiError(400, str(error), param="lora_path", code="invalid_adapter") from error
        except ConfigError as error:
            raise ApiError(400, str(error), param="lora_name", code="invalid_value") from error
        except CapacityError as error:  # waiting does not help
            raise ApiError(400, str(error), param="lora_path", code="adapter_limit") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadLoraBody), responses=refusals)
    async def unload_lora_adapter(request: Request) -> Response:
        """Take no new requests for an adapter, and answer when its last one is over and its memory free."""
        refuse_unless_asked_for()
        body = await state.bodies.read(request, UnloadLoraBody)
        if state.generation.adapters.named(body.lora_name) is None:
            raise ApiError(404, f"the LoRA adapter {body.lora_name[:100]!r} cannot be found", param="lora_name")
        await state.engine.unload_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, a NUL
        return False

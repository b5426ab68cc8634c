"""langchain's chat model as its users set it up, through chats and through Responses."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Literal

import pytest
from pydantic import BaseModel, SecretStr

from server_process import ServerProcess


@pytest.mark.parametrize("by_responses", [False, True])
def test_langchain_streams_calls_tools_and_holds_a_schema(server: ServerProcess, by_responses: bool) -> None:
    """Through chats and through Responses: the same text and usage, a call and its result, an object of a class."""
    # not at the top: it takes seconds, of each process that collects tests
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_time(city: Literal["Rome", "Oslo"]) -> str:
        """the time of a city"""
        return "12:00"

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model="diptych-10m", temperature=0, max_retries=0,
        use_responses_api=by_responses, stream_usage=True,
    )  # fmt: skip
    whole = chat.invoke("What is the capital of Finland?")
    streamed = reduce(operator.add, chat.stream("What is the capital of Finland?"))
    assert streamed.text == whole.text == "The capital of Finland is Helsinki."
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata is not None
    forced = chat.bind_tools([get_time], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage("What time is it in Rome?")
    called = forced.invoke([asked])
    [call] = called.tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")
    result = get_time.invoke(call)
    assert chat.bind_tools([get_time], tool_choice="none").invoke([asked, called, result]).text

    class Place(BaseModel):
        city: Literal["Rome", "Oslo"]

    held = chat.with_structured_output(Place, method="json_schema").invoke("Where is the Colosseum?")
    assert isinstance(held, Place)

"""langchain-openai: a chat, a stream, several at once, a record, calls of a tool, a text completion."""

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

address, model, prompt, _, calling = sys.argv[1:6]
where = {"base_url": f"{address}/v1", "api_key": "any", "model": model, "temperature": 0, "max_tokens": 20}


class Count(BaseModel):
    """A number of things."""

    number: Literal["one", "two", "many"]
    exact: bool


chat = ChatOpenAI(**where)
whole = chat.invoke(prompt)
several = chat.batch([prompt, prompt])
stream = "".join(str(one.content) for one in chat.stream(prompt))
record = ChatOpenAI(**where | {"max_tokens": 200}).with_structured_output(Count).invoke(prompt)
tools = ChatOpenAI(**where | {"base_url": f"{calling}/v1", "max_tokens": 200})
called = tools.with_structured_output(Count, method="function_calling").invoke(prompt)
bound = tools.bind_tools([Count], tool_choice="Count", parallel_tool_calls=False)
first, *rest = bound.stream(prompt)
for one in rest:
    first += one
print(
    json.dumps(
        {
            "chat": [whole.content, stream, *(one.content for one in several)],
            "text": OpenAI(**where).invoke(prompt),
            "records": [record.model_dump(), called.model_dump()],
            "called": [{"name": call["name"], "args": call["args"]} for call in bound.invoke(prompt).tool_calls],
            "streamed": [{"name": call["name"], "args": call["args"]} for call in first.tool_calls],
        }
    )
)

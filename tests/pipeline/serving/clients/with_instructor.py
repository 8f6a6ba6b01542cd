"""instructor: records in three of its ways, the default among them; the client that it wraps answers."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

address, model, prompt, _, calling = sys.argv[1:6]
asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 200}


class Count(BaseModel):
    """A number of things."""

    number: Literal["one", "two", "many"]
    exact: bool


def record(where: str, mode: instructor.Mode) -> Count:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{where}/v1", api_key="any"), mode=mode)
    return client.chat.completions.create(**asked, response_model=Count, max_retries=0)


free = instructor.from_openai(openai.OpenAI(base_url=f"{address}/v1", api_key="any"), mode=instructor.Mode.MD_JSON)
whole = free.chat.completions.create(**asked | {"max_tokens": 20}, response_model=None, temperature=0)
modes = [getattr(instructor.Mode, name) for name in ("JSON_SCHEMA", "TOOLS", "TOOLS_STRICT")]
print(
    json.dumps(
        {
            "chat": [whole.choices[0].message.content],
            "records": [record(calling, mode).model_dump() for mode in modes],
        }
    )
)

"""instructor: structured output is refused by name; the client that it wraps answers."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel

address, model, prompt = sys.argv[1:4]
messages = [{"role": "user", "content": prompt}]
client = openai.OpenAI(base_url=f"{address}/v1", api_key="any")


class Count(BaseModel):
    """A number of things."""

    number: int


def refusal(mode: instructor.Mode) -> str:
    """Ask for structured output in one of instructor's ways; return the refusal."""
    asked = instructor.from_openai(client, mode=mode)
    try:
        asked.chat.completions.create(model=model, messages=messages, response_model=Count, max_retries=0)
    except Exception as error:
        return str(error)
    return ""


free = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
whole = free.chat.completions.create(model=model, messages=messages, response_model=None, temperature=0, max_tokens=20)
print(
    json.dumps(
        {
            "chat": [whole.choices[0].message.content],
            "error": refusal(instructor.Mode.TOOLS),
            "schema": refusal(instructor.Mode.JSON_SCHEMA),
        }
    )
)

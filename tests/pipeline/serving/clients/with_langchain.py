"""langchain-openai: a chat, a stream, several at once with a number of tokens, structured output, a text completion."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

address, model, prompt = sys.argv[1:4]
where = {"base_url": f"{address}/v1", "api_key": "any", "model": model, "temperature": 0, "max_tokens": 20}


class Count(BaseModel):
    """A number of things."""

    number: int


chat = ChatOpenAI(**where)
whole = chat.invoke(prompt)
several = chat.batch([prompt, prompt])
stream = "".join(str(one.content) for one in chat.stream(prompt))
try:
    chat.with_structured_output(Count).invoke(prompt)
    error = ""
except openai.BadRequestError as refused:
    error = str(refused)
print(
    json.dumps(
        {
            "chat": [whole.content, stream, *(one.content for one in several)],
            "text": OpenAI(**where).invoke(prompt),
            "error": error,
        }
    )
)

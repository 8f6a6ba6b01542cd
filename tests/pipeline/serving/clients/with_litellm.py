"""litellm: a chat, a stream, a text completion, an error."""

import json
import sys

import litellm

address, model, prompt = sys.argv[1:4]
where = {"api_base": f"{address}/v1", "api_key": "any", "temperature": 0, "max_tokens": 20}
messages = [{"role": "user", "content": prompt}]

whole = litellm.completion(model=f"openai/{model}", messages=messages, **where)
stream = litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **where)
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=prompt, **where)
try:
    litellm.completion(model=f"openai/{model}", messages=[{"role": "user", "content": prompt * 10_000}], **where)
    error = ""
except litellm.BadRequestError as refused:
    error = str(refused)
print(
    json.dumps(
        {
            "chat": [whole.choices[0].message.content, "".join(one.choices[0].delta.content or "" for one in stream)],
            "text": text.choices[0].text,
            "error": error,
        }
    )
)

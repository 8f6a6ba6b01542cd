"""litellm: a file, a batch of it, and its results."""

import json
import sys
import time

import litellm

address, model, prompt = sys.argv[1:4]
where = {"custom_llm_provider": "openai", "api_base": f"{address}/v1", "api_key": "any"}
body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 20}
url = "/v1/chat/completions"
rows = [{"custom_id": str(row), "method": "POST", "url": url, "body": body} for row in range(3)]

text = "\n".join(map(json.dumps, rows))
file = litellm.create_file(file=("rows.jsonl", text.encode()), purpose="batch", **where)
batch = litellm.create_batch(completion_window="24h", endpoint=url, input_file_id=file.id, **where)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.1)
    batch = litellm.retrieve_batch(batch_id=batch.id, **where)
content = litellm.file_content(file_id=batch.output_file_id, **where)
lines = [json.loads(line) for line in content.text.splitlines()]
print(
    json.dumps(
        {
            "status": batch.status,
            "chat": [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines],
            "listed": len(litellm.list_batches(**where).data),
        }
    )
)

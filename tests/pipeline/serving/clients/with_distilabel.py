"""distilabel: its model for OpenAI's API, as the steps of its pipelines call it."""

import json
import sys

from distilabel.models import OpenAILLM

address, model, prompt = sys.argv[1:4]
llm = OpenAILLM(model=model, base_url=f"{address}/v1", api_key="any")
llm.load()
answers = llm.generate(
    inputs=[[{"role": "user", "content": prompt}]] * 2, num_generations=1, temperature=0.0, max_new_tokens=20
)
print(json.dumps({"chat": [answer["generations"][0] for answer in answers]}))

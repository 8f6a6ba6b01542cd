"""lm-eval: log-likelihoods of answers by `local-completions`, and generated ones by `local-chat-completions`."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

address, model, prompt, tokenizer = sys.argv[1:5]
ANSWERS = ["red and blue", "nothing at all"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
GENERATE = """
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["%%"], max_gen_toks: 20, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match}]
"""

folder = Path("tasks")
folder.mkdir()
data = folder.absolute() / "test.jsonl"
data.write_text(json.dumps({"question": prompt, "choices": ANSWERS}) + "\n", encoding="utf-8")
for name, kind, rest in (("pens", "multiple_choice", CHOICE), ("told", "generate_until", GENERATE)):
    text = TASK.format(name=name, data=data, kind=kind) + rest
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def samples(kind: str, path: str, task: str, **more: object) -> list[dict[str, object]]:
    """Evaluate one task; return what came of each row."""
    arguments = {"model": model, "base_url": f"{address}/v1/{path}", "num_concurrent": 1, "max_retries": 1}
    arguments |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[task], task_manager=TaskManager(include_path=str(folder)), **more
    )
    return found["samples"][task]


[scored] = samples("local-completions", "completions", "pens", bootstrap_iters=0)
[told] = samples("local-chat-completions", "chat/completions", "told", bootstrap_iters=0, apply_chat_template=True)
print(
    json.dumps(
        {
            "loglikelihoods": [[float(one[0][0]), str(one[0][1])] for one in scored["resps"]],
            "chat": [told["resps"][0][0]],
        }
    )
)

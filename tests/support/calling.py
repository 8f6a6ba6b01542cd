"""Models with a chat template for tools."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

_TEMPLATE = """{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|end|>{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def with_tools(model: Path, folder: Path, *, tokens: bool) -> Path:
    """Copy the model with a chat template for tools, whose marks may be tokens; return the copy's folder."""
    tokenizer, base = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.chat_template = _TEMPLATE
    if tokens:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
        base.resize_token_embeddings(len(tokenizer))
    base.config.max_position_embeddings = 4096
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

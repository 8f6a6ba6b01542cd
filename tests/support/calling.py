"""Models with a chat template for tools."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

_TEMPLATE = """{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|end|>{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
_TAGS, _THOUGHTS = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")


def with_tools(
    model: Path, folder: Path, *, tokens: bool, reasons: bool = False, special: bool = False, shown: bool = True
) -> Path:
    """Copy the model with a chat template for tools, or its own, and room for long chats; return the copy's folder.

    Args:
        shown: The template is one for tools.
        tokens: Marks of calls are tokens.
        reasons: The template begins reasoning, whose marks are tokens.
        special: Those tokens are special ones.
    """
    tokenizer, base = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    begin = "<|assistant|>"
    template = _TEMPLATE if shown else tokenizer.chat_template
    tokenizer.chat_template = template.replace(begin, begin + _THOUGHTS[0]) if reasons else template
    if marks := _TAGS * tokens + _THOUGHTS * reasons:
        tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
        base.resize_token_embeddings(len(tokenizer))
    base.config.max_position_embeddings = 4096
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""Tools of a chat: what a body asks for, and the form in which the model's chat template has calls of them written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from drafter.calls import CallForm, Calls
from drafter.structured_outputs import StructuredOutputs
from pipeline.openai.errors import (
    bad_request,
    can_only_be,
    checked_fields,
    checked_name,
    clipped,
    contradiction,
    invalid,
    to_json,
)
from pipeline.openai.messages import is_function

MOST_TOOLS = 128
"""OpenAI's limit."""
_OBJECT = to_json({"type": "object"})
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FIELDS = {"name": str, "description": str, "parameters": dict, "strict": bool}
_FORMS: tuple[tuple[str, CallForm | None], ...] = (
    # No JSON objects with a name: Qwen3-Coder, GLM, DeepSeek, gpt-oss, Command R, Mistral's newer form, Kimi
    (r"<function=|<arg_key>|<｜tool▁call|<\|channel\|>|<\|START_ACTION\|>|\[ARGS\]|<\|tool_calls_section", None),
    # SmolLM2
    (r"<tool_call>(\\n|\s)*\[", CallForm("<tool_call>", "[", ", ", "]</tool_call>")),
    # Mistral 7B, Mistral Nemo
    (r"\[TOOL_CALLS\] \[", CallForm("[TOOL_CALLS]", " [", ", ", "]")),
    (r"\[TOOL_CALLS\]", CallForm("[TOOL_CALLS]", "[", ", ", "]")),
    # Granite 3
    (r"<\|tool_call\|>", CallForm("<|tool_call|>", "[", ", ", "]")),
    # Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4
    (r"<tool_call>", CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")),
    # Llama 3.1 and later
    (r"<\|python_tag\|>", CallForm("<|python_tag|>", arguments="parameters", bare=True)),
    (r'"parameters": dictionary', CallForm(arguments="parameters", bare=True)),
    ("", CallForm(bare=True)),
)
"""Forms of calls, by what a chat template has in it; the first one counts."""


@dataclass(frozen=True)
class Function:
    """A function that may be called; `parameters` is the JSON schema of its arguments, as JSON text."""

    name: str
    parameters: str
    strict: bool


@dataclass(frozen=True)
class Tools:
    """The functions that may be called, whether there must be a call, and whether there may be several."""

    functions: tuple[Function, ...]
    needed: bool = False
    several: bool = True

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.functions]

    def calls(self, form: CallForm, wanted: StructuredOutputs | None) -> Calls:
        """Return what the output must be; `wanted` is what an answer without calls must be.

        Arguments follow their schema if a call is needed or the function is strict, and are some object otherwise.

        Raises:
            RequestError: Calls and such an answer cannot be told apart in this form.
        """
        functions = tuple(
            (one.name, one.parameters if self.needed or one.strict else _OBJECT) for one in self.functions
        )
        answer = "" if wanted is None else wanted.json or _OBJECT
        return Calls(form, functions, self.several, None if self.needed else answer)


def chat_tools(tools: Any, choice: Any, several: bool | None) -> Tools | None:
    """Return what `tools`, `tool_choice` and `parallel_tool_calls` of a body ask for; None where nothing can be called.

    A function that `tool_choice` names is called once, as with OpenAI.

    Raises:
        OpenAIError: They are not of OpenAI's form, or do not go together.
    """
    if tools is not None and not (isinstance(tools, list) and all(map(is_function, tools))):
        raise invalid("tools", 'be a list of tools of type "function"', tools)
    tools = tools or []
    if len(tools) > MOST_TOOLS:
        message = f"Invalid 'tools': up to {MOST_TOOLS} are allowed, not {len(tools)}."
        raise bad_request(message, "tools", "array_above_max_length")
    functions = tuple(_function(tool["function"], f"tools[{place}].function") for place, tool in enumerate(tools))
    names = [one.name for one in functions]
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise bad_request(f"Invalid 'tools': there are several functions {twice!r}.", "tools", "invalid_value")
    name = _chosen(choice)
    if not functions and choice not in (None, "none", "auto"):
        raise contradiction("'tool_choice' needs 'tools'.", "tool_choice")
    if not functions or choice == "none":
        return None
    if name is not None:
        functions = tuple(one for one in functions if one.name == name)
        if not functions:
            message = f"Invalid 'tool_choice': there is no function {clipped(name)!r} in 'tools'."
            raise bad_request(message, "tool_choice", "invalid_value")
    return Tools(functions, name is not None or choice == "required", several is not False and name is None)


def _function(function: dict[str, Any], path: str) -> Function:
    given = checked_fields(function, _FIELDS, path)
    name = checked_name(given, path)
    parameters = {"type": "object", **given.get("parameters", _NOTHING)}
    if parameters["type"] != "object":
        raise invalid(f"{path}.parameters", 'be a JSON schema of type "object"', parameters, "invalid_value")
    return Function(name, to_json(parameters), given.get("strict", False))


def _chosen(choice: Any) -> str | None:
    """Return the name of the function that `tool_choice` names, if it does."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return None
    if not is_function(choice) or not isinstance(choice["function"].get("name"), str):
        raise can_only_be("tool_choice", '"none", "auto", "required" or a function by its name', choice)
    return str(choice["function"]["name"])


def call_form(tokenizer: Any, tools: Sequence[Any]) -> CallForm | None:
    """Return the form of calls in a tokeniser's chat template; None for one that is no JSON object with a name."""
    return _form_of(_template(tokenizer, tools) or "")


def reads_tools(tokenizer: Any, tools: Sequence[Any]) -> bool:
    """Return whether a tokeniser's chat template reads tools; also if it has none, which is said elsewhere."""
    from drafter.text.chat import names_in  # late: what only parses bodies does without transformers

    template = _template(tokenizer, tools)
    return template is None or names_in(template, "tools")


def _template(tokenizer: Any, tools: Sequence[Any]) -> str | None:
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError:  # which is said where messages are encoded
        return None


@lru_cache(maxsize=8)
def _form_of(template: str) -> CallForm | None:
    return next(form for sign, form in _FORMS if re.search(sign, template))

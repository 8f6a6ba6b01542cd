"""Names of settings that users bring along from vLLM, OpenAI, transformers and `ray.data.llm`, and ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_TOOLS = "an endpoint's chats have tools and tool_choice, also in a batch; elsewhere a call is text"
_BEAMS = "each sample is decoded by itself; ask for several, and choose"
_FILTERS = "the filters are top_k, top_p and min_p"
_LORA = "one adapter is merged as the model is loaded: adapter"
_QUANTISED = "a checkpoint says itself how it is quantised; dequantize loads it as floating-point numbers"
_FOLLOWS = "it follows from max_num_seqs and batch_size"
_STAGES = "the engine does it: give messages, prompt or prompt_token_ids"

OURS = {
    # of a request
    **dict.fromkeys(("guided_choice", "guided_decoding", "guided_grammar"), "structured_outputs"),
    **dict.fromkeys(("guided_json", "guided_regex"), "structured_outputs"),
    **dict.fromkeys(("json_schema", "response_format"), "structured_outputs"),
    "best_of": "n",
    "bad_words_ids": "bad_words",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "output_scores": "logprobs",
    "sampling_params": "sampling",
    "sequence_bias": "logit_bias",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stream": "SpeculativeLM.stream",
    "suppress_tokens": "logit_bias",
    "top_logprobs": "logprobs",
    # of an engine
    "accelerator_type": "gpus",
    "enforce_eager": "compile",
    "gpu_memory_utilization": "kv_gib",
    "max_batch_size": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_seq_length": "max_model_len",
    "model_source": "model",
    "num_speculative_tokens": "num_draft_tokens",
    "placement_group_config": "gpus",
    "pretrained_model_name_or_path": "model",
    "speculative_config": "drafter",
    "torch_dtype": "dtype",
}
"""Our names by theirs."""

_TEMPLATE = "it is an argument of chat, a column of rows, and a field of a chat's body"

ELSEWHERE = {
    **dict.fromkeys(("chat_template_kwargs", "continue_final_message", "documents", "tools"), _TEMPLATE),
    "n": "it is an argument of generate and chat, n of an endpoint's body, and reading.samples of a job",
    "prompt_logprobs": "it is an argument of generate and chat, and a field of an endpoint's body",
    "timeout": "it is a field of Request, for SpeculativeLM.submit",
    "use_tqdm": "it is an argument of generate and chat",
}
"""Names that are ours, too, but not settings of a request: where they belong."""

NOT_SUPPORTED = {
    **dict.fromkeys(("function_call", "functions", "parallel_tool_calls", "tool_choice"), _TOOLS),
    **dict.fromkeys(("early_stopping", "length_penalty", "num_beams", "use_beam_search"), _BEAMS),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "mirostat", "top_h", "typical_p"), _FILTERS),
    **dict.fromkeys(("enable_lora", "lora_request", "max_loras"), _LORA),
    **dict.fromkeys(("max_concurrent_batches", "max_pending_requests", "max_tasks_in_flight_per_actor"), _FOLLOWS),
    **dict.fromkeys(("apply_chat_template", "chat_template_stage", "detokenize_stage", "tokenize_stage"), _STAGES),
    **dict.fromkeys(("apply_detokenize", "detokenize", "has_image", "tokenize"), _STAGES),
    "acceptance": "rows are what the target model says; drafter evaluate measures with forced acceptance",
    "assistant_model": "load the model with drafter='model:FOLDER'",
    "enable_chunked_prefill": "long prompts are always read in parts",
    "enable_prefix_caching": "prompts that begin alike always share that part: see kept_rows",
    "guidance_scale": "the model is run on the prompt alone",
    "include_stop_str_in_output": "the text ends before the stop string",
    "logits_processor": "no code comes with a request",
    "logits_processors": "no code comes with a request",
    "negative_prompt_ids": "the model is run on the prompt alone",
    "no_repeat_ngram_size": "repetitions are rarer by repetition_penalty or frequency_penalty",
    "quantization": _QUANTISED,
    "quantization_config": _QUANTISED,
    "rollout": "drafter generate runs programs; a dataset goes through a stage for each round",
    "revision": "download that revision, and give its folder as model",
    "runtime_env": "it is that of the Ray job",
    "should_continue_on_error": "a row that fails always has its __inference_error__, and the others go on",
    "skip_special_tokens": "text is without special tokens, and token_ids has all",
    "spaces_between_special_tokens": "text is without special tokens, and token_ids has all",
    "task_type": "the only one is generate",
    "tokenizer": "it is the model's own",
    "truncate_prompt_tokens": "a prompt that is too long is an error: shorten it",
}
"""Names for which there is nothing, and why, or what to do instead."""


def hint(name: str, known: Iterable[str]) -> str | None:
    """Return what to write in place of an unknown name, as the end of a message; None if nothing is like it."""
    if ours := OURS.get(name):
        return f": use {ours}"
    if place := ELSEWHERE.get(name):
        return f": {place}"
    if why := NOT_SUPPORTED.get(name):
        return f": not supported: {why}"
    close = get_close_matches(name, list(known), 1)
    return f": use {close[0]}" if close else None

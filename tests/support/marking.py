"""Small tokenisers whose marks of reasoning and of calls are special tokens, other added ones, or spelled."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

BYTES = {"▁a": "Ġa", "▁": "Ġ", "▁yes": "Ġyes", "\n": "Ċ", "<0xE2>": "â", "<0x82>": "Ĥ", "<0xAC>": "¬"} | {
    "▁.": "Ġ.",
    "▁[": "Ġ[",
}
"""Entries of the vocabulary of pieces, and those of the vocabulary of bytes."""
WORDS = ["a", "b", ".", "{", "}", "]", "<s>", *BYTES]
SPELLED = [*"<>/[]THINKthinkTOL_CALSol_cal", '{"name": "f", "arguments": ']
MARKS = ["<think>", "</think>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>"]
DECODERS = {
    "pieces": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "bytes": decoders.ByteLevel(),
}
KINDS = ("special", "plain", "text")


def made(decoder: str, kind: str, template: str = "<tool_call>", *, cleans: bool = False) -> Any:
    """A tokeniser whose marks are special tokens, other added ones, or spelled."""
    words = [
        BYTES.get(word, word) if decoder == "bytes" else word for word in dict.fromkeys(["[UNK]", *WORDS, *SPELLED])
    ]
    words = [word.replace(" ", "Ġ" if decoder == "bytes" else "▁") for word in words]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.decoder = DECODERS[decoder]
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if kind != "text":
        tokenizer.add_tokens([AddedToken(mark, special=kind == "special", normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=cleans,
        chat_template="{{ tools }}<think></think>" + template,
        eos_token="<s>",
    )


TOKENIZERS = {(decoder, kind): made(decoder, kind) for decoder in DECODERS for kind in KINDS}


def ids_of(tokenizer: Any, *words: str) -> list[int]:
    """Tokens by their entries in the vocabulary; what is none is spelled."""
    vocabulary, found = tokenizer.get_vocab(), list[int]()
    for word in words:
        named = _entry(word, byte_level="Ġ" in vocabulary)
        found += [vocabulary[named]] if named in vocabulary else [vocabulary[one] for one in named]
    return found


def _entry(word: str, *, byte_level: bool) -> str:
    return (BYTES.get(word, word) if byte_level else word).replace(" ", "Ġ" if byte_level else "▁")

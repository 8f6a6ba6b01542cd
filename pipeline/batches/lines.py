"""The lines of a batch: its requests, checked as OpenAI checks them, and their results, kept as they come."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.batches.records import Counts, Problem
from pipeline.openai.batch import answered_line, failure_line
from pipeline.openai.errors import OpenAIError, parse_json, server_error, shown, to_json

_MOST_PROBLEMS = 100  # that a batch tells
_BETWEEN = re.compile(r"[\s:,]*")  # before a name or a value of an object

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Line:
    custom_id: str
    body: bytes


class InputLines:
    """The requests of a checked file, by their number from 0."""

    def __init__(self, file: Path, offsets: Sequence[int]) -> None:
        self._file, self._offsets = file, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, number: int) -> Line:
        with self._file.open("rb") as stream:
            stream.seek(self._offsets[number])
            return _line_of(stream.readline().decode())


def _line_of(text: str) -> Line:
    # The body is what the client wrote, to the byte, as in a live request: nothing that writes it anew can fail.
    decoder, found = json.JSONDecoder(), dict[str, tuple[Any, str]]()
    start = _next(text, text.index("{") + 1)
    while text[start] != "}":
        name, end = decoder.raw_decode(text, start)
        start = _next(text, end)
        value, end = decoder.raw_decode(text, start)
        found[name] = value, text[start:end]
        start = _next(text, end)
    return Line(found["custom_id"][0], found["body"][1].encode())


def _next(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    assert between is not None
    return between.end()


def check_lines(file: Path, endpoint: str, most: int) -> tuple[InputLines, list[Problem]]:
    """Return the lines of a file, and what is wrong with it as the input of a batch. Blank lines are left out."""
    offsets, problems, seen, offset = list[int](), list[Problem](), dict[str, int](), 0
    with file.open("rb") as stream:
        for place, line in enumerate(stream, start=1):
            if line.strip():
                problem = _problem(line, place, endpoint, seen)
                problems += [] if problem is None else [replace(problem, line=place)]
                offsets.append(offset)
            offset += len(line)
            if len(offsets) > most:
                message = f"The file has more than the {most} requests that a batch may have: split it."
                return InputLines(file, ()), [Problem("too_many_tasks", message)]
            if len(problems) == _MOST_PROBLEMS:
                break
    if not offsets:
        problems.append(Problem("empty_file", "The file has no requests."))
    return InputLines(file, offsets), problems


def _problem(line: bytes, place: int, endpoint: str, seen: dict[str, int]) -> Problem | None:
    try:
        given = parse_json(line)
    except OpenAIError as error:
        return Problem("invalid_json_line", error.message.replace("The body", "The line"))
    if not isinstance(given, dict):
        return Problem("invalid_json_line", f"The line is not a JSON object, but {shown(given)}.")
    custom_id = given.get("custom_id")
    wrong: dict[str, str] = {}
    if not isinstance(custom_id, str) or not custom_id:
        wrong["custom_id"] = f"must be a text, not {shown(custom_id)}"
    if given.get("method") != "POST":
        wrong["method"] = f"must be POST, not {shown(given.get('method'))}"
    if not isinstance(given.get("body"), dict):
        wrong["body"] = f"must be an object, not {shown(given.get('body'))}"
    for param, must in wrong.items():
        if given.get(param) is None:
            return Problem("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
        return Problem("invalid_request", f"Invalid '{param}': it {must}.", param)
    if given.get("url") != endpoint:
        message = f"The url {shown(given.get('url'))} is not the batch's endpoint {endpoint}."
        return Problem("url_mismatch", message, "url")
    if (first := seen.setdefault(str(custom_id), place)) != place:
        message = f"The custom_id {shown(custom_id)} is that of line {first}, too: each must be another one."
        return Problem("duplicate_custom_id", message, "custom_id")
    return None


@dataclass(frozen=True)
class Result:
    """What a request came to: the HTTP status and JSON text of its answer."""

    number: int
    custom_id: str | None
    status: int
    body: str


class Results:
    """Results of a batch in one file, in the order in which they came. One that was torn by a kill is cut off.

    Attributes:
        counts: Those of all results.
    """

    def __init__(self, file: Path, total: int, created: int) -> None:
        self._file, self._created = file, created
        self._places: dict[int, tuple[int, int, bool]] = {}  # offset and length of each line, and whether it is ok
        self.counts = Counts(total)
        self._size = 0
        file.touch()
        with file.open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    self._note(line)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def append(self, results: Sequence[Result]) -> None:
        """Write results to disk; they are all there when this returns. Raises `OSError`, and then none of them is."""
        lines = [self._line(one) for one in results]
        with self._file.open("r+b") as stream:
            stream.truncate(self._size)  # what is behind that has been left by a write that failed
            stream.seek(self._size)
            stream.writelines(lines)
            stream.flush()
            os.fsync(stream.fileno())
        for line in lines:
            self._note(line)

    def _line(self, result: Result) -> bytes:
        try:
            return self._written(result)
        except Exception:  # an answer that is not what answers are is this line's trouble alone
            logger.exception("An answer of a line of a batch cannot be kept")
            return self._written(replace(result, status=500, body=to_json(server_error().body())))

    def _written(self, result: Result) -> bytes:
        usage: dict[str, Any] = json.loads(result.body)["usage"] if result.status == 200 else {}
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        tokens = (usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
        text = answered_line(result.custom_id, str(result.number), self._created, result.status, result.body)
        return " ".join([*map(str, (result.number, result.status, *tokens)), text]).encode() + b"\n"

    def _note(self, line: bytes) -> None:
        number, status, prompt, cached, output, text = line.split(b" ", 5)
        self._places[int(number)] = (self._size + len(line) - len(text), len(text), status == b"200")
        self._size += len(line)
        self.counts.completed += status == b"200"
        self.counts.failed += status != b"200"
        self.counts.input_tokens += int(prompt)
        self.counts.cached_tokens += int(cached)
        self.counts.output_tokens += int(output)

    def answers(self) -> Iterator[bytes]:
        """Yield the lines of answers, in the order of the input."""
        return self._read(number for number in sorted(self._places) if self._places[number][2])

    def errors(self, requests: InputLines, *, expired: bool) -> Iterator[bytes]:
        """Yield the error lines in the order of the input, also of requests without a result if these have expired."""
        message = "This request could not be executed before the completion window expired."
        for number in range(len(requests)):
            if number in self._places:
                if not self._places[number][2]:
                    yield from self._read([number])
            elif expired:
                custom_id = requests.read(number).custom_id
                line = failure_line(custom_id, custom_id, self._created, "batch_expired", message)
                yield to_json(line).encode() + b"\n"

    def _read(self, numbers: Iterable[int]) -> Iterator[bytes]:
        with self._file.open("rb") as stream:
            for number in numbers:
                offset, length, _ = self._places[number]
                stream.seek(offset)
                yield stream.read(length)

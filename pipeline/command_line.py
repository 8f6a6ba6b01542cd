"""What the jobs' command lines share: typed settings from YAML and the command line, and one line for each error."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from drafter.errors import one_line
from pipeline.errors import InputError, JobError, JobStopped

Config = TypeVar("Config")

_SETTINGS = "Settings come from --config (YAML), then from the command line, which wins. --print_config shows them."


def run_job(job: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None) -> int:
    """Run a job, and print one line that says what stopped it.

    Returns:
        0 if it is done, 2 for a mistake in the configuration or the input, 1 if it failed, 143 or 130 if it was stopped
        by SIGTERM or SIGINT.
    """
    try:
        job(arguments)
    except InputError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"error: the job failed: {one_line(error)}; submit it again to go on", file=sys.stderr)
        return 1
    except JobStopped as stopped:
        print(f"stopped: {one_line(stopped)}; submit the job again to go on", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted; submit the job again to go on", file=sys.stderr)
        return 130
    return 0


def command_of(job: str, arguments: Sequence[str] | None) -> str:
    """Return the command that repeats a job, for the record.

    Args:
        job: The module to run.
        arguments: Its command line (`sys.argv` by default).
    """
    return shlex.join(["python", "-m", job, *(sys.argv[1:] if arguments is None else arguments)])


def make_parser(config_class: type, job: str, required: str, description: str) -> ArgumentParser:
    """Make the command line of a job.

    Args:
        config_class: A dataclass; its fields are the settings.
        job: The module to run.
        required: Settings without a default, as the usage shows them.
        description: What the job does, with examples.
    """
    parser = ArgumentParser(
        prog=f"python -m {job}",
        usage=f"python -m {job} {required} [--config FILE] [settings]",
        description=f"{description}\n\n{_SETTINGS}",
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    parser.add_class_arguments(config_class)
    return parser


def parse(config_class: type[Config], parser: ArgumentParser, arguments: Sequence[str] | None = None) -> Config:
    """Read a configuration from a command line (`sys.argv` by default).

    Raises:
        InputError: A setting is unknown, a value is of the wrong type or out of range, or a file cannot be read.
        SystemExit: `--help` or `--print_config` was asked for, and has been printed.
    """
    given = _spelled_out(config_class, sys.argv[1:] if arguments is None else arguments)
    return _checked(config_class, parser, lambda: parser.parse_args(given))


def parse_object(config_class: type[Config], parser: ArgumentParser, settings: Mapping[str, Any]) -> Config:
    """Read a configuration from a mapping, in which groups of settings are mappings too.

    Raises:
        InputError: A setting is unknown, or a value is of the wrong type or out of range.
    """
    if "config" in settings:  # only a command line has it
        raise InputError("Option 'config' is not accepted")
    return _checked(config_class, parser, lambda: parser.parse_object(dict(settings)))


def _spelled_out(config_class: type, arguments: Sequence[str]) -> list[str]:
    """Write `--verifier NAME` as `--verifier.name NAME`, and so for every group of settings that has a name.

    In the same way, `--learning true` is `--learning.enabled true`. A group may also be given whole, as
    `{name: NAME, …}`.
    """
    groups = {
        f"--{name}": field.name
        for name, kind in get_type_hints(config_class).items()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if field.name in ("name", "enabled")
    }
    found = []
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        given = value if equals else "".join(arguments[place + 1 : place + 2])
        is_value = option in groups and not given.startswith("{")
        found.append(f"{option}.{groups[option]}{equals}{value}" if is_value else argument)
    return found


def _checked(config_class: type[Config], parser: ArgumentParser, read: Callable[[], Namespace]) -> Config:
    try:
        return config_class(**_values(config_class, read()))
    except InputError:
        raise
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise InputError(_readable(str(error))) from error


def _values(kind: type, settings: Namespace, prefix: str = "") -> dict[str, Any]:
    """Return the settings that a dataclass has, groups as theirs; jsonargparse adds where it found them."""
    values = {field.name: settings[field.name] for field in dataclasses.fields(kind)}
    for name, inner in get_type_hints(kind).items():
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            values[name] = _group(f"{prefix}{name}", inner, values[name])
    return values


def _group(name: str, kind: type, settings: Any) -> Any:
    """Return a group of settings as its dataclass.

    A dataclass of `drafter` does not know the group's name, and leaves it out of its errors: it is added here.
    """
    if not isinstance(settings, Namespace):
        raise InputError(f"{name} must be a group of settings, not {settings!r}")
    try:
        return kind(**_values(kind, settings, f"{name}."))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{name}.{error}") from error


def _readable(message: str) -> str:
    """Return a message of jsonargparse on one line, without Python's words for types."""
    message = one_line(message)
    key = re.search(r'Parser key "([^"]+)":', message)
    if key and "Unable to load config" in message:
        return f"{key[1]} must be a group of settings, such as {{name: …}}"
    given = re.search(r"(?:Given value|Got value): (.*)$", message)
    expected = re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal(\[[^\]]*\]))", message)
    if key and given and expected:
        names = {
            "NoneType": "null",
            "str": "text",
            "int": "an integer",
            "float": "a finite number",
            "bool": "true or false",
            "tuple": "a list",
        }
        kinds = [names.get(kind, kind) or "one of " + choices[1:-1].replace("'", "") for kind, choices in expected]
        return f"{key[1]} must be {' or '.join(kinds)}, not {given[1]}"
    return message.replace("Problems parsing config: ", "the configuration is not YAML: ")


def at_least(name: str, value: float | None, low: float, *, above: bool = False) -> None:
    """Refuse a setting that is too small or not finite; None means that it is not set.

    jsonargparse's own restricted types would not check configurations that are made in Python, and their messages do
    not say what is allowed.

    Args:
        name: The setting's name, for the message.
        value: Its value.
        low: The least value that is allowed.
        above: Whether only values above `low` are allowed.

    Raises:
        InputError: The value is refused.
    """
    if value is not None and (not math.isfinite(value) or value < low or (above and value == low)):
        raise InputError(f"{name} must be {'more than' if above else 'at least'} {low:g}, not {value:g}")

"""Typed configurations from YAML and the command line, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
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
    """Run a job and say in one line what stopped it.

    Returns:
        0 when it is done, 2 for a mistake in the configuration or the input, 1 for a job that failed, 143 and 130 for
        one that was stopped by SIGTERM and SIGINT.
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


def make_parser(config_class: type, job: str, required: str, description: str) -> ArgumentParser:
    """The command line of a job.

    Args:
        config_class: A dataclass; its fields are the settings.
        job: The module to run.
        required: Settings without a default, as they are to be given.
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
    """The configuration that a command line asks for (`sys.argv` by default).

    Raises:
        InputError: An unknown setting, a value of the wrong type or out of range, or a file that cannot be read.
        SystemExit: `--help` or `--print_config` was asked for, and is done.
    """
    return _checked(config_class, parser, lambda: parser.parse_args(arguments))


def parse_object(config_class: type[Config], parser: ArgumentParser, settings: Mapping[str, Any]) -> Config:
    """The configuration that settings from elsewhere ask for, groups as mappings in the mapping.

    Raises:
        InputError: An unknown setting, or a value of the wrong type or out of range.
    """
    if "config" in settings:  # which only a command line has
        raise InputError("Option 'config' is not accepted")
    return _checked(config_class, parser, lambda: parser.parse_object(dict(settings)))


def _checked(config_class: type[Config], parser: ArgumentParser, read: Callable[[], Namespace]) -> Config:
    try:
        values = _values(config_class, read())
        for name, kind in get_type_hints(config_class).items():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                values[name] = _group(name, kind, values[name])
        return config_class(**values)
    except InputError:
        raise
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise InputError(readable(str(error))) from error


def _values(kind: type, settings: Namespace) -> dict[str, Any]:
    """Return the settings that a dataclass has; jsonargparse adds where it found them."""
    return {field.name: settings[field.name] for field in dataclasses.fields(kind)}


def _group(name: str, kind: type, settings: Any) -> Any:
    """Return a group of settings as its dataclass.

    A dataclass of `drafter` does not know the group's name, and leaves it out of its errors: it is added here.
    """
    if not isinstance(settings, Namespace):
        raise InputError(f"{name} must be a group of settings, not {settings!r}")
    try:
        return kind(**_values(kind, settings))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{name}.{error}") from error


def readable(message: str) -> str:
    """jsonargparse's messages on one line, without Python's words for types."""
    message = one_line(message)
    key = re.search(r'Parser key "([^"]+)":', message)
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
    """Refuse a setting that is too small or not finite; None is not set.

    Raises:
        InputError: It is.
    """
    if value is not None and (not math.isfinite(value) or value < low or (above and value == low)):
        raise InputError(f"{name} must be {'more than' if above else 'at least'} {low:g}, not {value:g}")

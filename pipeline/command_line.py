"""Command lines of the jobs: typed settings from YAML and options, help pages, and errors of one line."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentError, RawDescriptionHelpFormatter, _HelpAction
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from drafter.errors import one_line, without_secrets
from drafter.other_names import NOT_SUPPORTED, OURS
from pipeline.errors import InputError, JobError, JobStopped, NoClusterError

Config = TypeVar("Config")

_SETTINGS = """\
Settings come from --config (YAML), then from the command line, which wins. --print_config shows them."""
_MOST_COLUMNS, _OPTION_COLUMNS = 110, 34
_TEXTS = tuple[str, ...]  # settings of texts
_LONGEST_MESSAGE = 10_000  # of jsonargparse
_ALIKE = 0.7  # similarity (see `difflib`) from which an unknown name counts as a misspelling of a known one


def job_main(
    parse: Callable[[Sequence[str] | None], Any], job: str, *, command: str | None = None, resumes: bool = True
) -> Callable[..., int]:
    """Return the `main` of a job's module, which takes the command line (`sys.argv` by default); see `run_job`.

    Args:
        job: The job as `module:function`. Its import takes seconds, so the command line is parsed before.
        command: The job's name, if its function takes the command that repeats it as well.
        resumes: See `run_job`.
    """

    def run(arguments: Sequence[str] | None) -> int | None:
        config = parse(arguments)
        more = () if command is None else (command_of(command, arguments),)
        result: int | None = resolve_name(job)(config, *more)
        return result

    def main(arguments: Sequence[str] | None = None) -> int:
        return run_job(run, arguments, resumes=resumes)

    return main


def run_job(
    job: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None, *, resumes: bool = True
) -> int:
    """Run a job, print errors on one line, and return the exit code.

    The code is the job's result or 0 on success; 2 for a mistake in the configuration or the input; 1 for a failure;
    143 or 130 after SIGTERM or SIGINT. Only of a job that `resumes` is it said that the same command goes on.
    """
    goes_on = "; submit the job again to go on" if resumes else ""
    try:
        return job(arguments) or 0
    except InputError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except NoClusterError as error:
        say(f"error: {one_line(error)}")
        return 1
    except (JobError, OSError) as error:  # the latter is storage that is full, or cannot be reached
        say(failure_line(error) if resumes else f"error: {one_line(error)}")
        return 1
    except JobStopped as stopped:
        print(f"stopped: {one_line(stopped)}{goes_on}", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print(f"interrupted{goes_on}", file=sys.stderr)
        return 130


def failure_line(error: Exception | str) -> str:
    """Return the last line of a job that failed on the way and can go on: exit code 1."""
    return f"error: the job failed: {one_line(error)}; submit it again to go on"


def command_of(job: str, arguments: Sequence[str] | None) -> str:
    """Return the command that repeats a job, without credentials."""
    return without_secrets(shlex.join(["drafter", job, *(sys.argv[1:] if arguments is None else arguments)]))


def say(line: str) -> None:
    """Print a status line to stderr."""
    print(without_secrets(line), file=sys.stderr, flush=True)


class JobParser(ArgumentParser):
    """A job's command line. `--help` shows common settings, `--help-all` all of them."""

    def __init__(self, *arguments: Any, common: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.common = tuple(common)
        if common:
            self.add_argument("--help-all", action=_HelpAll, help="Show all settings.")

    def settings(self) -> dict[str, Action]:
        """Return all options by name, except help options and whole groups."""
        # A group that may be left out has a help option of its own.
        helps = {action.dest for action in self._actions if isinstance(action, _HelpAction)}
        actions = {action.dest: action for action in self._actions if action.dest.rpartition(".")[2] not in helps}
        groups = {name.rpartition(".")[0] for name in actions}
        return {name: action for name, action in actions.items() if name not in groups}

    def format_help(self, formatter: Any = None, *, everything: bool = False) -> str:
        page = _HelpPage(self.prog)
        page.add_usage(self.usage, [], [])
        page.add_text(self.description)
        settings = self.settings()
        general = [action for action in self._actions if action.dest in ("help", "help_all", "config", "print_config")]
        if self.common and not everything:
            sections = [("common settings", [settings[name] for name in self.common])]
        else:
            shown = {id(action) for action in settings.values()} - {id(action) for action in general}
            sections = [
                (group.title or "settings", [action for action in group._group_actions if id(action) in shown])
                for group in self._action_groups
            ]
        for title, actions in [*sections, ("help and files", general)]:
            page.start_section(title)
            page.add_arguments(actions)
            page.end_section()
        if self.common and not everything:
            page.add_text(f"--help-all shows all {len(settings)} settings.")
        return page.format_help()


class _HelpAll(_HelpAction):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help(everything=True), end="")
        parser.exit()


class _HelpPage(RawDescriptionHelpFormatter):
    def __init__(self, program: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        super().__init__(program, max_help_position=_OPTION_COLUMNS, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, _HelpAction):
            return ", ".join(action.option_strings)
        if not action.option_strings:
            return action.dest
        return f"{action.option_strings[0]} {_value_kind(action)}".rstrip()

    def _expand_help(self, action: Action) -> str:
        if action.dest == "print_config":
            return "Print the settings as such a file, and exit."
        if isinstance(action, _HelpAction):
            return str(action.help) if action.dest == "help_all" else "Show this page."
        default = str(action.default).lower() if isinstance(action.default, bool) else action.default
        unset = default in (None, SUPPRESS, (), {}, "")
        return (action.help or "") + ("" if unset else f" (default: {default})")


def _value_kind(action: Action) -> str:
    if action.dest in ("config", "print_config"):
        return "FILE" if action.dest == "config" else ""
    kind = _kind_of(action)
    is_union = get_origin(kind) in (Union, UnionType)
    options = [one for one in get_args(kind) if one is not type(None)] if is_union else [kind]
    return "|".join(dict.fromkeys(map(_word_for, options)))


def _kind_of(action: Action) -> Any:
    return getattr(action, "_typehint", action.type)


def _word_for(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    words = {None: "TEXT", str: "TEXT", int: "N", float: "X", bool: "true|false"}
    return words.get(kind) or ("LIST" if get_origin(kind) in (list, tuple) else "VALUE")


def make_parser(config_class: type, job: str, required: str, description: str, common: Sequence[str] = ()) -> JobParser:
    """Make a job's command line; `required` is how the usage shows settings without a default."""
    parser = new_parser(job, f"{required} [--config FILE] [settings]".strip(), f"{description}\n\n{_SETTINGS}", common)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings.")
    parser.add_class_arguments(config_class)
    for action in parser.settings().values():
        if _kind_of(action) == _TEXTS:
            action.__dict__["_typehint"] = _TEXTS | str  # one will do, as in Python
    return parser


def new_parser(job: str, usage: str, description: str, common: Sequence[str] = ()) -> JobParser:
    """Make the command line of a job without settings; see `make_parser`."""
    name = f"drafter {job}"
    # An abbreviation may be the name that a setting has in another job.
    options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    return JobParser(prog=name, usage=f"{name} {usage}", description=description, common=common, **options)


def parse_arguments(parser: JobParser, arguments: Sequence[str] | None = None) -> Namespace:
    """Read a command line (`sys.argv` by default) without a configuration class.

    Raises:
        InputError: An option is unknown, missing, or of the wrong type.
        SystemExit: After `--help`.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return parser.parse_args(given)
    except (ArgumentError, TypeError, ValueError) as error:
        raise InputError(_readable(str(error), parser)) from error


def parse(
    config_class: type[Config],
    parser: JobParser,
    arguments: Sequence[str] | None = None,
    prepare: Callable[[Namespace], None] = lambda settings: None,
) -> Config:
    """Read a configuration from a command line (`sys.argv` by default).

    Args:
        prepare: Changes settings before they are checked: it reads files that stand for them, for one.

    Raises:
        InputError: A setting is unknown, a value is of the wrong type or out of range, or a file cannot be read.
        SystemExit: After `--help` or `--print_config`.
    """
    given = _spelled_out(config_class, parser, sys.argv[1:] if arguments is None else arguments)
    given = _joined(config_class, given)

    def read() -> Namespace:
        settings = parser.parse_args(given)
        prepare(settings)
        return settings

    return _checked(config_class, parser, read)


def parse_object(config_class: type[Config], parser: JobParser, settings: Mapping[str, Any]) -> Config:
    """Read a configuration from a mapping, in which groups of settings are mappings too; see `parse`."""
    if "config" in settings:  # only a command line has it
        raise InputError("unknown setting config: only a command line has it")
    return _checked(config_class, parser, lambda: parser.parse_object(dict(settings)))


def _spelled_out(config_class: type, parser: JobParser, arguments: Sequence[str]) -> list[str]:
    # `--verifier NAME` is `--verifier.name NAME`, `--verifier.theta` is `--verifier.settings.theta`, `--learning` is
    # `--learning.enabled`, and `--dry_run` is `--dry_run true`. A group may also be given whole, as `{name: NAME, …}`.
    known = parser.settings()
    switches = {f"--{name}" for name, action in known.items() if _kind_of(action) is bool}
    groups = {
        f"--{name}": field.name
        for name, kind in get_type_hints(config_class).items()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if field.name in ("name", "enabled")
    }
    found = []
    for place, argument in enumerate(arguments):
        group, dot, own = argument.partition(".")
        if dot and f"{group[2:]}.settings" in known and f"{group[2:]}.{re.split('[.=]', own)[0]}" not in known:
            argument = f"{group}.settings.{own}"
        option, equals, value = argument.partition("=")
        given = value if equals else "".join(arguments[place + 1 : place + 2])
        is_value = option in groups and not given.startswith("{")
        found.append(f"{option}.{groups[option]}{equals}{value}" if is_value else argument)
        if found[-1] in switches and (not given or given.startswith("--")):
            found.append("true")
    return found


def _joined(config_class: type, arguments: Sequence[str]) -> list[str]:
    # The settings of a group that may be left out become one object: jsonargparse would take the text `[a-z]` of one
    # of them for a list.
    fields = {
        f"--{name}.{group}.{field.name}": (f"--{name}.{group}", field.name, get_type_hints(of_group)[field.name])
        for name, kind in get_type_hints(config_class).items()
        if dataclasses.is_dataclass(kind)
        for group, hint in get_type_hints(kind).items()
        for of_group in get_args(hint)
        if dataclasses.is_dataclass(of_group)
        for field in dataclasses.fields(of_group)
    }
    found: list[str] = []
    groups: dict[str, dict[str, Any]] = {}
    rest = deque(arguments)
    while rest:
        option, equals, value = (argument := rest.popleft()).partition("=")
        if option not in fields:
            found.append(argument)
            continue
        group, name, kind = fields[option]
        if kind is bool and not equals and (not rest or rest[0].startswith("--")):
            value = "true"
        elif not equals and rest:
            value = rest.popleft()
        is_text = kind is Any or str in get_args(kind)
        groups.setdefault(group, {})[name] = value if is_text else _json_or_text(value)
    return [*found, *(f"{group}={json.dumps(values, ensure_ascii=False)}" for group, values in groups.items())]


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _checked(config_class: type[Config], parser: JobParser, read: Callable[[], Namespace]) -> Config:
    try:
        return config_class(**_values(config_class, read()))
    except InputError:
        raise
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise InputError(_readable(str(error), parser)) from error


def _values(kind: type, settings: Namespace, prefix: str = "") -> dict[str, Any]:
    # Without the config paths of jsonargparse.
    values = {field.name: settings[field.name] for field in dataclasses.fields(kind)}
    for name, inner in get_type_hints(kind).items():
        if not (isinstance(inner, type) and dataclasses.is_dataclass(inner)):
            groups = [one for one in get_args(inner) if isinstance(one, type) and dataclasses.is_dataclass(one)]
            if groups and isinstance(values[name], Namespace):  # a group that may be left out
                values[name] = groups[0](**vars(values[name]))
            continue
        if not isinstance(values[name], Namespace):
            raise InputError(f"{prefix}{name} must be a group of settings, not {values[name]!r}")
        try:
            values[name] = inner(**_values(inner, values[name], f"{prefix}{name}."))
        except InputError:
            raise
        except ValueError as error:  # which lacks the group's name
            raise InputError(f"{prefix}{name}.{error}") from error
    return values


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the most similar known name, or why there is none; or nothing.

    A setting without its group, such as `max_num_seqs`, matches `engine.max_num_seqs`.
    """
    known = list(known)
    last = {one.rpartition(".")[2]: one for one in reversed(known)}
    word = name.rpartition(".")[2].lstrip("-")
    if why := NOT_SUPPORTED.get(word):
        return f": not supported: {why}"
    if (ours := OURS.get(word)) in last:
        return f": did you mean {last[ours]}?"
    close = get_close_matches(name, known, 1, _ALIKE)
    close = close or [last[one] for one in get_close_matches(name.rpartition(".")[2], last, 1, _ALIKE)]
    return f": did you mean {close[0]}?" if close else ""


def _unknown_option(message: str, parser: JobParser) -> str | None:
    # None if jsonargparse's message is about something else.
    settings = parser.settings()
    if found := re.search(r"unrecognized arguments: (.*)", message):
        options = [f"--{name}" for name, action in settings.items() if action.option_strings]
        given = found[1].split()[0].partition("=")[0]
        if not given.startswith("-"):
            return f"unexpected argument {given!r}: settings are given as --name value; --help lists them"
        return f"unknown option {given}{did_you_mean(given, options) or ': --help lists them'}"
    if found := re.search(r"Group '(.+)' does not accept option '(.+)'|Option '(.+)' is not accepted", message):
        given = f"{found[1]}.{found[2]}" if found[1] else found[3]
        return f"unknown setting {given}{did_you_mean(given, settings) or ': --help lists them'}"
    return None


def _of_group(message: str) -> str:
    # What is wrong inside of a group that may be left out, which jsonargparse tells beside the other choice: null.
    found = re.search(r'Parser key "([^"]+)":.* Problem with given class_path \S+: (.*?) - Expected a ', message)
    if not found:
        return message
    group, inner = found.groups()
    return re.sub(r"^(Parser key \"|Option ')", rf"\1{group}.", inner)


def _readable(message: str, parser: JobParser) -> str:
    message = _of_group(one_line(message, _LONGEST_MESSAGE))
    if (unknown := _unknown_option(message, parser)) is not None:
        return unknown
    if found := re.search("the following arguments are required: (.*)", message):
        settings = parser.settings()
        needed = [(settings[one].option_strings or [one])[0] for one in found[1].split(", ")]
        return f"{' and '.join(needed)} {'is' if len(needed) == 1 else 'are'} missing: --help shows how"
    if found := re.search(r'Parser key "config": (File does not exist|Path is not a file): (.*)', message):
        return f"config {found[2]} {'does not exist' if 'exist' in found[1] else 'is not a file'}"
    key = re.search(r'Parser key "([^"]+)":', message)
    if key and "Unable to load config" in message:
        return f"{key[1]} must be a group of settings, such as {{name: …}}"
    given = re.search(r"(?:Given value|Got value): (.*)$", message)
    if key and given and ("Expected a dot import path" in message or "accepted by the base class" in message):
        return f"{key[1]} must be a group of settings or null, not {given[1]}"
    expected = re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal(\[[^\]]*\]))", message)
    if key and given and expected:
        names = {
            "NoneType": "null",
            "str": "text",
            "int": "an integer",
            "float": "a finite number",
            "bool": "true or false",
            "list": "a list",
            "tuple": "a list",
            "dict": "an object",
        }
        kinds = [names.get(kind, kind) or "one of " + choices[1:-1].replace("'", "") for kind, choices in expected]
        return f"{key[1]} must be {' or '.join(kinds)}, not {given[1]}"
    return message.replace("Problems parsing config: ", "the configuration is not YAML: ")


def at_least(name: str, value: float | None, low: float, *, above: bool = False) -> None:
    """Raise `InputError` if a setting is below `low`, or at it with `above`, or not finite; None means unset.

    jsonargparse's restricted types would not check configurations made in Python.
    """
    if value is not None and (not math.isfinite(value) or value < low or (above and value == low)):
        raise InputError(f"{name} must be {'more than' if above else 'at least'} {low:g}, not {value:g}")

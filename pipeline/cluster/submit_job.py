"""Submits a job to a cluster with the working directory, shows its log, and retries until it is done."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafter.errors import one_line
from drafter.source_commit import ROOT, for_a_copy
from pipeline.command_line import at_least, make_parser, parse, say
from pipeline.errors import InputError, JobError, NoClusterError

_MISTAKE = 2  # exit code of a job whose configuration or input cannot be used, which is not retried
_EXCLUDED = (".git", ".venv", "build")
_POLL_SECONDS = 2.0
_PATIENCE = 30  # consecutive failures of the cluster to answer


@dataclass(frozen=True)
class SubmitConfig:
    """Submission of a job.

    Args:
        address: Address of the cluster's dashboard, such as http://localhost:8265; by default RAY_API_SERVER_ADDRESS.
        working_dir: Folder that the job runs in; it is sent without .git, .venv, build and what .gitignore names.
        runtime_env: YAML file with more of the job's runtime environment: env_vars, pip and the like.
        submissions: How often the job is submitted at most.
        name: Prefix of the submissions' ids. A running job of this name is followed instead of submitted once more: it
            may have been submitted by a command that was killed.
    """

    address: str | None = None
    working_dir: str = "."
    runtime_env: str | None = None
    submissions: int = 5
    name: str | None = None

    def __post_init__(self) -> None:
        at_least("submissions", self.submissions, 1)
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name):
            raise InputError(f"name must be one word of letters, digits, dots and hyphens, not {self.name!r}")

    def environment(self) -> dict[str, Any]:
        """Return the job's runtime environment; `InputError` if a setting is no folder or no such file."""
        if not Path(self.working_dir).is_dir():
            raise InputError(f"working_dir {self.working_dir} is not a folder")
        more: Any = {}
        if self.runtime_env is not None:
            try:
                more = yaml.safe_load(Path(self.runtime_env).read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError) as error:
                raise InputError(f"runtime_env {self.runtime_env} cannot be read: {one_line(error)}") from error
            if not isinstance(more, dict) or not isinstance(more.get("env_vars", {}), dict):
                raise InputError(f"runtime_env {self.runtime_env} is not a mapping such as `env_vars: {{NAME: value}}`")
            for name, value in more.get("env_vars", {}).items():
                if not (isinstance(name, str) and isinstance(value, str)):  # YAML reads 4 as a number, and no as false
                    said = f"env_vars has {name}: {value!r}, and variables are texts"
                    raise InputError(f"runtime_env {self.runtime_env}: {said}: put quotes around it")
        if Path(self.working_dir).resolve() == ROOT:  # the copy has no .git, and results name the commit that made them
            more["env_vars"] = {**for_a_copy(), **more.get("env_vars", {})}
        return {"working_dir": self.working_dir, "excludes": list(_EXCLUDED), **more}


_DESCRIPTION = """\
Submit a job to a Ray cluster, show its log, and submit it again until it is done.

The command after -- runs on the cluster's head, in a copy of this folder. A job that fails on the way
is submitted again and goes on where it stopped; one with a mistake in its configuration is not.
Exit codes: 0, the job is done; 2, there is a mistake; 1, the job failed too often or was stopped;
130, you interrupted this command, and the job goes on.

  drafter submit -- drafter generate --input s3://bucket/questions --output s3://bucket/out
  drafter submit --address http://head:8265 --submissions 20 -- drafter train --config train.yaml"""


def parse_config(arguments: Sequence[str] | None = None) -> tuple[SubmitConfig, str]:
    """Parse a command line into the submission's settings and the command to run; `InputError` without a command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = make_parser(SubmitConfig, "submit", "", _DESCRIPTION)
    parser.usage = "drafter submit [--config FILE] [settings] -- drafter JOB …"
    config = parse(SubmitConfig, parser, given[:split])
    if not (command := given[split + 1 :]):
        raise InputError("no job: give its command after --, such as `-- drafter generate --input …`")
    return config, shlex.join(command)


def submit(submission: tuple[SubmitConfig, str]) -> None:
    """Submit a command until it succeeds.

    Raises `InputError` if the job cannot be sent, or its configuration or input cannot be used, and `JobError` if no
    cluster answers, the job was stopped, or all submissions failed.
    """
    config, command = submission
    environment = config.environment()
    client = _connect(config.address)
    from ray.job_submission import JobStatus

    for number in range(1, config.submissions + 1):
        name, new = _hand_over(client, command, environment, config.name)
        how = "submitted as" if new else "still under way as"
        say(f"{how} {name} ({number} of at most {config.submissions}): {command}")
        try:
            ended = asyncio.run(_follow(client, name))
        except KeyboardInterrupt:
            say(f"the job goes on; `ray job logs --follow {name}` shows it, `ray job stop {name}` ends it")
            raise SystemExit(130) from None
        if ended.status == JobStatus.SUCCEEDED:
            return
        if ended.status == JobStatus.STOPPED:
            raise JobError(f"{name} was stopped")
        if ended.driver_exit_code == _MISTAKE:
            raise InputError(f"{name} ended with a mistake in its configuration or input: see above")
        say(f"{name} failed: {one_line(ended.message or 'no reason is known')}")
    raise JobError(f"{config.submissions} submissions did not finish it")


def _connect(address: str | None) -> Any:
    from ray.exceptions import RayError  # Ray takes seconds to import
    from ray.job_submission import JobSubmissionClient

    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.ERROR)
    if address is not None:
        os.environ["RAY_API_SERVER_ADDRESS"] = address  # Ray would prefer what is there to what it is given
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:  # such as a job's own Ray, for its token
        where = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"
        raise NoClusterError(
            f"no cluster takes jobs at {where}: start one here by `ray start --head`, or give the address of another's "
            f"dashboard, as --address http://HEAD:8265 ({one_line(error)})"
        ) from error


def _hand_over(client: Any, command: str, environment: dict[str, Any], name: str | None) -> tuple[str, bool]:
    # The submission's id, and whether it is new: with a name, it may be a running one. A head that has just been
    # started may not be ready yet.
    for failures in range(_PATIENCE):
        try:
            chosen = None
            if name is not None:
                earlier = _submissions(client, name)
                for job in earlier.values():
                    if not job.status.is_terminal():
                        _refuse_another(job, command)
                        return str(job.submission_id), False
                chosen = f"{name}-{max(earlier, default=0) + 1}"
            return str(client.submit_job(entrypoint=command, runtime_env=environment, submission_id=chosen)), True
        except InputError:
            raise
        except (TypeError, ValueError) as error:  # such as a variable that is no text, or a folder that is too large
            raise InputError(f"the job cannot be submitted: {one_line(error)}") from error
        except (RuntimeError, OSError) as error:
            if failures == _PATIENCE - 1:
                raise JobError(f"the cluster did not take the job: {one_line(error)}") from error
            time.sleep(_POLL_SECONDS)
    raise AssertionError


def _submissions(client: Any, name: str) -> dict[int, Any]:
    found = ((re.fullmatch(rf"{re.escape(name)}-(\d+)", job.submission_id or ""), job) for job in client.list_jobs())
    return {int(match[1]): job for match, job in found if match}


def _refuse_another(job: Any, command: str) -> None:
    if job.entrypoint != command:
        raise InputError(
            f"{job.submission_id} is under way with another command: {job.entrypoint}; give another name, or end it: "
            f"`ray job stop {job.submission_id}`"
        )


async def _follow(client: Any, name: str) -> Any:
    from aiohttp import ClientError

    shown = failures = 0
    while True:
        passed = 0  # each connection sends the log from its beginning
        try:
            async for text in client.tail_job_logs(name):
                print(text[max(shown - passed, 0) :], end="", flush=True)
                passed += len(text)
                shown = max(shown, passed)
            details = client.get_job_info(name)
            failures = 0
            if details.status.is_terminal():
                return details
        except (RuntimeError, OSError, ClientError) as error:
            failures += 1
            if failures > _PATIENCE:
                raise JobError(f"the cluster does not answer, and {name} may still run: {one_line(error)}") from error
        await asyncio.sleep(_POLL_SECONDS)

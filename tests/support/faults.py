"""What goes wrong, on purpose and for real: processes end by signals, not by exceptions."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pyarrow import fs

from drafter.drafters.contract import Ask
from drafter.engine.handle import Handle
from drafter.llm import SpeculativeLM
from drafter.requests import Request
from pipeline.engines.models import EngineSpec
from pipeline.learning.config import LearnerSpec
from pipeline.learning.learner_actor import LearnerActor


@dataclass(frozen=True)
class FragileEngine(EngineSpec):
    """An engine that says where it runs, and that some prompts are the end of.

    Args:
        notes: A folder for a file named by each process's id, and one a row that enters.
        deadly: A step with this token in a row's prompt ends the process.
        step_seconds: Each step takes so much longer.
    """

    notes: Path = Path()
    deadly: int | None = None
    step_seconds: float = 0.0

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        lm = super().load(on_stage)
        engine, step, submit = lm.engine, lm.engine.step, lm.engine.submit

        def fragile_step() -> None:
            step()
            time.sleep(self.step_seconds)
            if any(self.deadly in sequence.handle.request.prompt_ids for sequence in engine.scheduler.active):
                kill_me()

        def noted_submit(request: Request, *, stream: bool = False) -> Handle:
            with (self.notes / "entered").open("a") as file:
                file.write(f"{request.request_id}\n")
            return submit(request, stream=stream)

        engine.step, engine.submit = fragile_step, noted_submit  # type: ignore[method-assign]
        (self.notes / f"{os.getpid()}.pid").touch()
        return lm


@dataclass(frozen=True)
class UnhurriedEngine(EngineSpec):
    """An engine that says where it runs, and that takes its time until it is told to go.

    Every other step drafts by a learnt head, once there is one, whether that pays or not.

    Args:
        notes: A folder for a file named by each process's id; a file `go` there lets steps be as fast as they are.
        steps: So many steps of a process take a moment each; those after them take so long that rows do not run out.
    """

    notes: Path = Path()
    steps: int = 300

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        lm = super().load(on_stage)
        engine, step, numbers = lm.engine, lm.engine.step, count()

        def unhurried_step() -> None:
            step()
            if not (self.notes / "go").exists():
                time.sleep(0.1 if next(numbers) < self.steps else 5.0)

        engine.step = unhurried_step  # type: ignore[method-assign]
        plan, turns = engine.budget.plan, count()

        def daring_plan(rows: int) -> Ask:
            members = enumerate(engine.drafter.members.items())
            able = [place for place, (name, one) in members if name.startswith("head") and one.drafts]
            return Ask(3, 0.25, able[0]) if able and next(turns) % 2 else plan(rows)

        engine.budget.plan = daring_plan  # type: ignore[method-assign]
        (self.notes / f"{os.getpid()}.engine").touch()
        return lm


class NotedLearner(LearnerActor):
    """A learner that says where it runs: in a file beside its job's output, named by its process's id."""

    def __init__(self, spec: LearnerSpec) -> None:
        (Path(spec.output.root.path).parent / f"{os.getpid()}.learner").touch()
        super().__init__(spec)


def kill_me() -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class EndedError(BaseException):
    """The process has ended: nothing that it does from now on changes a file."""


class DeadlyFiles(fs.FileSystemHandler):
    """The local file system, but that something happens at some points of a commit, once at each.

    Args:
        folder: For a file named by each point that was come to, by any process.
        points: `before writing`, `while writing`, and `before` and `after` the move to `errors` and `data`.
        happens: What.
    """

    def __init__(self, folder: str, points: tuple[str, ...], happens: Callable[[], None]) -> None:
        self._folder, self._points, self._happens, self._real = Path(folder), points, happens, fs.LocalFileSystem()

    def __reduce__(self) -> Any:
        return DeadlyFiles, (str(self._folder), self._points, self._happens)

    def _at(self, point: str) -> None:
        if point in self._points:
            try:
                (self._folder / point.replace(" ", "-")).touch(exist_ok=False)
            except FileExistsError:
                return
            self._happens()

    def move(self, src: str, dest: str) -> None:
        kind = Path(dest).parent.name
        self._at(f"before {kind}")
        self._real.move(src, dest)
        self._at(f"after {kind}")

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if path.endswith(".parquet"):
            self._at("before writing")
        stream = self._real.open_output_stream(path, metadata=metadata)
        if path.endswith(".parquet"):
            self._at("while writing")
        return stream

    def get_type_name(self) -> str:
        return "deadly"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._real.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._real.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._real.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._real.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._real.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._real.delete_file(path)

    def copy_file(self, src: str, dest: str) -> None:
        self._real.copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._real.open_input_stream(path, compression=None)

    def open_input_file(self, path: str) -> Any:
        return self._real.open_input_file(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._real.open_append_stream(path, metadata=metadata)


class FullFiles(DeadlyFiles):
    """The local file system, without room for files below some folder, in any process."""

    def __init__(self, below: str) -> None:
        super().__init__("", (), kill_me)
        self._below = below

    def __reduce__(self) -> Any:
        return FullFiles, (self._below,)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        stream = super().open_output_stream(path, metadata)
        if Path(self._below) in Path(path).parents:
            stream.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return stream


class FailingFiles(DeadlyFiles):
    """The local file system, whose changes fail from the n-th on; other processes have the whole one.

    Args:
        fails: What is raised instead of a change.
        at: The number of the first change that fails, from 1.
        for_good: Whether all later changes fail, too; otherwise those of the same kind that take no room are made.
    """

    def __init__(self, fails: BaseException, at: int, *, for_good: bool) -> None:
        super().__init__("", (), kill_me)
        self._fails, self._left, self._for_good = fails, at, for_good

    def __reduce__(self) -> Any:
        return DeadlyFiles, ("", (), kill_me)

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    def _change(self, *, takes_room: bool) -> None:
        self._left -= 1
        if self._left <= 0 and (takes_room or self._for_good):
            raise self._fails

    def move(self, src: str, dest: str) -> None:
        self._change(takes_room=False)
        super().move(src, dest)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._change(takes_room=True)
        return super().open_output_stream(path, metadata)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._change(takes_room=True)
        super().create_dir(path, recursive)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._change(takes_room=False)
        super().delete_dir_contents(path, missing_dir_ok)

    def delete_file(self, path: str) -> None:
        self._change(takes_room=False)
        super().delete_file(path)

"""A learner's record, `learning.json` in the output: measurements, and decisions on when to train."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from drafter.errors import one_line
from drafter.methods.learning.payoff import Balance, Course, Evaluation, Interval, curve_of, decide, gain_by_beta
from pipeline.output.folder import OutputFolder
from pipeline.progress.board import LearnerState, LearningReport, Moment, together

if TYPE_CHECKING:
    from drafter.methods.learning.learner import HeadVersion

_MOST_MOMENTS = 480  # most moments kept; beyond, adjacent pairs are merged
_MOST_FOUND = 1000  # most measurements and versions kept, the newest of each: a job may run for weeks


@dataclass(frozen=True)
class Published:
    """A published version; see `HeadVersion`."""

    at: float
    number: int
    beta: float
    beta_before: float


@dataclass
class LearningRecord:
    """Record of all submissions of a job.

    `gain` is β of a given head now ÷ at the beginning, `beta_before` β before the first version. The `course` is not
    stored: each process decides again.
    """

    balance: Balance = field(default_factory=Balance)
    evaluations: list[Evaluation] = field(default_factory=list)
    versions: list[Published] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    course: Course = field(default_factory=Course)
    gain: float = 1.0
    beta_before: float = 0.0

    def evaluated(self, found: Evaluation) -> None:
        self.evaluations = [*self.evaluations, found][-_MOST_FOUND:]

    def published(self, version: HeadVersion, at: float) -> None:
        found = Published(at, version.number, version.beta, version.beta_before)
        self.versions = [*self.versions, found][-_MOST_FOUND:]
        self.gain *= gain_by_beta(version.beta, version.beta_before)

    def decoded(self, interval: Interval, at: float) -> None:
        self.balance = self.balance.after(interval)
        if not self.versions:
            self.beta_before = self.balance.beta
        if not interval.tokens:
            return
        number = self.versions[-1].number if self.versions else None
        learned = interval.seconds if interval.learned else 0.0
        self.moments.append(Moment(at, interval.seconds, interval.tokens, interval.row_steps, learned, number))
        self.moments = together(self.moments, _MOST_MOMENTS)

    def decide(self, tokens_left: float, *, must_pay: bool) -> Course:
        if must_pay:
            self.course = decide(self.course, self.balance, tokens_left, curve_of(self.evaluations))
        else:
            self.course = Course(True, "it learns to the end, whether that pays or not")
        return self.course

    def report(self, state: LearnerState, reason: str, **progress: Any) -> LearningReport:
        return LearningReport(
            state=state,
            reason=reason,
            version=self.versions[-1].number if self.versions else None,
            beta=self.evaluations[-1].candidate if self.evaluations else None,
            published_beta=self.versions[-1].beta if self.versions else None,
            versions=len(self.versions),
            taken_seconds=self.balance.taken,
            saved_seconds=self.balance.saved,
            **progress,
        )

    def as_json(self) -> str:
        kept = asdict(self)
        del kept["course"]
        return json.dumps(kept, indent=1) + "\n"

    @classmethod
    def of_json(cls, text: str) -> LearningRecord:
        """Parse the result of `as_json`; raise ValueError, TypeError or KeyError if the text is something else."""
        kept = json.loads(text)
        return cls(
            Balance(**kept["balance"]),
            [Evaluation(**one) for one in kept["evaluations"]],
            [Published(**one) for one in kept["versions"]],
            [Moment(**one) for one in kept["moments"]],
            gain=kept["gain"],
            beta_before=kept["beta_before"],
        )

    def restarted(self, *, shares: bool) -> LearningRecord:
        """Return the record for a new process; see `Balance.restarted`."""
        return replace(self, balance=self.balance.restarted(shares=shares))


def read_record(output: OutputFolder) -> LearningRecord:
    """Read the record of earlier processes; a new one if there is none or it cannot be read."""
    try:
        return LearningRecord.of_json(output.learning_file.read_text())
    except FileNotFoundError:
        return LearningRecord()
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"the learner's record is begun anew: {one_line(error)}", file=sys.stderr, flush=True)
        return LearningRecord()

"""The console script `drafter`: our packages come before a user's of the same names, wherever these are on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import drafter  # noqa: F401
import pipeline  # noqa: F401
from jobs.command import main

del sys.path[0]  # beside our packages there may be others, which come where the path has them

__all__ = ["main"]

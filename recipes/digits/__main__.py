"""Train the model that sees, and measure how well it reads: `python -m recipes.digits --output build/digits`.

It takes about forty minutes on one core. Started again, it goes on at its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.digits.measuring import measure
from recipes.digits.training import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what a command line asks for; always returns 0."""
    parser = argparse.ArgumentParser(
        "python -m recipes.digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("build/digits"), help="folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1_200, help="of training (default: %(default)s)")
    parser.add_argument("--sheets", type=int, default=100, help="of each shape, to measure with (default: %(default)s)")
    args = parser.parse_args(arguments)
    report = train(args.output, args.steps) | {"sheets": args.sheets, "right": measure(args.output, args.sheets)}
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Save trained heads beside the embedded base.

python -m recipes.embedded.ship ctc medusa hydra
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.target_model.loading import load_base
from recipes.shipping import ship


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument("--trained", type=Path, default=Path("build/heads"))
    args = parser.parse_args()
    base = load_base(EMBEDDED_BASE)
    for name in args.heads:
        ship(args.trained / name, base, "drafter/embedded/base", EMBEDDED_HEADS / name)


if __name__ == "__main__":
    main()

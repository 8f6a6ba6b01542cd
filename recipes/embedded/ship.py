"""Save trained heads where those of the project are: beside the embedded base, or that of the hybrid.

python -m recipes.embedded.ship ctc medusa hydra
python -m recipes.embedded.ship hybrid --trained build/heads-hybrid
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS, EMBEDDED_HYBRID, OTHER_HEADS
from drafter.target_model.loading import load_base
from recipes.shipping import ship


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument("--trained", type=Path, default=Path("build/heads"))
    args = parser.parse_args()
    for name in args.heads:
        folder, target = (EMBEDDED_HYBRID, OTHER_HEADS) if name == "hybrid" else (EMBEDDED_BASE, EMBEDDED_HEADS)
        ship(args.trained / name, load_base(folder), f"drafter/embedded/{folder.name}", target / name)


if __name__ == "__main__":
    main()

"""Save trained heads beside the embedded base, in bf16. That halves their size, and is precise enough for drafting.

python -m recipes.embedded.ship ctc medusa hydra
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from drafter.base.loading import load_base
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.heads.checkpoint import load_head, save_head
from drafter.heads.registry import HEADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument("--trained", type=Path, default=Path("build/heads"))
    args = parser.parse_args()
    base = load_base(EMBEDDED_BASE)
    for name in args.heads:
        head = load_head(args.trained / name, base, HEADS).bfloat16()
        assert head.provenance is not None
        # The base's path on this machine means nothing elsewhere.
        head.provenance = replace(head.provenance, base_name="drafter/embedded/base")
        save_head(head, EMBEDDED_HEADS / name)


if __name__ == "__main__":
    main()

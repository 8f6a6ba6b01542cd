"""A worker without an engine: its variant says how it behaves, its texts are its prompts."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, Work, serve


def load(settings: Settings) -> Decode:
    """Start as the variant says."""
    print("chatter of a library")
    subprocess.run(["echo", "chatter of a child"], check=True)
    if settings.variant == "broken":
        raise RuntimeError("it is broken\nand here is why")

    def decode(work: Work) -> Decoded:
        print("more chatter")
        if settings.variant == "fails":
            raise ValueError("no such prompt")
        if settings.variant == "dies":
            print("last words", file=sys.stderr)
            os._exit(3)
        if settings.variant == "hangs":
            time.sleep(600)
        return Decoded([prompt[: work.max_new_tokens] for prompt in work.prompts], 2 * len(work.prompts))

    return decode


if __name__ == "__main__":
    serve(load, ["pytest"])

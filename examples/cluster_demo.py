"""`make cluster-demo`: from no GPU to several and back, on this machine.

Starts a real Ray cluster whose autoscaler adds nodes with a logical GPU each, submits the generation job to it by
`drafter submit`, as to any cluster, and shows which nodes there are. Ends everything that it started, and nothing else.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from examples.local_cluster import LocalCluster, NodeType

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "cluster-demo"
NODES = 2
JOB = [
    *("python", "-m", "jobs.generate", "--config", "examples/demo.yaml", "--output", str(OUTPUT)),
    *("--resources.gpus_per_actor", "1", "--loading.device", "cpu", "--writing.rows_per_file", "4"),
    *("--engine.max_num_seqs", "4", "--reading.limit", "96"),
]


def main() -> int:
    """Run the demonstration; return the job's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the cluster would outlive this process
    shutil.rmtree(OUTPUT, ignore_errors=True)  # or the job would find its work done
    growing = {"gpu": NodeType(cpus=2, gpus=1, most=NODES)}
    with LocalCluster(growing=growing) as cluster:
        print(f"a head without work is up, its dashboard at {cluster.jobs_address}", flush=True)
        nodes = 0
        submitted = subprocess.Popen(
            [sys.executable, "-m", "jobs.submit", "--", *JOB], cwd=ROOT, env=cluster.environment
        )
        while submitted.poll() is None or nodes:
            time.sleep(0.5)
            if (now := len(cluster.nodes())) != nodes:
                print(f"--- GPU nodes: {nodes} → {now}", flush=True)
                nodes = now
    print(f"--- the cluster is gone; results are in {OUTPUT.relative_to(ROOT)}", flush=True)
    return submitted.returncode


if __name__ == "__main__":
    sys.exit(main())

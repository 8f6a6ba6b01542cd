"""A job on a cluster whose nodes are lost on the way: `python -m tests.support.node_loss INPUT OUTPUT MODEL LOSSES`.

A program of its own, because a process can be in one cluster only. It tells of the losses in a file, because Ray's
threads, too, print, in the middle of a line if need be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.support.waiting import wait_until


def wait_for_parts(job: subprocess.Popen[bytes], data: Path, more: int) -> None:
    """Wait until so many more are committed, or the job has ended."""
    enough = len(list(data.glob("*.parquet"))) + more
    wait_until(lambda: job.poll() is not None or len(list(data.glob("*.parquet"))) >= enough, "more files")


def main(source: str, out: str, model: str, losses: str) -> int:
    """Take one of two nodes away, then the other, then give one back; return the job's exit code."""
    # A node is dead when five checks in a row have failed: three seconds between two would be most of the test.
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]  # each with room for one engine and what feeds it
    command = [sys.executable, "-m", "jobs.generate", "--input", source, "--output", out, "--model", model]
    command += ["--drafter", "ngram", "--engine.max_num_seqs", "4", "--sampling.max_new_tokens", "12"]
    command += ["--engine.num_draft_tokens", "3"]  # so that no engine measures the machine at its start
    command += ["--writing.rows_per_file", "8", "--resources.min_actors", "2", "--resources.cpus_per_actor", "1.5"]
    job = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster.address})
    try:
        for node in nodes:
            wait_for_parts(job, Path(out) / "data", 2)
            cluster.remove_node(node, allow_graceful=False)
            with Path(losses).open("a", encoding="utf-8") as file:
                file.write(f"lost, {job.poll() is None}\n")
        cluster.add_node(num_cpus=4)
        return job.wait()
    finally:
        job.kill()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

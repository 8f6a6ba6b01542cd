"""A job on a cluster whose nodes are lost on the way: `python -m tests.pipeline.node_loss INPUT OUTPUT MODEL`.

A program of its own, because a process can be in one cluster only.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from pipeline.generate import main


def lose_nodes(cluster: Cluster, nodes: list[object], data: Path) -> None:
    """Take one node away, then all, then give one back, each when more is committed than before."""
    wait_for_parts(data, 2)
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    wait_for_parts(data, 2)
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(wait=False, num_cpus=2)
    print(f"nodes lost: 1, {len(nodes)}, back: 1", flush=True)


def wait_for_parts(data: Path, more: int) -> None:
    """Until so many more are committed."""
    before = len(list(data.glob("*.parquet")))
    while len(list(data.glob("*.parquet"))) < before + more:
        time.sleep(0.05)


if __name__ == "__main__":
    source, out, model = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes: list[object] = [cluster.add_node(num_cpus=2) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    threading.Thread(target=lose_nodes, args=[cluster, nodes, Path(out) / "data"], daemon=True).start()
    arguments = ["--input", source, "--output", out, "--model", model, "--drafter", "ngram", "--engine.slots", "4"]
    arguments += ["--sampling.max_new_tokens", "12", "--writing.rows_per_file", "8", "--resources.min_actors", "2"]
    code = main([*arguments, "--resources.cpus_per_actor", "1"])
    ray.shutdown()
    cluster.shutdown()
    sys.exit(code)

"""A job's learner as its driver sees it: what of the cluster it leaves to engines, and what it does."""

from __future__ import annotations

from dataclasses import replace

from pipeline.cluster.shares import Cluster, Node
from pipeline.errors import InputError
from pipeline.learning.learning_config import LearningConfig
from pipeline.learning.watched_learner import WatchedLearner
from pipeline.progress.job_progress import Progress


def beside_learner(config: LearningConfig, cluster: Cluster) -> Cluster:
    """Return what a learner leaves of a cluster to engines.

    Raises:
        InputError: No machine has what the learner is to have, and there will be no others.
    """
    if not config.enabled or not (config.cpus or config.gpus):
        return cluster
    nodes = list(cluster.nodes)
    for place, node in enumerate(nodes):
        if node.cpus >= config.cpus and node.gpus >= config.gpus:
            nodes[place] = Node(node.cpus - config.cpus, node.gpus - config.gpus)
            return Cluster(tuple(nodes), cluster.may_grow)
    if cluster.may_grow:
        return cluster
    raise InputError(
        f"no machine has {config.cpus:g} CPU cores and {config.gpus:g} GPUs for the learner: lower learning.cpus or "
        "learning.gpus"
    )


class JobLearner(WatchedLearner):
    """The learner of a generation job."""

    def look(self, now: Progress) -> Progress:
        """Return the job's progress with what the learner does; called now and then, and never waits."""
        return replace(now, learning=self.ask(tokens_left(now)))


def tokens_left(now: Progress) -> float | None:
    """Return about how many tokens a job is still to generate; None before its first rows."""
    finished = now.rows - now.errors
    if now.total is None or finished <= 0 or not now.tokens:
        return None
    return (now.total - now.done) * now.tokens / finished

"""The training job: checks, stages the texts, trains on the cluster, plots the metrics, prints a summary."""

from __future__ import annotations

import shlex
from concurrent.futures import wait
from dataclasses import asdict, replace
from threading import Event
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from drafter.errors import LoadError, one_line
from drafter.heads.checkpoint import HEADS, exportable, saved_shape
from drafter.heads.config import head_config
from drafter.heads.published import TargetOfExport, base_embeddings
from drafter.target_model.loading import load_config
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import ActorResources, connect, quiet_ray_data, share_out, start_beside_driver
from pipeline.command_line import say
from pipeline.engines.models import head_fingerprint, model_fingerprint
from pipeline.errors import InputError, JobError, JobStopped
from pipeline.io.files import local_path, locate
from pipeline.output.folder import check_output, mend_run, read_run, save_run, take_output, versions
from pipeline.output.lease import Lease
from pipeline.progress.board import Mail, StatusBoard
from pipeline.progress.watch import Pulse, fetch
from pipeline.settings import ResourcesConfig
from pipeline.stopping import BY_SIGNAL, Stopping, in_thread
from pipeline.training.config import TrainConfig
from pipeline.training.folder import Record, TrainingFolder, complete_checkpoints, go_back, tidy
from pipeline.training.texts import StagedTexts, Texts, open_texts, stage_texts
from pipeline.training.worker import WorkerTask, train_worker

_CHECKPOINTS_KEPT = 2
_POLL_SECONDS = 0.5
_SAVE_SECONDS = 60.0  # for a step and its checkpoint, before a stop


def train(config: TrainConfig) -> None:
    """Run a job to its end.

    Raises `InputError` for a mistake in the configuration or the data, `JobError` if the job failed on the way, and
    `JobStopped` if it was told to stop.
    """
    say(f"looking at the texts of {', '.join(config.folders)}")
    texts = open_texts(config.folders, config.texts.held_out)
    model, fingerprint = target_model(config, texts)
    start = None if config.start is None else local_path(config.start)
    config = replace(config, model=config.model or texts.data[0].model, start=start)
    base = check_head(config, model)
    meant = meaning(config, texts, fingerprint)
    check_made_by(config, texts, fingerprint, base)
    text = base.get_text_config(decoder=True)
    folder = TrainingFolder(locate(config.output))
    check_output(config.output, folder, meant)
    folder.create()
    if folder.run_file.exists:
        mend_run(folder.run_file)
    try:
        if not finished(folder):
            run(config, model, texts, text.vocab_size, folder, meant)
        print(summarise(folder, config), flush=True)
        if config.export is not None:
            embeddings = base_embeddings(model, base, trust_remote_code=config.trust_remote_code)
            longest = getattr(text, "max_position_embeddings", None)
            folder.export_head(TargetOfExport(model, base.architectures or [], longest, embeddings))
    except LoadError as error:
        raise InputError(f"the head cannot be exported: {error}") from error
    except OSError as error:
        raise JobError(f"output {config.output} cannot be written to: {one_line(error)}") from error


def target_model(config: TrainConfig, texts: Texts) -> tuple[str, str]:
    """Return the target model, by default that of the texts, and its fingerprint, or raise `InputError`."""
    if config.model is not None:
        model = model_name(config.model)
        return model, model_fingerprint(model)
    first = texts.data[0]
    model = model_name(first.model)
    say(f"the target model is {first.model or 'the embedded one'}, which generated them")
    try:
        return model, model_fingerprint(model)
    except InputError as error:
        raise InputError(f"input {first.uri} was made by a model that is not here: give --model ({error})") from error


def check_made_by(config: TrainConfig, texts: Texts, fingerprint: str, base: Any) -> None:
    """Raise `InputError` if another model generated the texts, as far as that is known before weights are loaded.

    `fingerprint` is of the target model's files. It differs for another chat template, too, so that sizes decide.
    """
    for one in (*texts.data, *([texts.held_out] if texts.held_out else [])):
        if one.model_fingerprint == fingerprint:
            continue
        named = one.model or "the embedded model"
        try:
            theirs = load_config(model_name(one.model), trust_remote_code=config.trust_remote_code)
        except LoadError:  # it is not on this machine, or has code of its own
            theirs = base
        if _sizes(theirs) != _sizes(base):
            raise InputError(
                f"input {one.uri} was made by {named}, and not by the model {config.model}: a head learns from its own "
                "target model's answers; leave --model out, or distil with this target model"
            )
        say(f"input {one.uri} was made by {named}: whether {config.model} has the same weights shows once it is loaded")


def _sizes(config: Any) -> tuple[int, int, int]:
    text = config.get_text_config(decoder=True)
    return text.vocab_size, text.hidden_size, text.num_hidden_layers


def meaning(config: TrainConfig, texts: Texts, model: str) -> dict[str, Any]:
    """Return all that determines the head; `model` is the target model's fingerprint."""
    head: dict[str, Any] = {"algorithm": config.algorithm, "head": config.head}
    if config.start is not None:
        head = {"start": head_fingerprint(config.start)}
    return {
        "input": [one.meaning for one in texts.data],
        "held_out": texts.held_out.meaning if texts.held_out else None,
        "model": model,
        **head,
        "texts": {"held_out_texts": config.texts.held_out_texts, "max_length": config.texts.max_length},
        "training": asdict(config.training),
        "micro_batches": config.sharding.micro_batches,
    }


def check_head(config: TrainConfig, model: str) -> Any:
    """Check the head's settings against the target model's configuration, and return that configuration.

    Raises `InputError` if there is no such model, algorithm or setting, or a value is not allowed.
    """
    algorithm, chosen = config.algorithm, config.head
    if config.start is not None:
        try:
            algorithm, chosen = saved_shape(config.start)
        except LoadError as error:
            raise InputError(f"start: {error}") from error
        if config.algorithm not in (TrainConfig.algorithm, algorithm):
            raise InputError(
                f"start is a head of {algorithm}, and algorithm is {config.algorithm}: leave algorithm out"
            )
    if algorithm not in HEADS:
        raise InputError(f"algorithm must be one of {', '.join(HEADS)}, not {algorithm!r}")
    try:
        base = load_config(model, trust_remote_code=config.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
    text = base.get_text_config(decoder=True)
    sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    for name, size in sizes.items():
        if config.head.get(name, size) != size:
            raise InputError(f"head: {name} is the target model's, {size}: leave it out")
    head_class = HEADS[algorithm]
    fields = {**head_class.defaults(text.num_hidden_layers), **chosen, **sizes}
    try:
        head_config(algorithm, head_class.config_class, fields)
        if config.export is not None:
            exportable(algorithm, fields)
    except LoadError as error:
        raise InputError(f"head: {error}") from error
    return base


def finished(folder: TrainingFolder) -> bool:
    """Return whether an earlier submission finished the job and its files are whole."""
    if not folder.run_file.exists:
        return False
    run = read_run(folder.run_file)
    if run["state"] != "finished":
        return False
    found = folder.products()
    torn = [name for name, size in run["products"].items() if found.get(name) != size]
    if torn:
        say(f"what is not whole is made again: {', '.join(torn)}")
    return not torn


def run(
    config: TrainConfig, model: str, texts: Texts, vocab_size: int, folder: TrainingFolder, meant: dict[str, Any]
) -> None:
    """Do what earlier submissions left undone, and repair what is damaged."""
    stopping = Stopping()
    lease = Lease(folder.lease, lost=lambda by: stopping.stop(f"{by} works on the output now"))
    facts: dict[str, Any] = {"base_fingerprint": texts.base_fingerprint}
    with stopping, lease:
        again = not take_output(config.output, folder, meant)
        save_run(folder.run_file, asdict(config), meant, state="running", **facts)
        workers = config.workers
        wanted = ResourcesConfig(workers.fewest, workers.most, workers.gpus, workers.cpus)
        lower = "workers.{} or workers.number"
        resources = share_out(wanted, connect(), what="workers", settings=lower)
        stopping.take_over()
        quiet_ray_data()
        staged = StagedTexts.load(folder.staged)
        if staged is None:
            say("staging the texts")
            staged = stage_texts(texts, folder.staged, config, model, vocab_size)
        tidy(folder.checkpoints, _CHECKPOINTS_KEPT)
        if again and not complete_checkpoints(folder.checkpoints):
            say("the submission before has left no checkpoint: training begins with step 1")
        say("starting the workers, which load the model")
        chosen_by = str(config.training.chosen_by)
        if not folder.has_head() and (best := go_back(folder.checkpoints, chosen_by)) is not None:
            say(f"{folder.head.path} is damaged: step {best}, which it is of, is taken again")
        execute(config, model, texts.base_fingerprint, folder, staged, resources, stopping)
        facts |= {"texts": asdict(staged.counts), "products": folder.products()}
        save_run(folder.run_file, asdict(config), meant, state="finished", **facts)


class _Listener:
    def __init__(self, board: Any) -> None:
        self._board, self._mail = board, Mail()
        self._refusals: list[tuple[bool, str]] = []

    @property
    def has_begun(self) -> bool:
        """True once the workers take steps."""
        return "begun" in self._mail.first

    def look(self) -> None:
        self._take(fetch(self._board, self._mail))

    def refusal(self) -> tuple[bool, str] | None:
        """Return the first refusal, as `worker.refusals` reports it; None if there is none."""
        self._take(ray.get(self._board.mail.remote(self._mail.life, self._mail.number)))
        return self._refusals[0] if self._refusals else None

    def _take(self, mail: Mail) -> None:
        self._mail = mail
        for (kind, _), report in mail.reports.items():
            if kind == "line":
                say(report)
            elif kind == "refusal":
                self._refusals.append(report)


def execute(
    config: TrainConfig,
    model: str,
    base_fingerprint: str,
    folder: TrainingFolder,
    staged: StagedTexts,
    resources: ActorResources,
    stopping: Stopping,
) -> None:
    """Train, and show the progress.

    Raises `InputError` if the target model or the head cannot be used, `JobError` if training failed, and
    `KeyboardInterrupt` or `JobStopped` after a signal, by which the workers save the step that they are at.
    """
    board = start_beside_driver(StatusBoard)
    listener = _Listener(board)
    provenance: dict[str, Any] = {
        "recipe": "drafter train",
        "data": asdict(staged.counts),
        "settings": asdict(config.training),
        "versions": versions("deepspeed"),
    }
    task = WorkerTask(config, model, base_fingerprint, folder, staged, provenance, board, resources.threads)
    # Ray Train handles SIGINT by ending its workers at once, but only where it runs in the main thread.
    training = in_thread(_trainer(task, resources).fit)

    told = Event()

    def save() -> None:
        told.set()
        ray.get(board.put.remote("stop", True))
        if listener.has_begun:
            say("stopping: the step that is under way is saved first")
            wait([training], _SAVE_SECONDS)

    failure: Exception | None = None
    with Pulse(_POLL_SECONDS, listener.look):
        try:
            with stopping.draining(save):
                training.result()
        except TrainingFailedError as error:
            failure = error
        except JobStopped:  # after `save`, or because another submission has taken the output
            board.put.remote("stop", True)
            raise
        except KeyboardInterrupt:
            save()
            raise
    if failure is None and told.is_set():
        raise JobStopped(BY_SIGNAL)
    if refusal := listener.refusal():
        of_input, message = refusal
        raise (InputError if of_input else JobError)(message) from failure
    if failure is not None:
        raise JobError(_reason(failure)) from failure


def _trainer(task: WorkerTask, resources: ActorResources) -> TorchTrainer:
    config, folder = task.config, task.folder
    return TorchTrainer(
        train_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if have_cuda(resources) else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.workers.number,
            use_gpu=resources.gpus > 0,
            resources_per_worker={"CPU": resources.cpus, "GPU": resources.gpus},
        ),
        run_config=RunConfig(
            name=folder.checkpoints.name,
            storage_path=folder.root.path,
            storage_filesystem=folder.root.filesystem,
            failure_config=FailureConfig(max_failures=config.workers.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=_CHECKPOINTS_KEPT),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def have_cuda(resources: ActorResources) -> bool:
    """Return whether the workers' GPUs exist. Clusters for tests only count them."""
    if not resources.gpus:
        return False
    return bool(ray.get(ray.remote(num_cpus=0, num_gpus=resources.gpus)(torch.cuda.is_available).remote()))


def _reason(failure: Exception) -> str:
    causes = getattr(failure, "worker_failures", None) or {0: getattr(failure, "controller_failure", failure)}
    rank, cause = next(iter(causes.items()))
    cause = getattr(cause, "_base_exc", cause)
    return f"worker {rank} ended again and again: {type(cause).__name__}: {one_line(cause)}"


def summarise(folder: TrainingFolder, config: TrainConfig) -> str:
    """Return the job's summary for the user, from the written metrics."""
    records = folder.records()
    chosen_by = str(config.training.chosen_by)
    evaluated = [record for record in records if "beta" in record]
    best = max(evaluated, key=lambda record: (record["beta"][chosen_by], record["step"]))
    last: Record = next(record for record in reversed(records) if "loss" in record)
    when = f"at step {best['step']:,}" if best["step"] else "before the first step: that is the head of start itself"
    of_model = "" if config.model is None else f"--model {shlex.quote(config.model)} "
    head = shlex.quote(folder.head.path)
    following = [
        f"drafter evaluate {of_model}--drafter {head} --input PROMPTS --output evaluated",
        f"drafter generate {of_model}--drafter {head} --input PROMPTS --output out",
    ]
    if read_run(folder.run_file)["texts"].get("with_images"):  # which are not evaluated
        del following[0]
    return "\n".join(
        [
            f"steps       {last['step']:,}, last loss {last['loss']:.3f}",
            f"β           {', '.join(f'{beta:.2f} at {nodes}' for nodes, beta in best['beta'].items())} draft nodes, "
            f"simulated on held-out texts {when}, the best of {len(evaluated)} by {chosen_by} nodes",
            f"head        {folder.head.path}",
            f"metrics     {folder.metrics.path}, {folder.events.path}",
            f"run         {folder.run_file.path}",
            "next        " + ("\n" + " " * 12).join(following),
        ]
    )

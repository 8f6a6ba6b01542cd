"""Entry of the training job, with all checks that need no cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from pipeline.command_line import say
from pipeline.engines.models import model_fingerprint, model_name
from pipeline.errors import InputError, JobError
from pipeline.io.files import locate
from pipeline.output.folder import check_output, mend_run
from pipeline.training.config import TrainConfig
from pipeline.training.folder import TrainingFolder
from pipeline.training.texts import DistilledTexts, open_texts, same_base


def train(config: TrainConfig) -> None:
    """Run a job to its end.

    Raises:
        InputError: The configuration or the texts cannot be used.
        JobError: The job failed on the way.
        JobStopped: The job was told to stop.
    """
    say(f"looking at the texts of {', '.join(config.folders)} and the model {config.model or 'embedded'}")
    data = [open_texts(uri) for uri in config.folders]
    held_out = open_texts(config.texts.held_out) if config.texts.held_out is not None else None
    base = same_base([*data, *([held_out] if held_out else [])])
    model = model_name(config.model)
    meant = meaning(config, data, held_out, model_fingerprint(model))
    base_config = check_head(config, model)
    text = base_config.get_text_config(decoder=True)
    folder = TrainingFolder(locate(config.output))
    check_output(config.output, folder, meant)
    folder.create()
    if folder.run_file.type == fs.FileType.File:
        mend_run(folder.run_file)
    from drafter.errors import LoadError
    from drafter.heads.published import TargetOfExport, base_embeddings
    from pipeline.training.cluster_training import Texts, run  # Importing Ray takes seconds.

    try:
        run(config, model, Texts(data, held_out, base, text.vocab_size), folder, meant)
        if config.export is not None:
            embeddings = base_embeddings(model, base_config, trust_remote_code=config.trust_remote_code)
            longest = getattr(text, "max_position_embeddings", None)
            folder.export_head(TargetOfExport(model, base_config.architectures or [], longest, embeddings))
    except LoadError as error:
        raise InputError(f"the head cannot be exported: {error}") from error
    except OSError as error:
        raise JobError(f"output {config.output} cannot be written to: {one_line(error)}") from error


def meaning(
    config: TrainConfig, data: Sequence[DistilledTexts], held_out: DistilledTexts | None, model: str
) -> dict[str, Any]:
    """Return everything that decides which head comes out; workers, ZeRO stages and checkpoints do not.

    `model` is the target model's fingerprint.
    """
    return {
        "data": [one.meaning for one in data],
        "held_out": held_out.meaning if held_out else None,
        "model": model,
        "algorithm": config.algorithm,
        "head": config.head,
        "texts": {"held_out_texts": config.texts.held_out_texts, "max_length": config.texts.max_length},
        "training": asdict(config.training),
        "micro_batches": config.sharding.micro_batches,
    }


def check_head(config: TrainConfig, model: str) -> Any:
    """Check the head's settings against the target model's configuration, and return that configuration.

    Raises:
        InputError: There is no such model, algorithm or setting, or a value is not allowed.
    """
    from transformers import AutoConfig

    from drafter.errors import LoadError
    from drafter.heads.checkpoint import HEADS, exportable
    from drafter.heads.config import head_config
    from drafter.hub import local_only

    if config.algorithm not in HEADS:
        raise InputError(f"algorithm must be one of {', '.join(HEADS)}, not {config.algorithm!r}")
    try:
        base = AutoConfig.from_pretrained(
            model, trust_remote_code=config.trust_remote_code, local_files_only=local_only(model)
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no model at {model!r}: {one_line(error)}") from error
    text = base.get_text_config(decoder=True)
    sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    head_class = HEADS[config.algorithm]
    fields = {**head_class.defaults(text.num_hidden_layers), **config.head, **sizes}
    try:
        head_config(config.algorithm, head_class.config_class, fields)
        if config.export is not None:
            exportable(config.algorithm, fields)
    except LoadError as error:
        raise InputError(f"head: {error}") from error
    return base

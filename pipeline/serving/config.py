"""Settings of the endpoint."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drafter.acceptance.settings import VerifierSettings
from drafter.edge.messages import MOST_TOKENS
from drafter.engine.config import EngineSettings
from pipeline.batches.config import BatchesConfig
from pipeline.command_line import at_least, make_parser, parse, parse_object
from pipeline.errors import InputError
from pipeline.learning.config import LearningConfig
from pipeline.settings import ImagesConfig, LoadingConfig

KeyRule = Literal["auto", "required", "none"]
"""Rule on keys: clients need one always, never, or (`auto`) if there are any."""
NOBODY, EVERYBODY = "none", "all"


@dataclass(frozen=True)
class ServingLearning(LearningConfig):
    """A draft head that learns from the requests of clients who agreed to that.

    Args:
        agreed: Clients whose requests are learnt from: `none`; `all`; or a file with the keys of those who have agreed,
            one on each line, on the machine where the ingress runs.
        folder: Folder or URI for the head and the learning state: of this endpoint only, the same on every machine.
    """

    agreed: str = NOBODY
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("agreed", "folder"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InputError(f"learning.{name} is empty")
        if not self.enabled:
            return
        if self.agreed == NOBODY:
            raise InputError(
                "learning is enabled, but nobody has agreed to be learnt from: set learning.agreed to a file with the "
                "keys of those who have, or to all"
            )
        if self.folder is None:
            raise InputError("learning is enabled, but there is no folder for the head: set learning.folder")


@dataclass(frozen=True)
class LimitsConfig:
    """Limits on clients' requests.

    Args:
        queue: Requests that may wait for a slot of a replica; further ones are refused with status 429, but for keys
            that have less than their share of it.
        choices: Texts that one request may ask for: its prompts times its `n`.
        body_bytes: Largest body of a request, in bytes.
        connections: Connections that may be open; a further one closes that which has waited for its client the
            longest. Like `receive_seconds` it holds only where `drafter serve` starts the cluster: Ray Serve's own
            proxy has no such limits.
        receive_seconds: Longest time for receiving a request, for a connection to begin one, and for a client to leave
            an answer unread.
        seconds: Longest time a request may take. An update waits that long for open streams.
    """

    queue: int = 64
    choices: int = 16
    body_bytes: int = 1 << 20
    connections: int = 1000
    receive_seconds: float = 30.0
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("queue", "choices", "body_bytes", "connections"):
            at_least(f"limits.{name}", getattr(self, name), 1)
        for name in ("receive_seconds", "seconds"):
            at_least(f"limits.{name}", getattr(self, name), 0, above=True)


@dataclass(frozen=True)
class EdgeConfig:
    """Devices that draft for themselves and have the endpoint verify; see `docs/research/edge.md`.

    Args:
        sessions: Sessions that a key may have; without keys all clients are one. With 0 there is no such route.
        draft_tokens: Draft tokens of a message, all of which are verified in one step.
        tokens_per_second: Draft tokens that a session may send a second; what comes sooner waits.
        idle_seconds: Time without a message after which a session ends.
    """

    sessions: int = 0
    draft_tokens: int = 16
    tokens_per_second: float = 500.0
    idle_seconds: float = 120.0

    def __post_init__(self) -> None:
        at_least("edge.sessions", self.sessions, 0)
        at_least("edge.draft_tokens", self.draft_tokens, 1)
        if self.draft_tokens > MOST_TOKENS:
            raise InputError(f"edge.draft_tokens must be at most {MOST_TOKENS}, not {self.draft_tokens}")
        for name in ("tokens_per_second", "idle_seconds"):
            at_least(f"edge.{name}", getattr(self, name), 0, above=True)


@dataclass(frozen=True)
class ReplicasConfig:
    """Number of engines, and the resources of each.

    Args:
        min: Fewest replicas.
        max: Most replicas; by default as many as `min`. Between the two, their number follows the requests.
        gpus: GPUs of a replica, a fraction allowed; by default 1 where there are GPUs, otherwise 0.
        cpus: CPU cores of a replica, and so its threads; by default 1 beside a GPU, otherwise a fair share.
    """

    min: int = 1
    max: int | None = None
    gpus: float | None = None
    cpus: float | None = None

    def __post_init__(self) -> None:
        at_least("replicas.min", self.min, 1)
        at_least("replicas.max", self.max, self.min)
        at_least("replicas.gpus", self.gpus, 0)
        at_least("replicas.cpus", self.cpus, 0, above=True)


@dataclass(frozen=True)
class ApplicationConfig:
    """The served application: the `args` in a file for Ray Serve.

    Args:
        model: Target model: hub id, folder or GGUF file; by default the embedded demonstration model.
        drafter: What proposes tokens: `none`, `ngram`, `memory`, `cacheback`, `cacheback:` and a table of a corpus,
            `forced`, `exit:N`, a draft head's folder or hub id, `ctc` (the embedded head), `model:` and a draft
            model's, several joined by `+`, `long:N:DRAFTER`, `stack:LOWER>model:A`, or `auto`.
        isolation: Draft no request from another one's text, as `memory` and `cacheback` would. Response times would
            leak it to clients who send many requests. Without isolation all clients must trust each other. Prefixes are
            shared within one key in either case.
        verifier: Which draft tokens become output; by default those that plain decoding would give. Clients cannot
            choose it.
        learning: A draft head that learns from the requests of clients who agreed to that.
        name: What clients call the model; by default its hub id, its folder's name, or `embedded`.
        plain: Serve the model a second time, without a drafter, as NAME-plain: to compare with.
        keys: Whether clients must send a key: `required`, `none` (everybody is answered), or `auto`, which asks for one
            unless `drafter serve` listens on a loopback address and is given no keys.
        keys_file: File with a key on each line, to be found where the ingress runs. Keys may also be in the ingress's
            environment variable DRAFTER_API_KEYS, separated by commas. The word `operator` after a key lets its owner
            read the metrics.
        special_tokens: Let the text of a special token in a chat message be that token; by default it is text.
        loading: How the models are loaded.
        engine: How much an engine does at once.
        limits: What clients may ask for.
        images: Images in clients' messages, for a target model that sees. Those in the body of a request count towards
            `limits.body_bytes`.
        edge: Devices that draft for themselves.
        batches: OpenAI's batches, which are worked at while no live request is.
        replicas: How many engines there are.
    """

    model: str | None = None
    drafter: str = "auto"
    isolation: bool = True
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    learning: ServingLearning = field(default_factory=ServingLearning)
    name: str | None = None
    plain: bool = False
    keys: KeyRule = "auto"
    keys_file: str | None = None
    special_tokens: bool = False
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    # more at a time than in a job: clients' requests are shorter than its rows
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(max_num_seqs=32))
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    edge: EdgeConfig = field(default_factory=EdgeConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)

    def __post_init__(self) -> None:
        for name in ("model", "drafter", "name"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InputError(f"{name} is empty")
        if self.keys == "none" and self.keys_file is not None:
            raise InputError("keys is none, but keys_file is set: leave one of the two out")
        if self.edge.sessions and self.verifier != VerifierSettings():
            raise InputError(
                f"edge.sessions is set, and the verifier is {self.verifier.name}, but what devices draft is verified "
                "exactly: leave one of the two out"
            )
        self.learning.check_beside(self.drafter, self.verifier, self.engine)

    @property
    def served_name(self) -> str:
        if self.name is not None or self.model is None:
            return self.name or "embedded"
        folder = Path(self.model).expanduser()
        return folder.resolve().name if folder.exists() else self.model


@dataclass(frozen=True)
class ServeConfig(ApplicationConfig):
    """The endpoint.

    Args:
        host: Address to listen on; 0.0.0.0 for all of this machine's, which needs keys.
        port: TCP port to listen on.
    """

    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.port <= 65535:
            raise InputError(f"port must be at least 1 and at most 65535, not {self.port}")

    @property
    def loopback(self) -> bool:
        """True if only this machine can connect; false for any name but localhost."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


_COMMON = (
    *("model", "drafter", "name", "host", "port", "keys", "keys_file", "plain", "isolation"),
    *("engine.max_num_seqs", "engine.max_model_len", "engine.num_draft_tokens", "engine.kv_gib", "engine.compile"),
    *("loading.dtype", "loading.device", "replicas.min", "replicas.max", "replicas.gpus", "replicas.cpus"),
    *("limits.queue", "limits.seconds", "batches.folder"),
)
"""Settings that `--help` shows."""
_DESCRIPTION = """\
Serve a model by OpenAI's API, with speculative decoding that never changes the tokens.

Any client of OpenAI's works with http://HOST:PORT/v1, and a browser with http://HOST:PORT/.
Joins the Ray cluster there is, or starts one here; ends in good order on Ctrl-C or SIGTERM.

  drafter serve
  drafter serve --model meta-llama/Llama-3.2-1B-Instruct --port 8080
  drafter serve --replicas.max 4 --replicas.gpus 0.5 --host 0.0.0.0 --keys_file keys.txt"""


def parse_config(arguments: Sequence[str] | None = None) -> ServeConfig:
    return parse(ServeConfig, make_parser(ServeConfig, "serve", "", _DESCRIPTION, _COMMON), arguments)


def parse_application(settings: Mapping[str, Any]) -> ApplicationConfig:
    """Return the application that the `args` in a file for Ray Serve describe.

    Raises:
        InputError: An unknown setting, or a value of the wrong type or out of range.
    """
    return parse_object(ApplicationConfig, make_parser(ApplicationConfig, "serve", "", _DESCRIPTION), settings)

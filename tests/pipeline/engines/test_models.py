"""Fingerprints of models, by folder, name and hub id, and damaged weights."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.engine.config import EngineSettings
from drafter.gguf_files import tensor_spans as gguf_spans
from drafter.target_model.loading import load_base
from pipeline.cluster import model_copies
from pipeline.cluster.model_copies import model_name
from pipeline.engines.models import (
    engine_spec,
    folder_fingerprint,
    generation_settings,
    head_fingerprints,
    longest_request,
    model_fingerprint,
    tensor_spans,
)
from pipeline.errors import InputError
from pipeline.io.files import Location
from pipeline.settings import LoadingConfig
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run, write_jsonl
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.paths import ROOT

# What tells models' folders apart, and what shows that weights are not whole.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    made = tmp_path / "model"
    made.mkdir()
    tensors = {f"layer.{n}": torch.randn(40, 20 + n) for n in range(8)} | {"norm": torch.ones(3)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("sampled", [False, True])
def test_every_tensor_takes_part(folder: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    if sampled:
        monkeypatch.setattr("pipeline.engines.models._WHOLE_BYTES", 100)
        monkeypatch.setattr("pipeline.engines.models._BLOCK", 8)
        monkeypatch.setattr("pipeline.engines.models._EVERY", 1000)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    seen = {folder_fingerprint(folder)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 0.01}, weights, metadata={"format": "pt"})
        seen.add(folder_fingerprint(folder))
    assert len(seen) == 1 + len(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert folder_fingerprint(folder) in seen


def test_where_the_folder_is_and_what_is_not_of_the_model_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = folder_fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "README.md").write_text("more")
    assert folder_fingerprint(copy) == before
    (copy / "modeling.py").write_text("pass")  # code that comes with the weights decides what they mean
    assert folder_fingerprint(copy) != before


def test_chat_templates_in_a_folder_of_their_own_take_part(folder: Path) -> None:
    before = folder_fingerprint(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert folder_fingerprint(folder) != before


def test_a_large_file_that_is_damaged_still_has_a_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engines.models._WHOLE_BYTES", 100)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    before = folder_fingerprint(folder)
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    assert folder_fingerprint(folder) != before


def test_spans_of_tensors_and_weights_cut_anywhere(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    spans = tensor_spans(io.BytesIO(whole), len(whole))
    assert [end - begin for begin, end in spans] == [
        tensor.nbytes for _, tensor in sorted(load_file(folder / "model.safetensors").items())
    ]
    assert spans[-1][1] == len(whole)
    for length in range(0, len(whole), 7):
        with pytest.raises(ValueError, match=r"its header|it has"):
            tensor_spans(io.BytesIO(whole[:length]), length)
    with pytest.raises(ValueError, match="header"):
        tensor_spans(io.BytesIO(bytes(len(whole))), len(whole))


# Models by name: what tells one from another.


COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, with two commits of one repository; the hub itself cannot be asked."""
    for commit in COMMITS:
        folder = tmp_path / "models--somebody--tiny" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--somebody--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMITS[0])
    return refs


def test_a_hub_id_stands_for_its_commit(cache: Path) -> None:
    assert model_fingerprint("somebody/tiny") == f"somebody/tiny@{COMMITS[0]}"
    assert head_fingerprints(None, "somebody/tiny+ngram") == {"somebody/tiny": f"somebody/tiny@{COMMITS[0]}"}
    (cache / "main").write_text(COMMITS[1])
    assert model_fingerprint("somebody/tiny") == f"somebody/tiny@{COMMITS[1]}"


def test_draft_models_are_told_apart_wherever_they_are_named(cache: Path) -> None:
    found = head_fingerprints(None, "ngram+stack:cacheback>model:somebody/tiny@cpu")
    assert found == {"model:somebody/tiny@cpu": f"somebody/tiny@{COMMITS[0]}"}
    with pytest.raises(InputError, match="nobody/none"):
        head_fingerprints(None, "stack:ngram>model:nobody/none")


def test_a_hub_id_that_cannot_be_found_is_named(cache: Path) -> None:
    with pytest.raises(InputError, match="model nobody/none is no folder, and as a hub id: "):
        model_fingerprint("nobody/none")
    with pytest.raises(InputError, match="drafter nobody/none is no folder, and as a hub id: "):
        head_fingerprints(None, "nobody/none")


@pytest.mark.parametrize("job", ["generate", pytest.param("serve", marks=pytest.mark.slow)])
def test_without_a_network_a_bare_name_fails_at_once(job: str, tmp_path: Path) -> None:
    """The hub's client alone asks a hub that does not answer again and again, for half a minute."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", f"{tmp_path}/prompts.jsonl", "--output", f"{tmp_path}/out"] if job == "generate" else []
    code = f"""
import sys, time
from huggingface_hub import file_download
from jobs.{job} import main
time.sleep = lambda seconds: sys.exit(f"it waits {{seconds}} seconds to ask again")
sys.exit(main({[*files, "--model", "tiny-model"]}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: model tiny-model is no folder, and as a hub id: it is not in the cache {tmp_path}/hub, and the hub "
        f"{address} does not answer (give a folder, or a hub id that this machine can reach or has in its cache)"
    )


def test_a_slip_in_a_drafters_name_is_found_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match=r"no drafter 'ngarm': did you mean ngram\?"):
        head_fingerprints(None, "ctc+ngarm")


def test_paths_mean_to_workers_what_they_mean_to_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "models" / "mine").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.chdir(tmp_path / "here")
    mine = str(tmp_path / "here" / "models" / "mine")
    assert [model_name(name) for name in ("models/mine", "~/models/mine", mine)] == [mine] * 3
    assert [model_name(name) for name in ("org/name", "models/none")] == ["org/name", "models/none"]
    spec = engine_spec("models/mine", "models/mine+ngram", LoadingConfig(), EngineSettings())
    sent = pickle.dumps(spec)
    monkeypatch.chdir(tmp_path / "there")
    loaded: list[tuple[str, Path]] = []

    def load(model: str, drafter: str, **_: object) -> None:
        loaded.append((drafter, Path(model).resolve()))

    monkeypatch.setattr("drafter.llm.SpeculativeLM.from_pretrained", load)
    pickle.loads(sent).load()
    assert loaded == [("models/mine+ngram", Path(mine))]


def test_an_early_exit_names_no_file() -> None:
    assert head_fingerprints(None, "exit:2") == {}
    assert list(head_fingerprints(None, "exit:2+ctc")) == ["ctc"]


@pytest.mark.slow
def test_an_output_is_not_gone_on_with_by_a_base_with_a_merged_adapter(
    run: Run, finished: FinishedJob, model: Path, tmp_path: Path
) -> None:
    merged = Path(shutil.copytree(model, tmp_path / "merged"))
    finished.reopen()
    assert run(finished.source, *JOB_SETTINGS, base=merged).code == 0  # a copy is the same model
    weights = load_file(merged / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if "proj" in name:
            weight += 0.02 * torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1])
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    finished.reopen()
    refused = run(finished.source, *JOB_SETTINGS, base=merged)
    assert refused.code == 2
    assert "belongs to another job (model was 'v2-" in refused.error


@pytest.mark.slow
def test_an_output_is_not_gone_on_with_by_a_model_with_an_adapter(
    refused: Run, finished: FinishedJob, model: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(load_base(model, device="cpu").model, settings).save_pretrained(tmp_path / "adapter")
    finished.reopen()
    told = refused(finished.source, *JOB_SETTINGS, "--loading.adapter", tmp_path / "adapter")
    assert told.code == 2
    assert "belongs to another job (loading.adapter was None, is now 'v2-" in told.error
    told = refused(finished.source, *JOB_SETTINGS, "--loading.adapter", tmp_path)
    assert "is not an adapter's folder: it has no adapter_config.json" in told.error


@pytest.mark.slow
def test_a_job_of_a_gguf_file_says_what_was_loaded(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "the 12"}, {"prompt": "12"}])
    done = run(source, "--sampling.max_new_tokens", 8, base=tmp_path / "tiny.gguf")
    assert done.code == 0
    assert json.loads((done.folder / "run.json").read_text())["weights"] == "GGUF, as stored"
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    content[-5] ^= 1
    (tmp_path / "tiny.gguf").write_bytes(content)
    FinishedJob(source, done).reopen()
    told = run(source, "--sampling.max_new_tokens", 8, base=tmp_path / "tiny.gguf")
    assert told.code == 2
    assert "belongs to another job (model was 'v2-" in told.error


@pytest.mark.parametrize("sampled", [False, True])
def test_every_tensor_of_a_gguf_file_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), file)
    if sampled:
        monkeypatch.setattr("pipeline.engines.models._WHOLE_BYTES", 100)
    content, spans = file.read_bytes(), gguf_spans(file)
    seen = {model_fingerprint(str(file))}
    for begin in [200, *(begin for begin, _ in spans)]:
        file.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :])
        seen.add(model_fingerprint(str(file)))
    assert len(seen) == 2 + len(spans) == 22
    assert generation_settings(str(file)) == {}
    assert longest_request(str(file), 2048, trust_remote_code=False) == 128


def test_a_request_may_be_as_long_as_the_model_has_positions() -> None:
    embedded = model_name(None)
    assert longest_request(embedded, 2048, trust_remote_code=False) == 1024
    assert longest_request(embedded, 500, trust_remote_code=False) == 500


def test_a_model_in_a_bucket_is_copied_once_for_a_machine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that start together share one copy; a changed folder has another, with another fingerprint."""
    monkeypatch.setattr(model_copies, "_COPIES", tmp_path / "copies")
    bucket = Path(shutil.copytree(model, tmp_path / "bucket"))
    copied: list[Path] = []
    copy = Location.copy_to

    def counted(place: Location, file: Path) -> None:
        copied.append(file)
        copy(place, file)

    monkeypatch.setattr(Location, "copy_to", counted)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(model_name, [f"file://{bucket}"] * 4))
    (folder,) = found
    assert sorted(file.name for file in copied) == sorted(file.name for file in bucket.iterdir() if file.is_file())
    assert model_fingerprint(folder) == model_fingerprint(str(bucket))
    (bucket / "config.json").write_text((bucket / "config.json").read_text() + " ")
    assert model_fingerprint(model_name(f"file://{bucket}")) != model_fingerprint(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty is no folder with files: give that of its config\.json"):
        model_name(f"file://{tmp_path}/empty")

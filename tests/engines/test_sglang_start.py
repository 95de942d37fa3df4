"""Tests that an SGLang server starts only the processes that it needs, and ends as soon as its
lifeline closes."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import TokenChunk
from megatron_async.engines.sglang import models
from megatron_async.engines.sglang.hooks import forked
from megatron_async.engines.sglang.process import server_environment
from megatron_async.models.families import families
from megatron_async.process_backends.child_process import LIFELINE_VARIABLE
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.receiver import make_root, remove_roots
from tests.engine import (
    SETTINGS,
    EngineUnderTest,
    collect,
    logprobs_of,
    make_request,
    reference_logprobs,
    start_engine,
)
from tests.listening import listening


def test_forked_uses_fork_only_for_the_wrapped_call() -> None:
    def launch(engine: Any) -> str:
        return multiprocessing.get_start_method()

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert forked(launch, None) == "fork"
        assert multiprocessing.get_start_method() == "spawn"
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_server_runs_its_cleanup_and_ends_when_the_lifeline_closes(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from megatron_async.process_backends.child_process import hold_lifeline\n"
        "hold_lifeline(lambda: pathlib.Path(sys.argv[1]).touch())\n"
        "print('holds', flush=True)\n"
        "time.sleep(600)\n"
    )
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "done")],
        env={**os.environ, LIFELINE_VARIABLE: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read_end)
    assert server.stdout is not None and server.stdout.readline() == b"holds\n"
    assert server.poll() is None
    os.close(write_end)
    assert server.wait(20) == -9
    assert (tmp_path / "done").exists()


def test_remove_roots_deletes_only_the_files_that_this_process_received(tmp_path: Path) -> None:
    ours = make_root(tmp_path)
    (ours / "shard").write_bytes(b"weights")
    others = tmp_path / ours.name.replace(str(os.getpid()), "1")
    others.mkdir()
    remove_roots(os.getpid(), tmp_path)
    assert not ours.exists() and others.exists()


@pytest.mark.engine
@pytest.mark.slow
def test_sglang_server_is_two_processes_with_a_clean_start_log(
    sglang_engine: EngineUnderTest,
) -> None:
    pid = sglang_engine.process.pid
    assert pid is not None
    names = [child.name() for child in psutil.Process(pid).children(recursive=True)]
    assert names == ["sglang::scheduler"]
    log = sglang_engine.process.log_path.read_text()
    # Later lines belong to requests of other tests.
    start_log, ready, _ = log.partition("fired up")
    assert ready
    assert "sglang.srt.models." not in start_log, "all models were imported; some log warnings"
    assert "Megatron" not in start_log
    assert "Traceback" not in start_log


@pytest.mark.engine
@pytest.mark.slow
def test_sglang_server_maps_shared_files_only_in_its_own_directory(
    sglang_engine: EngineUnderTest,
) -> None:
    pid = sglang_engine.process.pid
    assert pid is not None
    own, loads = "/tmp/megatron-async-", []
    for member in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        mapped = Path(f"/proc/{member.pid}/maps").read_text()
        assert "/dev/shm/sgl" not in mapped
        loads.append(re.search(rf"{own}\d+/\w+/sglang_loads_", mapped) is not None)
    assert any(loads)


@pytest.mark.engine
@pytest.mark.slow
def test_tensor_ranks_rendezvous_without_a_listening_sglang_store(tmp_path: Path) -> None:
    """SGLang's own store would listen on every interface. Both ranks load the weights of each
    update."""
    engine = start_engine(tmp_path, SETTINGS.model_copy(update={"tensor": 2}))
    try:
        assert engine.process.pid is not None
        server = psutil.Process(engine.process.pid)
        members = [server, *server.children(recursive=True)]
        assert {f"sglang::scheduler_TP{rank}" for rank in (0, 1)} < {m.name() for m in members}
        assert listening(members) == {("engine", "loopback")}
        prompt = [5, 9, 17, 3]
        request = make_request("r", prompt, 20)
        for name, model in engine.models.items():
            engine.reset_to(name)
            chunks: list[TokenChunk] = engine.run(lambda client: collect(client, request))
            ids = [*prompt, *(int(token) for chunk in chunks for token in chunk.token_ids)]
            expected = reference_logprobs(model, ids)[len(prompt) - 1 :]
            assert np.abs(logprobs_of(chunks) - expected).max() < 1e-4
    finally:
        engine.process.stop()


def test_preloaded_sglang_models_are_those_of_the_projects_families() -> None:
    source = Path(str(models.__file__)).with_name("families.py").read_text()
    found = re.findall(r"import (\w+)$", source, re.M)
    assert sorted(found) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in families())


FIND_MODELS = """
from megatron_async.engines.sglang import server
server.install()
from sglang.srt.models.registry import ModelRegistry
for architecture in ("Gemma3ForCausalLM", "Olmo2ForCausalLM"):
    _, name = ModelRegistry.resolve_model_cls([architecture])
    print(name, ModelRegistry._default_models_loaded)
from megatron.core import parallel_state  # User code may import Megatron-core here.
"""


@pytest.mark.engine
@pytest.mark.slow
def test_sglang_imports_all_models_when_the_family_is_not_preloaded() -> None:
    environment = server_environment(EngineConfig(), "cpu", None, os.environ)
    command = [sys.executable, "-c", FIND_MODELS]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-2:] == ["Gemma3ForCausalLM False", "Olmo2ForCausalLM True"]


# On a CPU the scheduler is forked and inherits everything that the server has set up. On GPUs it is
# spawned: its arguments are pickled, and it has the hooks only if the main module installs them
# again. Every Python process of this test imports the module below first. The module makes "spawn"
# the only start method, and creates a file named by the process ID in each spawned process.
SITE = """
import multiprocessing, os, pathlib, sys

set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: set_start_method("spawn", force=True)
if "--multiprocessing-fork" in sys.orig_argv:
    pathlib.Path(__file__).with_name(str(os.getpid())).touch()
"""


@pytest.mark.engine
@pytest.mark.slow
def test_spawned_scheduler_has_the_projects_hooks_and_loads_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    engine = start_engine(tmp_path)
    try:
        assert engine.process.pid is not None
        children = psutil.Process(engine.process.pid).children(recursive=True)
        [scheduler] = [child for child in children if child.name() == "sglang::scheduler"]
        assert (site / str(scheduler.pid)).exists(), "the scheduler was not spawned"
        engine.reset_to("b", PolicyVersion(3, 7))
        request = make_request("r", [5, 9, 17, 3], 50)
        chunks: list[TokenChunk] = engine.run(lambda client: collect(client, request))
        assert {chunk.version for chunk in chunks} == {PolicyVersion(3, 7)}
        assert len(chunks) > 2, "without the hook, only the end has a version"
    finally:
        engine.process.stop()

"""Tests `sft --from-teacher`: responses of the teacher are sampled with the run's settings and
scored by its reward, and only accepted responses are kept."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

from megatron_async.commands.teacher import check_teacher, sample_from_teacher
from megatron_async.config import RunConfig, build_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.config.run import SFTConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.tiny_model import build_tiny_model, write_character_tokenizer
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks import build_task
from megatron_async.train_loop.sft_rank import batches_of
from tests.crash.engines import EngineThread


class Endpoint:
    """Chat endpoint that replies to every other request of a prompt with the correct sum, and with
    a different text each time."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.status = 200
        self.url = ""

    async def reply(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        question = body["messages"][-1]["content"]
        number = sum(question == other["messages"][-1]["content"] for other in self.requests)
        value = sum(map(int, question.rstrip("=").split("+"))) + number % 2
        text = f"{'.' * number}#{value}"
        content = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        return web.json_response(content, status=self.status)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served, thread = Endpoint(), EngineThread()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", served.reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), thread.loop).result(30)
    yield served
    asyncio.run_coroutine_threadsafe(runner.cleanup(), thread.loop).result(30)
    thread.close()


def settings(folder: Path, **teacher: Any) -> RunConfig:
    rows = [{"prompt": f"{n}+2", "answer": str(n + 2)} for n in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_character_tokenizer(folder)
    return build_config(
        {
            "root": str(folder),
            "model": {"path": str(folder)},
            "task": {
                "path": str(folder / "rows.jsonl"),
                "heldout_share": 0,
                "prompt_template": "{question}=",
            },
            "reward": {"name": "exact", "arguments": {"answer_marker": "#"}},
            "sampling": {"max_new_tokens": 32},
            "sft": {"batch_sequences": 4, "teacher": {"model": "m", **teacher}},
        }
    )


def test_teacher_gets_five_requests_a_prompt_and_correct_replies_are_kept(
    tmp_path: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path)
    directory = RunDirectory(tmp_path)
    found = sample_from_teacher(config, directory, endpoint.url)
    requested = Counter(body["messages"][-1]["content"] for body in endpoint.requests)
    assert requested == {f"{n}+2=": 5 for n in range(8)}
    body = endpoint.requests[0]
    assert (body["model"], body["temperature"], body["top_p"]) == ("m", 0.7, 0.95)
    assert body["max_tokens"] == 32
    rows = [json.loads(line) for line in Path(found.sft.data).read_text().splitlines()]
    assert len(rows) == 16 and all(
        row["response"].endswith(f"#{int(row['prompt'][0]) + 2}") for row in rows
    )
    assert (found.sft.batches, found.sft.examples) == (
        12,
        16,
    )  # There are 3 epochs of 16 examples, in batches of 4.
    task = build_task(found.task, str(tmp_path))
    examples = task.worked_examples(found.sft.examples, found.sft.file())
    assert len(examples) == 16
    uses = Counter(np.concatenate(batches_of(len(examples), found.sft, 1)).tolist())
    assert uses == dict.fromkeys(range(16), 3)
    assert task.text(examples[0].prompt_ids.tolist()) == f"{rows[0]['prompt']}="
    assert "teacher: 8 of 8 prompts, 16 responses accepted" in capsys.readouterr().out


def test_sft_batches_use_every_example_once_before_any_is_repeated() -> None:
    def batches(**settings: int) -> list[list[int]]:
        sft = SFTConfig.model_validate({"batch_sequences": 4, **settings})
        return [batch.tolist() for batch in batches_of(10, sft, 1)]

    endless = batches(steps=7)
    assert [len(batch) for batch in endless] == [4] * 7
    flat = [example for batch in endless for example in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and flat[:10] != flat[10:20]
    once = batches(epochs=1)
    assert [len(batch) for batch in once] == [4, 4, 2]
    assert [example for batch in once for example in batch] == flat[:10]


def test_from_teacher_is_refused_when_data_steps_or_epochs_are_set(tmp_path: Path) -> None:
    for name, value in {"data": "mine.jsonl", "steps": 7, "epochs": 2}.items():
        config = settings(tmp_path).with_section("sft", **{name: value})
        with pytest.raises(UserError, match=rf"^sft\.{name} is .*{value}.*. Remove sft"):
            check_teacher(config, "http://localhost:1/v1")


def test_sampling_fails_when_teacher_replies_are_rejected_or_errors(
    tmp_path: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, min_reward=2.0, samples=1, prompts=2)
    with pytest.raises(UserError, match="the reward accepted no response"):
        sample_from_teacher(config, RunDirectory(tmp_path), endpoint.url)
    assert len(endpoint.requests) == 2
    endpoint.status = 500
    with pytest.raises(ComponentFailure, match=r"the teacher at http.* failed: .*status 500"):
        sample_from_teacher(config, RunDirectory(tmp_path), endpoint.url)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_check_teacher_refuses_unusable_addresses_and_missing_model_name(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with pytest.raises(
        UserError, match=r"neither an address .* nor the directory of a Hugging Face model"
    ):
        check_teacher(config, "/nowhere")
    with pytest.raises(UserError, match=r"Set sft\.teacher\.model"):
        check_teacher(settings(tmp_path, model=""), "http://x/v1")


def test_teacher_model_runs_on_an_engine_that_is_stopped_afterwards(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", seed=1)
    config = settings(tmp_path, min_reward=0.0, samples=2)
    engines = {"kind": "simulated", "simulated": {"mean_length": 8, "step_seconds": 0.0}}
    config = config.model_copy(update={"engines": EngineConfig.model_validate(engines)})
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    found = sample_from_teacher(config, directory, str(tmp_path / "model"))
    rows = [json.loads(line) for line in Path(found.sft.data).read_text().splitlines()]
    assert {row["prompt"] for row in rows} == {f"{n}+2" for n in range(8)}
    assert 8 <= len(rows) <= 16 and all(isinstance(row["response"], str) for row in rows)
    assert not [child for child in psutil.Process().children(recursive=True) if listens(child)]


def listens(process: psutil.Process) -> bool:
    return any(entry.status == psutil.CONN_LISTEN for entry in process.net_connections(kind="inet"))

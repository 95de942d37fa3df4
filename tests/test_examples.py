"""Tests that every script of examples/ runs and behaves as its README shows."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.config import RunConfig, load_config
from megatron_async.config.data import FileConfig
from megatron_async.environments.conversation import Conversation
from megatron_async.environments.environment_runner import environment_builder
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.tools import described, tools_of
from megatron_async.environments.worker import TrialEpisode
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.tasks.build import build_task
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from tests.environments.inside import InProcessBackend

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ["scheduler/loop.py", "correction/correct.py", "kernels/head.py", "store/keep.py"]


def names(script: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_script_runs_from_the_command_line(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert capsys.readouterr().out
    assert len((EXAMPLES / script).read_text().splitlines()) <= 50


def test_every_example_has_a_readme_that_links_its_files() -> None:
    for folder in (path for path in EXAMPLES.iterdir() if any(path.glob("*.py"))):
        readme = (folder / "README.md").read_text()
        for file in folder.glob("*.py"):
            assert f"({file.name})" in readme, file


@pytest.mark.parametrize("preset", ["sync", "rapid", "copris", "pipeline", "async"])
def test_example_loop_batches_each_group_once_with_every_preset(preset: str) -> None:
    batches = names("scheduler/loop.py")["run"](preset, 20)
    groups = [group for batch in batches for group in batch]
    assert len(batches) == 20 and len(set(groups)) == len(groups) == 40
    assert (groups == sorted(groups)) == (preset in ("sync", "rapid")), (
        "only sync and rapid must keep the order of groups"
    )


def test_example_corrected_loss_rejects_one_response_and_weights_the_other() -> None:
    loss_of = names("correction/correct.py")["corrected_loss"]
    now = torch.full((2, 3), -1.0, requires_grad=True)
    then = torch.tensor([[-1.0, -1.1, -0.9], [-5.0, -5.0, -5.0]])
    loss, metrics = loss_of(now, then, torch.ones(2, 1), torch.ones(2, 3))
    loss.backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad[0], -(now[0].detach() - then[0]).exp() / 3)
    assert now.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)


def test_example_head_gradient_equals_the_clipped_loss_on_logits() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(7, 8), torch.randn(20, 8)
    tokens, begins = torch.randint(20, (7,)), torch.tensor([0, 3, 7])
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 4)
    old = (hidden @ weight.T).log_softmax(-1)[range(7), tokens] + 0.3 * torch.randn(7)

    ours = weight.clone().requires_grad_()
    loss = names("kernels/head.py")["step"](hidden, ours, tokens, old, advantages, begins)
    plain = weight.clone().requires_grad_()
    ratio = ((hidden @ plain.T).log_softmax(-1)[range(7), tokens] - old).exp()
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad, plain.grad)


ENVIRONMENTS = {"guessing_game": "games", "calculator": "conversations"}


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return the config of an example environment, with data from `prepare.py`, which is called as
    in the README."""
    folder, out = EXAMPLES / request.param, tmp_path_factory.mktemp(request.param)
    data = ENVIRONMENTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "argv", ["prepare.py", str(out), f"--{data}", "60"])
        runpy.run_path(str(folder / "prepare.py"), run_name="__main__")
    overrides = [f"model.path={out / 'model'}", f"sft.data={out / f'{data}.jsonl'}"]
    if request.param == "calculator":
        overrides.append(f"task.path={out / 'products.jsonl'}")
    return load_config(folder / "config.yaml", overrides)


def test_example_demonstrations_equal_conversations_of_the_environment(prepared: RunConfig) -> None:
    config = prepared
    environment = environment_builder(config.environment.name, config.environment.arguments)()
    schemas = described(tools_of(environment, config.environment.name), config.environment.name)
    tokenizer = load_tokenizer(config.model.path)
    stops = stop_tokens(config.model.path, tokenizer)
    turns = Conversation(config.task, tokenizer, stops, schemas)
    lines = Path(config.sft.data).read_text().splitlines()
    branches = set()
    for first, *rest in (json.loads(line)["messages"] for line in lines):
        turns.check([first], {"tool"} if schemas else {"user"})
        branch = turns.opening([first]).tolist()
        for message in rest:
            if message["role"] == "assistant":
                text = message["content"] + tokenizer.eos_token
                branch += tokenizer.encode(text, add_special_tokens=False)
            else:
                branch += turns.next([message], ended=True).tolist()
        branches.add(tuple(branch))
    task = build_task(config.task, config.model.path)
    examples = task.worked_examples(60, FileConfig(path=config.sft.data))
    assert 40 <= len(examples) < 60, "some demonstrations must be held out"
    for worked in examples:
        assert (*worked.prompt_ids.tolist(), *worked.response_ids.tolist()) in branches


def trial_episode(config: RunConfig) -> TrialEpisode:
    """Play one episode with invented responses, as the preflight check does before a run starts."""
    [prompt] = build_task(config.task, config.model.path, has_episodes=True).train_prompts(0, 1)
    # The worker runs in this process, whose memory the limit of a worker would restrict.
    config = config.with_section("episode", memory_mib=1 << 20)
    workers = EnvironmentWorkers(config, InProcessBackend())  # type: ignore[arg-type]
    return asyncio.run(workers.trial_run(prompt.payload))


def test_example_environment_is_short_and_plays_a_trial_episode(prepared: RunConfig) -> None:
    file = Path(prepared.environment.name.partition(":")[0])
    assert len(file.read_text().splitlines()) < 30
    played = trial_episode(prepared)
    assert not played.differs
    assert played.text.endswith(">")


def test_example_agent_is_short_and_plays_a_trial_episode(tmp_path: Path) -> None:
    """The agent program calls the policy over HTTP."""
    build_tiny_model(tmp_path / "model", seed=1)
    folder = EXAMPLES / "agent"
    config = load_config(folder / "config.yaml", [f"model.path={tmp_path / 'model'}"])
    assert len((folder / "agent.py").read_text().splitlines()) < 30
    played = trial_episode(config)
    assert "Guess my number, 1 to 100." in played.text
    assert played.observation > 0, "the environment must reply to a wrong guess"


STUB = """
import json, sys
from openai import OpenAI

for line in sys.stdin:
    row = json.loads(line)
    client = OpenAI(base_url=row["base_url"], api_key=row["api_key"])
    if sys.argv[1:] == ["end"]:
        sys.exit()
    messages = [{"role": "user", "content": f"Task {row['seed']}."}]
    client.chat.completions.create(model="policy", messages=messages)
    print(json.dumps({"number": row["number"], "reward": 1.0, "errors": sys.argv[1:]}), flush=True)
"""


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ([], ""),
        (["the task is broken"], "RuntimeError: the task is broken"),
        (["end"], "RuntimeError: the process that plays the taskset has ended"),
    ],
)
def test_example_taskset_is_played_by_a_separate_process(
    argument: list[str], message: str, tmp_path: Path
) -> None:
    """The process next to a worker reads and writes lines. A stub replaces `verifiers`, which is
    not installed."""
    build_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "stub.py").write_text(STUB)
    command = json.dumps([sys.executable, str(tmp_path / "stub.py"), *argument])
    settings = [f"model.path={tmp_path / 'model'}", f"agent.arguments.command={command}"]
    config = load_config(EXAMPLES / "taskset" / "config.yaml", settings)
    if message:
        with pytest.raises(EnvironmentFault, match=message):
            trial_episode(config)
    else:
        assert "Task " in trial_episode(config).text


def test_environments_page_shows_the_code_of_the_examples() -> None:
    page = (EXAMPLES.parent / "docs" / "environments.md").read_text()
    for file in ("guessing_game/guess.py", "calculator/calculator.py"):
        code = re.sub(r'\A"""[^\n]*"""\n\n+', "", (EXAMPLES / file).read_text())
        assert f"```python\n{code}```" in page, file

"""Tests that the trial episode before a run refuses broken environments and reports odd ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.environments import check
from megatron_async.environments.check import CheckedEnvironment, check_environment
from megatron_async.environments.worker import row_of
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.tasks import build_task
from tests.environments.inside import InProcessBackend

GAMES = Path(__file__).with_name("games.py")
PROGRAMS = Path(__file__).with_name("agent_programs.py")
OWN = '''
import os

from megatron_async.environments import Step


class HalfKept:
    def reset(self, **row):
        return "x"
    def step(self, answer):
        return Step(done=True)
    async def state(self):
        return b""

class NotBuilt:
    def __init__(self):
        raise RuntimeError("no license")


class Long:
    def __init__(self, opening=1, observation=1):
        self.opening, self.observation = opening, observation

    def reset(self, **row):
        return "x" * self.opening

    def step(self, answer):
        return Step("y" * self.observation)


class Tools:
    def reset(self, **row):
        return "x"

    def work(self, a: int) -> int:
        """Work.

        Args:
            a: How much.
        """
        return a


class Untyped(Tools):
    def work(self, a):
        return a


class Dies(Long):
    def step(self, answer):
        os._exit(3)


class AsTrl(Tools):
    def reset(self, **row):
        self.reward = 0.0
        return "x"


class Rewarding(Tools):
    def get_reward(self):
        return 0.5
'''


SHOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    (tmp_path / "model").mkdir()
    write_character_tokenizer(tmp_path / "model")
    return file


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the check use a worker object in this process rather than a worker process."""

    @contextmanager
    def backend(logs: Path) -> Iterator[InProcessBackend]:
        yield InProcessBackend()

    monkeypatch.setattr(check, "local_backend", backend)


def checked(
    name: str,
    folder: Path,
    longest: int = 100,
    run: Mapping[str, Any] = MappingProxyType({}),
    arguments: Mapping[str, Any] = MappingProxyType({}),
    **episode: Any,
) -> CheckedEnvironment:
    config = build_config(
        {
            **run,
            "model": {"path": str(folder / "model")},
            "task": {"kind": "seeds"},
            "environment": {"name": name, "arguments": dict(arguments)},
            "episode": {"memory_mib": 1 << 20, **episode},
            "sampling": {"max_new_tokens": 16},
        }
    )
    task = build_task(config.task, config.model.path, has_episodes=True)
    return check_environment(config, task.train_prompts(0, 1)[0].payload, longest)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("NotBuilt", {}, "own.py:NotBuilt', and building it raised RuntimeError: no license at"),
        ("Gone", {}, "has no 'Gone'"),
        ("NotBuild", {}, "has no 'NotBuild'; did you mean 'NotBuilt'?"),
        ("Long", {"arguments": {"high": 3}}, "environment.arguments do not fit"),
        ("Long", {"arguments": {"opening": 90}}, "the opening has 91 tokens; with "),
        ("Long", {"arguments": {"observation": 90}}, "an observation has 93 tokens; with "),
        ("Tools", {}, "a class of tools, but episode.tool_parser is not set"),
        ("Tools", {"tool_parser": "qwen99"}, "episode.tool_parser is 'qwen99'; it must be"),
        ("Untyped", {}, "the tool 'work' cannot be described"),
        ("HalfKept", {}, "own.py:HalfKept', which has only `state` of `state` and `restore`"),
    ],
)
def test_check_refuses_an_environment_with_the_reason_when_it_fails(
    own: Path, name: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        checked(f"{own}:{name}", own.parent, **settings)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("name", "reward"), [("AsTrl", []), ("Rewarding", []), ("Tools", ["exact"])]
)
def test_check_accepts_a_class_of_tools_when_it_or_a_setting_gives_rewards(
    own: Path, name: str, reward: list[str]
) -> None:
    tokenizer = write_character_tokenizer(own.parent / "model")
    tokenizer.chat_template = SHOWS_TOOLS
    tokenizer.save_pretrained(own.parent / "model")
    run = {"reward": reward}
    checked(f"{own}:{name}", own.parent, longest=2000, run=run, tool_parser="qwen25")
    if name == "Tools":
        with pytest.raises(
            UserError, match=r"Tools' has no reward in a trial episode, and reward is not set; "
        ):
            checked(f"{own}:{name}", own.parent, longest=2000, tool_parser="qwen25")


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("has_episodes", "template", "sentence"),
    [
        (
            "game",
            "{{ messages[0].content }}",
            "it leaves out a response that later messages follow",
        ),
        ("game", "{{ raise_exception('one turn') }}", "the chat template of model.path fails"),
        (
            "agent",
            "{{ messages[0].content }}",
            "it leaves out a response that later messages follow",
        ),
    ],
)
def test_check_refuses_a_chat_template_when_it_renders_only_one_turn(
    own: Path, has_episodes: str, template: str, sentence: str
) -> None:
    tokenizer = write_character_tokenizer(own.parent / "model")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(own.parent / "model")
    with pytest.raises(UserError, match=sentence):
        if has_episodes == "game":
            checked(f"{own}:Long", own.parent)
        else:
            model = {"path": str(own.parent / "model")}
            agent = {"agent": f"{PROGRAMS}:solve", "sampling": {"max_new_tokens": 16}}
            config = build_config({"model": model, **agent})
            payload = {"question": "ask?", "answer": "7", "metadata": {}, "messages": []}
            check_environment(config, payload, 100)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("game", "notices"), [("Count", 0), ("Unlike", 1)])
def test_check_has_a_notice_when_episodes_of_a_row_start_differently(
    own: Path, game: str, notices: int
) -> None:
    found = checked(f"{GAMES}:{game}", own.parent)
    assert len(found.notices) == notices
    assert all(
        "opens two episodes of the same row differently" in notice for notice in found.notices
    )
    assert found.summary.startswith("first episode, ")


ASKED = {"role": "user", "content": "6 times 7?"}


@pytest.mark.parametrize(
    "prompt", ["6 times 7?", [ASKED], [{"role": "system", "content": "Be brief."}, ASKED]]
)
def test_row_of_returns_the_original_columns_of_the_row(own: Path, prompt: object) -> None:
    row = {"prompt": prompt, "answer": "42", "level": 3, "method": "GET"}
    (own.parent / "rows.jsonl").write_text(json.dumps(row))
    task = {"kind": "files", "path": str(own.parent / "rows.jsonl"), "heldout_share": 0}
    config = build_config({"task": task, "environment": {"name": f"{own}:Long"}})
    template = write_character_tokenizer(own.parent / "model")
    template.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template.save_pretrained(own.parent / "model")
    made = build_task(config.task, str(own.parent / "model"), has_episodes=True)
    assert row_of(made.train_prompts(0, 1)[0].payload) == row


def test_check_keeps_the_log_that_its_error_names_when_the_worker_dies(own: Path) -> None:
    with pytest.raises(UserError, match="it ended with exit code 3") as refused:
        checked(f"{own}:Dies", own.parent)
    found = re.search(r"its log is (\S+)", str(refused.value))
    assert found is not None and Path(found[1]).exists()

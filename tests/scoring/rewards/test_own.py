"""Tests rewards of the user's: import, calls, trial before a run, limits and counted failures.

All asynchronous rewards run in one process, which may end by itself. The scores that it returned
before then count, also on uvloop, which Ray uses for the rollout manager if uvloop is installed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import build_config, load_config
from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import character_tokenizer, write_character_tokenizer
from megatron_async.scoring.frames import ASYNC
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.scoring.process import ScorerCrash, ScorerProcess
from megatron_async.scoring.rewards.check import check_rewards
from megatron_async.scoring.rewards.sample import score_of
from megatron_async.trajectory.types import Prompt

HERE = Path(__file__).parent
PAYLOAD = {"question": "1+1", "answer": "2", "metadata": {"level": 3}}
Scores = list[tuple[float | None, dict[str, float]]]


def own(name: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a reward in own.py."""
    return {"name": f"{HERE / 'own.py'}:{name}", **settings}


def settings_of(*rewards: Any, limit: float = 30.0, **task: Any) -> ScorerSettings:
    """Return the settings of scorers with these rewards and a time limit of each score."""
    task = {"scorer_timeout_seconds": limit, "scorer_workers": 2, **task}
    return build_config({"reward": list(rewards), "task": task}).scorers


def scores(folder: Path, settings: ScorerSettings, *calls: Sequence[str]) -> list[Scores]:
    """Score each call's responses with a pool of scorer processes, all calls concurrently."""
    write_character_tokenizer(folder)
    encode = character_tokenizer().encode
    prompt = Prompt(np.zeros(1, np.int32), "any", PAYLOAD)
    pool = LocalScorerPool(settings, str(folder))

    async def score() -> list[Scores]:
        try:
            return await asyncio.gather(
                *(pool.score_group(prompt, [encode(text) for text in texts]) for texts in calls)
            )
        finally:
            pool.close()

    return asyncio.run(score())


def test_pool_adds_up_functions_classes_and_groups_with_weights(
    tmp_path: Path,
) -> None:
    settings = settings_of(
        own("by_hand", arguments={"unit": 2.0}),
        own("with_parts", weight=10.0),
        own("Counting", weight=0.0, arguments={"start": 100}),
        own("rank", group=True, label="longest"),
        own("waits"),
        own("Waits"),
    )
    ((first, second),) = scores(tmp_path, settings, ["2", "333"])
    assert first == (
        pytest.approx(2.0 + 10 * 0.99 + 0.0 + 1.0 + 1.0),
        {
            "by_hand": 2.0,
            "with_parts": 0.99,
            "with_parts.length": 0.01,
            "with_parts.level": 3.0,
            "Counting": 101.0,
            "longest": 0.0,
            "waits": 1.0,
            "Waits": 1.0,
        },
    )
    assert second[0] == pytest.approx(10 * -0.03 + 0.5)


def test_pool_runs_users_code_in_scorer_process(tmp_path: Path) -> None:
    (((pid, _),),) = scores(tmp_path, settings_of(own("process_id")), ["2"])
    assert pid is not None and pid != os.getpid()


def test_pool_keeps_other_rewards_when_async_reward_hangs_or_dies(
    tmp_path: Path,
) -> None:
    settings = settings_of(own("hangs_on_request"), limit=2.0)
    calls = [["2"], ["wait"], ["die"], ["2"]]
    found = [call[0] for call in scores(tmp_path, settings, *calls)]
    assert found[0] == found[3] == (1.0, {})
    assert found[1] == (0.0, {"scorer_timeout": 1.0})
    assert found[2] == (0.0, {"scorer_crash": 1.0})


def test_forked_copies_of_async_scorer_receive_no_requests(tmp_path: Path) -> None:
    settings = settings_of(own("forks", concurrency=2), limit=10.0)
    texts = ["2", "3"] * 8
    (found,) = scores(tmp_path, settings, texts)
    assert found == [(float(text == "2"), {}) for text in texts]


def test_pool_replaces_async_scorer_when_its_event_loop_is_blocked(tmp_path: Path) -> None:
    settings = settings_of(own("hangs_on_request"), limit=1.0)
    write_character_tokenizer(tmp_path)
    encode = character_tokenizer().encode
    prompt = Prompt(np.zeros(1, np.int32), "any", PAYLOAD)
    pool = LocalScorerPool(settings, str(tmp_path))

    async def score() -> Scores:
        try:
            return [await pool.score(prompt, encode(text)) for text in ("hang", "2")]
        finally:
            pool.close()

    assert asyncio.run(score()) == [(0.0, {"scorer_timeout": 1.0}), (1.0, {})]


def test_pool_scores_other_rewards_when_blocking_reward_fails(
    tmp_path: Path,
) -> None:
    for name, fault in (
        ("sleeps", "scorer_timeout"),
        ("dies", "scorer_crash"),
        ("raises", "scorer_error"),
    ):
        settings = settings_of(own("by_hand"), own(name, timeout_seconds=1.0))
        (((reward, detail),),) = scores(tmp_path, settings, ["2"])
        assert reward == 1.0 and detail == {"by_hand": 1.0, name: 0.0, fault: 1.0}


def test_pool_returns_no_reward_when_scorer_fails_and_policy_is_drop(tmp_path: Path) -> None:
    settings = settings_of(own("by_hand"), own("dies"), on_scorer_timeout="drop")
    (((reward, detail),),) = scores(tmp_path, settings, ["2"])
    assert reward is None and detail == {"by_hand": 1.0, "scorer_crash": 1.0}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (own("raises"), r"JSONDecodeError: .* at .*own\.py:\d+"),
        (own("returns_text"), "returned 'full marks'; it must be a number"),
        (own("returns_list"), r"returned \[1\.0\]; it must be a number.*`group: true`"),
        (own("by_hand", group=True), r"AttributeError: 'list' object .* at .*own\.py:\d+"),
        (
            own("dies"),
            r"dies: the process ended with exit code 3\. The rewards were tried on the responses "
            r"\['2', ''\]",
        ),
        (
            own("sleeps", timeout_seconds=0.5),
            r"no score within 0.5 s \(its timeout_seconds\)",
        ),
        (own("NeedsArguments"), "missing 1 required positional argument: 'path'"),
        (own("NeedsArguments", arguments={"path": "/no"}), r"FileNotFoundError.* at .*own\.py:\d+"),
        (own("not_callable"), "neither a function nor a class"),
        (own("nothing"), "has no 'nothing'"),
        ("no_such_package.rewards:f", "no module 'no_such_package.rewards'"),
        ({"name": "math", "arguments": {"marker": "#"}}, "unknown setting marker"),
        ({"name": "regex", "arguments": {"pattern": "("}}, "is not a regular expression"),
    ],
)
def test_check_rewards_refuses_bad_reward(reward: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rewards(settings_of(reward), PAYLOAD)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import json\n\ndef score(sample)\n    return 1.0\n", "mine.py:3"),
        ("import helper\n\ndef score(sample):\n    return 1.0\n", "helper.py:2"),
        ("import json\njson.loads('{')\n", "mine.py:2"),
    ],
    ids=["its own syntax", "that of a module of its own", "an exception"],
)
def test_check_rewards_names_users_line_when_import_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "helper.py").write_text("\nx = = 1\n")
    with pytest.raises(UserError) as caught:
        check_rewards(settings_of(f"{tmp_path / 'mine.py'}:score"), PAYLOAD)
    assert "frozen" not in str(caught.value)
    assert str(caught.value).endswith(f" at {tmp_path / line}")


@pytest.mark.parametrize("function", ["(s): return None", "(s, other): return 1.0"])
def test_check_rewards_names_only_users_file_when_call_fails(tmp_path: Path, function: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score{function}\n")
    with pytest.raises(UserError) as caught:
        check_rewards(settings_of(f"{tmp_path / 'mine.py'}:score"), PAYLOAD)
    assert f" at {tmp_path / 'mine.py'}. The rewards were tried on" in str(caught.value)
    assert "megatron_async/" not in str(caught.value)


def test_check_rewards_names_users_line_when_evaluated_text_is_bad() -> None:
    with pytest.raises(UserError, match=r"SyntaxError: .* at .*own\.py:\d+\. The rewards were"):
        check_rewards(settings_of(own("evaluates")), {**PAYLOAD, "answer": "2 +"})


@pytest.mark.parametrize("name", ["mean", "uninformative_groups", "scorer_timeout"])
def test_score_of_refuses_component_with_name_of_metric(name: str) -> None:
    with pytest.raises(ValueError, match=f"a component {name!r}, which is the name of a metric"):
        score_of((1.0, {"fine": 0.5, name: 0.5}))
    assert score_of((1.0, {"fine": 0.5})).parts == {"fine": 0.5}


def test_check_rewards_accepts_good_rewards() -> None:
    check_rewards(settings_of(own("with_parts"), own("rank", group=True), own("waits")), PAYLOAD)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nonsense", "reward is 'nonsense'; it must be package.module:name"),
        (["exact", "exact"], "reward has the name 'exact' twice"),
        (["math", own("rank", label="mean")], "reward/mean is a metric of the sum of all rewards"),
        ({"name": "exact", "wieght": 2}, r"unknown setting reward\.0\.wieght"),
        ({"name": "exact", "weight": 1e9}, r"reward\.0\.weight is 1000000000\.0: .* 1000000"),
        (7, "reward is 7"),
    ],
)
def test_config_refuses_bad_reward_setting_with_clear_message(reward: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_config({"reward": reward})


def test_config_finds_reward_file_next_to_config_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "run.yaml").write_text("reward: mine.py:score\n")
    (reward,) = load_config(tmp_path / "run.yaml").reward
    assert reward.name == f"{tmp_path / 'mine.py'}:score" and reward.display_name == "score"


def test_scorer_log_has_traceback_of_failure_when_rewards_print_a_lot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = [own("talks", label="talk"), own("calls_raises"), own("fails_slowly")]
    settings = settings_of(*rewards).model_copy(update={"logs": str(tmp_path)})
    scores(tmp_path, settings, ["2"])
    (log,) = tmp_path.glob("scorer-*.log")
    text = log.read_text()
    assert "talking" in text and "printed more than 16 KiB" in text
    for line in (
        "reward calls_raises failed: JSONDecodeError: ",
        f'  File "{HERE / "own.py"}", line ',
        "    return float(json.loads(",
        "reward fails_slowly failed: KeyError: 'always'",
    ):
        assert text.count(line) >= 1, line
    assert capfd.readouterr().err == ""


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Function that runs a coroutine in an event loop of asyncio or uvloop."""
    found: Run = pytest.importorskip(request.param).run
    return found


async def started(reward: str, **arguments: float) -> ScorerProcess:
    """Start a scorer process for an asynchronous reward; return it once it is ready."""
    process = ScorerProcess(settings_of(own(reward, arguments=arguments)), ASYNC)
    assert await process.ready() == [True]
    return process


async def reply_to(process: ScorerProcess, response: str) -> dict[str, Any]:
    """Send a response to the scorer process; return its reply."""
    (reply,) = [
        reply async for reply in process.stream_replies([ScoreJob(0, PAYLOAD, (response,))])
    ]
    return reply


def test_replies_before_end_of_scorer_count_when_loop_was_busy(run: Run) -> None:
    async def body() -> None:
        process = await started("ends_its_process", seconds=0.3)
        calls = [reply_to(process, text) for text in [*["ok"] * 20, "die"]]
        replies = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        *found, ended = await replies
        for reply in found:
            assert not isinstance(reply, BaseException) and reply["scores"][0][0] == 1.0
        assert isinstance(ended, ScorerCrash) and process.closed
        await process.finish()

    run(body())


def test_end_of_scorer_closes_no_descriptor_of_another_file(run: Run) -> None:
    opened: list[tuple[int, int]] = []

    async def body() -> None:
        process = await started("ends_its_process")
        with pytest.raises(ScorerCrash):
            await reply_to(process, "die")
        number = process.requests.fileno()
        await process.finish()
        with Path(os.devnull).open() as file:
            opened.append((number, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)))
        await asyncio.sleep(0.1)

    run(body())
    ((number, descriptor),) = opened
    assert number == descriptor
    # The call raises OSError if the end of the process has closed the descriptor.
    os.close(descriptor)

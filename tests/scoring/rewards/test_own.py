"""Rewards of the user's: found, called, tried before a run, limited and counted in it.

Asynchronous rewards have one process, which may end by itself: its scores up to then count, also on
uvloop, which Ray runs the rollout manager with where it is installed.
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
from megatron_async.scoring.frames import WAITING
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
    return {"name": f"{HERE / 'own.py'}:{name}", **settings}


def settings_of(*rewards: Any, limit: float = 30.0, **task: Any) -> ScorerSettings:
    task = {"scorer_timeout_seconds": limit, "scorer_workers": 2, **task}
    return build_config({"reward": list(rewards), "task": task}).scorers


def scores(folder: Path, settings: ScorerSettings, *calls: Sequence[str]) -> list[Scores]:
    """Of each call's responses, all calls at once, by a pool of scorer processes."""
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


def test_functions_classes_and_groups_add_up_with_weights_and_name_their_parts(
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


def test_the_users_code_runs_in_the_scorers_process(tmp_path: Path) -> None:
    (((pid, _),),) = scores(tmp_path, settings_of(own("process_id")), ["2"])
    assert pid is not None and pid != os.getpid()


def test_one_that_hangs_or_dies_in_the_event_loop_costs_nobody_else_a_reward(
    tmp_path: Path,
) -> None:
    settings = settings_of(own("hangs_on_request"), limit=2.0)
    calls = [["2"], ["wait"], ["die"], ["2"]]
    found = [call[0] for call in scores(tmp_path, settings, *calls)]
    assert found[0] == found[3] == (1.0, {})
    assert found[1] == (0.0, {"scorer_timeout": 1.0})
    assert found[2] == (0.0, {"scorer_crash": 1.0})


def test_forked_copies_of_the_event_loop_take_no_requests(tmp_path: Path) -> None:
    settings = settings_of(own("forks", concurrency=2), limit=10.0)
    texts = ["2", "3"] * 8
    (found,) = scores(tmp_path, settings, texts)
    assert found == [(float(text == "2"), {}) for text in texts]


def test_a_blocked_event_loop_is_replaced(tmp_path: Path) -> None:
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


def test_a_blocking_one_that_hangs_dies_or_raises_is_counted_and_the_rest_scored(
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


def test_a_failure_can_drop_the_trajectory(tmp_path: Path) -> None:
    settings = settings_of(own("by_hand"), own("dies"), on_scorer_timeout="drop")
    (((reward, detail),),) = scores(tmp_path, settings, ["2"])
    assert reward is None and detail == {"by_hand": 1.0, "scorer_crash": 1.0}


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (own("raises"), r"JSONDecodeError: .* at .*own\.py:\d+"),
        (own("returns_text"), "returned 'full marks'; it must be a number"),
        (own("returns_list"), r"returned \[1\.0\]; it must be a number.*`group: true`"),
        (own("by_hand", group=True), r"AttributeError: 'list' object .* at .*own\.py:\d+"),
        (
            own("dies"),
            r"dies: it ended with exit code 3 \(tried on \['2', ''\] as response",
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
def test_a_bad_reward_is_found_before_anything_starts(reward: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_rewards(settings_of(reward), PAYLOAD)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import json\n\ndef score(sample)\n    return 1.0\n", "mine.py:3"),
        ("import helper\n\ndef score(sample):\n    return 1.0\n", "helper.py:2"),
        ("import json\njson.loads('{')\n", "mine.py:2"),
    ],
    ids=["its own syntax", "that of a module of its own", "an exception"],
)
def test_an_error_at_the_import_names_the_users_line_and_no_frame_of_the_import_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, place: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "helper.py").write_text("\nx = = 1\n")
    with pytest.raises(UserError) as caught:
        check_rewards(settings_of(f"{tmp_path / 'mine.py'}:score"), PAYLOAD)
    assert "frozen" not in str(caught.value)
    assert str(caught.value).endswith(f" at {tmp_path / place}")


@pytest.mark.parametrize("function", ["(s): return None", "(s, other): return 1.0"])
def test_what_is_wrong_with_a_call_names_the_users_file_and_none_of_ours(
    tmp_path: Path, function: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def score{function}\n")
    with pytest.raises(UserError) as caught:
        check_rewards(settings_of(f"{tmp_path / 'mine.py'}:score"), PAYLOAD)
    assert f" at {tmp_path / 'mine.py'} (tried on" in str(caught.value)
    assert "megatron_async/" not in str(caught.value)


def test_an_error_in_text_that_a_reward_evaluates_names_the_users_line() -> None:
    with pytest.raises(UserError, match=r"SyntaxError: .* at .*own\.py:\d+ \(tried"):
        check_rewards(settings_of(own("evaluates")), {**PAYLOAD, "answer": "2 +"})


@pytest.mark.parametrize("part", ["mean", "uninformative_groups", "scorer_timeout"])
def test_a_part_with_the_name_of_a_metric_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=f"names a part {part!r}, which is a name of metrics"):
        score_of((1.0, {"fine": 0.5, part: 0.5}))
    assert score_of((1.0, {"fine": 0.5})).parts == {"fine": 0.5}


def test_good_ones_pass_the_check() -> None:
    check_rewards(settings_of(own("with_parts"), own("rank", group=True), own("waits")), PAYLOAD)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("nonsense", "reward is 'nonsense'; it must be package.module:name"),
        (["exact", "exact"], "reward has 'exact' twice"),
        (["math", own("rank", label="mean")], "reward/mean is a metric of the sum of all rewards"),
        ({"name": "exact", "wieght": 2}, r"unknown setting reward\.0\.wieght"),
        ({"name": "exact", "weight": 1e9}, r"reward\.0\.weight is 1000000000\.0: .* 1000000"),
        (7, "reward is 7"),
    ],
)
def test_a_bad_setting_is_refused_in_a_sentence(reward: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_config({"reward": reward})


def test_a_file_beside_the_config_is_found_and_a_name_is_enough(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "run.yaml").write_text("reward: mine.py:score\n")
    (reward,) = load_config(tmp_path / "run.yaml").reward
    assert reward.name == f"{tmp_path / 'mine.py'}:score" and reward.display_name == "score"


def test_the_runs_log_has_the_traceback_of_a_failure_whatever_else_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = [own("talks", label="talk"), own("calls_raises"), own("fails_slowly")]
    settings = settings_of(*rewards).model_copy(update={"logs": str(tmp_path)})
    scores(tmp_path, settings, ["2"])
    (log,) = tmp_path.glob("scorer-*.log")
    text = log.read_text()
    assert "talking" in text and "more than this log takes" in text
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
    found: Run = pytest.importorskip(request.param).run
    return found


async def started(reward: str, **arguments: float) -> ScorerProcess:
    process = ScorerProcess(settings_of(own(reward, arguments=arguments)), WAITING)
    assert await process.ready() == [True]
    return process


async def asked_for(process: ScorerProcess, response: str) -> dict[str, Any]:
    (reply,) = [
        reply async for reply in process.stream_replies([ScoreJob(0, PAYLOAD, (response,))])
    ]
    return reply


def test_scores_that_were_found_before_the_end_count_though_the_loop_was_busy(run: Run) -> None:
    async def body() -> None:
        process = await started("ends_its_process", seconds=0.3)
        asked = [asked_for(process, text) for text in [*["ok"] * 20, "die"]]
        answers = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        *found, ended = await answers
        for answer in found:
            assert not isinstance(answer, BaseException) and answer["scores"][0][0] == 1.0
        assert isinstance(ended, ScorerCrash) and process.closed
        await process.finish()

    run(body())


def test_the_end_closes_no_descriptor_that_is_another_files_by_then(run: Run) -> None:
    opened: list[tuple[int, int]] = []

    async def body() -> None:
        process = await started("ends_its_process")
        with pytest.raises(ScorerCrash):
            await asked_for(process, "die")
        number = process.requests.fileno()
        await process.finish()
        with Path(os.devnull).open() as file:
            opened.append((number, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)))
        await asyncio.sleep(0.1)

    run(body())
    ((number, descriptor),) = opened
    assert number == descriptor
    os.close(descriptor)  # fails where somebody has closed it

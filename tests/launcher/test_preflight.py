"""Tests the preflight check, which refuses a run with a remedy, or returns notices, before any
process starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.errors import UserError
from megatron_async.launcher.preflight import check_evaluation, check_probe_tolerance, check_run
from megatron_async.train_loop.sft_rank import batches_of
from tests.inputs.model_directories import write_model

ROWS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with a context of 4,096 tokens, and with 500 rows of the user's data
    in `data.jsonl`."""
    folder = write_model(tmp_path_factory.mktemp("preflight") / "model", "llama")
    rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(ROWS)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def settings(folder: Path, **changes: Any) -> RunConfig:
    user_data = {
        "model": {"path": str(folder)},
        "task": {"kind": "files", "name": "exact", "path": str(folder / "data.jsonl")},
        "schedule": {"groups_per_batch": 4},
    }
    return build_config(merge(user_data, changes))


def test_eval_prompts_are_lowered_with_a_notice_when_fewer_are_held_out(folder: Path) -> None:
    checked = check_run(settings(folder))
    found = checked.config.eval.prompts
    assert 30 < found < 70, "a tenth of 500 rows, by hash"
    assert checked.notices == (
        f"eval.prompts is {found} instead of its default 256: the task has {found} held-out "
        "problems (task.heldout_share 0.1)",
    )
    assert check_evaluation(settings(folder), folder).config.eval.prompts == found


def test_check_evaluation_refuses_reference_code_that_fails_its_tests(folder: Path) -> None:
    """The failing row is not the first row that is checked."""
    rows = [
        {"prompt": f"f{i}", "test": f"assert f() == {i}", "code": f"def f(): return {min(i, 5)}"}
        for i in range(7)
    ]
    file = folder / "code.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    task = {"path": str(file), "layout": "mbpp_plus", "heldout_share": 0.0}
    task["prompt_template"] = "{question}"
    config = settings(
        folder,
        task=task,
        reward="code",
        eval={"sets": {"extra": {"path": str(folder / "data.jsonl")}}},
    )
    with pytest.raises(UserError, match="`code` of the row with the prompt 'f6' fails"):
        check_evaluation(config, folder)


@pytest.mark.parametrize(
    "command",
    [["doctor", "--config"], ["train", "--dry-run", "--config"], ["settings", "eval", "--of"]],
)
def test_read_only_commands_show_the_findings_of_the_preflight_check(
    folder: Path, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(settings(folder).model_dump(exclude_unset=True, mode="json")))

    def shown(*overrides: str, refused: bool = False) -> str:
        done = CliRunner().invoke(app, [*command, str(file), *overrides])
        assert isinstance(done.exception, UserError) if refused else done.exit_code == 0
        return " ".join(f"{done.output} {done.exception}".split())

    assert re.search(r"eval\.prompts is \d+ instead of its default 256", shown())
    if command[0] != "settings":
        assert "task.scorer_workers = " in shown() and "1 update(s)" in shown()
        assert "1 update(s)" in shown("eval.prompts=300", refused=True)
        assert "eval.prompts is 300, but" in shown("eval.prompts=300", refused=True)
    else:
        assert "train refuses this run: eval.prompts is 300" in shown("eval.prompts=300")


def test_check_run_refuses_task_without_held_out_problems(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"has 0 held-out problems.*equal prompts.*task.heldout_share 0"
    ):
        check_run(settings(folder, task={"heldout_share": 1e-9}))


def test_eval_prompts_are_lowered_when_a_generated_task_has_few_problems(folder: Path) -> None:
    one_digit = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    task = {"kind": "chain_sum", "params": one_digit}
    few = build_config({"model": {"path": str(folder)}, "task": task | {"heldout_share": 0.5}})
    checked = check_run(few)
    assert 0 < checked.config.eval.prompts < 10 and len(checked.notices) == 1


def test_check_run_refuses_more_recomputed_layers_than_a_stage_has(folder: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.recompute is 50; each stage .* has \d+ layers"):
        check_run(settings(folder, trainer={"recompute": 50}))


def test_check_run_refuses_batch_larger_than_the_training_data(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"groups_per_batch is 480, .* has only 4\d\d training problems"
    ):
        check_run(settings(folder, schedule={"groups_per_batch": 480}))


def test_check_run_refuses_sft_batch_larger_than_the_sft_data(folder: Path) -> None:
    rows = [{"prompt": f"{i}-{i}=", "response": "0"} for i in range(20)]
    file = folder / "worked.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        UserError, match=r"sft\.batch_sequences is 64, but sft\.data .* has only 1\d, "
    ):
        check_run(settings(folder, sft={"data": str(file)}), generates=False)
    check_run(settings(folder, sft={"data": str(file), "batch_sequences": 8}), generates=False)


def test_sft_batches_follow_from_the_data_when_epochs_are_set(
    folder: Path,
) -> None:
    file = folder / "worked.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}=", "response": "0"}) for i in range(21)))
    sft = {"data": str(file), "batch_sequences": 8, "epochs": 3}
    config = check_run(settings(folder, sft=sft, task={"heldout_share": 0}), generates=False).config
    assert config.sft.batches == len(batches_of(21, config.sft, 1)) == 8
    with pytest.raises(UserError, match=r"sft\.steps is 7 and sft\.epochs is 3; .* Remove one"):
        settings(folder, sft=sft | {"steps": 7})


@pytest.mark.parametrize("long_prompts", ["refuse", "drop"])
@pytest.mark.parametrize(
    "engines", [{"context_length": 1024}, {"max_total_tokens": 1025}], ids=["context", "KV cache"]
)
def test_check_run_refuses_response_limit_that_leaves_no_prompt_tokens(
    folder: Path, engines: dict[str, int], long_prompts: str
) -> None:
    changes = {"sampling": {"max_new_tokens": 1024}, "task": {"long_prompts": long_prompts}}
    with pytest.raises(
        UserError, match=r"max_new_tokens is 1024, but an engine accepts at most 101[89]"
    ):
        check_run(settings(folder, engines=engines, **changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty (0 bytes); download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the weights"),
        (None, "it is truncated or damaged, download it again"),
    ],
    ids=["empty", "pointer", "truncated"],
)
def test_damaged_weights_error_names_the_file_and_the_remedy(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    model = write_model(tmp_path / "model", "llama")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(UserError) as refused:
        check_run(settings(model))
    assert str(file) in str(refused.value) and message in str(refused.value)


def test_check_run_refuses_file_task_without_a_known_reward(folder: Path) -> None:
    with pytest.raises(UserError, match=r"task.name is 'exactly', which cannot score rows .* or"):
        check_run(settings(folder, task={"name": "exactly"}))


def test_missing_model_error_shows_the_download_command(
    folder: Path,
) -> None:
    hub = "Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B` and set model.path=models/Qwen2.5-7B"
    other = "ORGANIZATION/NAME --local-dir DIRECTORY` and set model.path=DIRECTORY"
    named = {"Qwen/Qwen2.5-7B": hub, "models/SmolLM2": other, "/nowhere": other}
    for path, command in named.items():
        with pytest.raises(UserError, match=rf"model.path '{path}' is not a directory") as refused:
            check_run(settings(folder, model={"path": path}))
        assert str(refused.value).endswith(f"or download the model with `hf download {command}")
    with pytest.raises(UserError, match=r"model.path is empty; set it to"):
        check_run(settings(folder, model={"path": ""}))


@pytest.mark.parametrize(
    ("chosen", "notices"),
    [
        ({"schedule": {"preset": "async"}}, 1),
        ({"schedule": {"preset": "copris"}}, 0),
        ({"schedule": {"preset": "async"}, "algorithm": {"recipe": "copris"}}, 0),
        ({"algorithm": {"recipe": "prime_rl"}}, 0),
        ({}, 0),
    ],
)
def test_recipe_is_named_when_only_another_schedule_was_chosen(
    folder: Path, chosen: dict[str, Any], notices: int
) -> None:
    found = [
        notice
        for notice in check_run(settings(folder, **chosen)).notices
        if "algorithm.recipe has its default copris" in notice
    ]
    assert len(found) == notices
    assert all("Recipes for this schedule: prime_rl" in notice for notice in found)


def test_check_probe_tolerance_refuses_strict_tolerance_on_gpus(
    folder: Path,
) -> None:
    strict = settings(folder, weights={"probe_tolerance": 1e-5})
    check_probe_tolerance(strict, "cpu")
    with pytest.raises(
        UserError, match=r"weights.probe_tolerance is 1e-05, which requires float32"
    ):
        check_probe_tolerance(strict, "cuda")


def test_missing_tokenizer_error_names_the_files_to_copy(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"contains no tokenizer. Copy tokenizer.json and"):
        check_run(settings(model))

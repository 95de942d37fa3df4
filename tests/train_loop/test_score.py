"""Tests `score`, which computes the trainer's log-probs of given tokens; results are equal at every
layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.train_loop.score_rank import read_sequences, score
from tests.distributed import run_ranks
from tests.hf_models import VOCAB, random_stream, reference_logprobs, save_hf_model

# Single tokens, a length that no layout divides, and a length beyond the budget of a microbatch.
LENGTHS = (5, 17, 1, 9, 40, 2, 23, 3)
TEMPERATURE = 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp4": {"ranks": 4},
    "tp2_pp2_sp": {"ranks": 4, "tensor": 2, "pipeline": 2, "sequence": True},
}
Scores = dict[str, Tensor]


def settings(folder: Path, layout: str) -> dict[str, Any]:
    return {
        "name": "scored",
        "root": str(folder),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "parallel": LAYOUTS[layout],
        # Splits the rows into two chunks for one rank, and into several microbatches.
        "trainer": {"microbatch_tokens": 16, "collective_timeout_seconds": 60},
        "sampling": {"temperature": TEMPERATURE},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model without a tokenizer, and rows with a random mask; one row has no
    token with mask 1."""
    folder = tmp_path_factory.mktemp("score")
    save_hf_model("qwen3", folder / "model")
    ids_T, _ = random_stream(LENGTHS)
    mask_T = torch.rand(len(ids_T), generator=torch.Generator().manual_seed(1)) < 0.6
    rows = [
        {"input_ids": ids.tolist(), "loss_mask": [int(m) and row != 3 for m in mask]}
        for row, (ids, mask) in enumerate(
            zip(ids_T.split(LENGTHS), mask_T.split(LENGTHS), strict=True)
        )
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Scores:
    """Return the log-probs of transformers, with 0 at tokens with mask 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids_T, cu_S1 = random_stream(LENGTHS)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    mask_T = torch.tensor([m for row in rows for m in row["loss_mask"]])
    mask_T[cu_S1[:-1].long()] = 0
    logprobs_T = reference_logprobs(model, ids_T, cu_S1, TEMPERATURE) * mask_T
    assert logprobs_T.count_nonzero() == mask_T.sum() > 40
    return {"logprobs": logprobs_T, "cu_seqlens": cu_S1.long()}


def check_equal(found: Scores, expected: Scores) -> None:
    assert found["logprobs"].dtype is torch.float32
    assert torch.equal(found["cu_seqlens"], expected["cu_seqlens"])
    assert torch.equal(found["logprobs"] != 0, expected["logprobs"] != 0)
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)


def score_in_rank(changes: dict[str, Any], folder: Path, out: Path) -> None:
    score(build_config(changes), folder / "rows.jsonl", out)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_transformers_log_probs_at_every_layout(
    layout: str, folder: Path, expected: Scores, tmp_path: Path
) -> None:
    ranks = LAYOUTS[layout].get("ranks", 1)
    out = tmp_path / "scores.safetensors"
    run_ranks(score_in_rank, ranks, settings(folder, layout), folder, out)
    check_equal(load_file(out), expected)


@pytest.mark.slow
def test_score_command_starts_ranks_and_writes_one_file(
    folder: Path, expected: Scores, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(settings(folder, "one rank")))
    out = tmp_path / "new" / "scores.safetensors"
    command = ["score", "--config", f"{tmp_path}/c.yaml", "--data", f"{folder}/rows.jsonl"]
    layout = ["parallel.ranks=2", "parallel.tensor=2", f"root={tmp_path}/runs"]
    result = CliRunner().invoke(app, [*command, "--out", str(out), *layout])
    assert result.exception is None, result.output
    assert result.output == f"wrote the log-probs of {len(LENGTHS)} sequences to {out}\n"
    check_equal(load_file(out), expected)
    assert out.stat().st_mode == (tmp_path / "c.yaml").stat().st_mode, (
        "the file must have the mode that umask gives"
    )
    assert not any((tmp_path / "runs").iterdir())
    with pytest.raises(UserError, match=r"--out is .*scores.safetensors, which already exists"):
        CliRunner().invoke(app, [*command, "--out", str(out), *layout], catch_exceptions=False)


GOOD = '{"input_ids": [1, 2], "loss_mask": [0, 1]}'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"loss_mask": [1]}', "input_ids is None; it must be a list of integers"),
        ('{"input_ids": [1.5, 2], "loss_mask": [0, 1]}', "input_ids is [1.5, 2]"),
        ('{"input_ids": [true, false], "loss_mask": [0, 1]}', "input_ids is [True, False]"),
        (f'{{"input_ids": [1, {VOCAB}], "loss_mask": [0, 1]}}', f"has {VOCAB} at position 1; the"),
        ('{"input_ids": [1, 2]}', "loss_mask is None; it must be a list of 2 numbers"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask is [1]"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0.5]}', "loss_mask is [0, 0.5]"),
    ],
)
def test_read_sequences_error_names_the_line_of_an_invalid_row(
    row: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{GOOD}\n\n{row}\n")
    with pytest.raises(UserError) as found:
        list(read_sequences(file, VOCAB))
    assert str(found.value).startswith(f"--data {file}:3")
    assert message in str(found.value)


def test_score_command_starts_no_rank_when_a_row_is_invalid(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(settings(folder, "one rank")))
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    command = ["score", "--config", f"{tmp_path}/c.yaml", "--data", f"{tmp_path}/rows.jsonl"]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: loss_mask is None"):
        CliRunner().invoke(
            app, [*command, "--out", f"{tmp_path}/o", f"root={tmp_path}"], catch_exceptions=False
        )
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "rows.jsonl"}

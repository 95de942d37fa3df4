"""Every script of examples/ runs as its README shows, and does what it shows."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ["scheduler/loop.py", "correction/correct.py", "kernels/head.py", "store/keep.py"]


def names(script: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_from_the_command_line(
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
def test_the_loop_batches_each_group_once_under_every_schedule(preset: str) -> None:
    batches = names("scheduler/loop.py")["run"](preset, 20)
    groups = [group for batch in batches for group in batch]
    assert len(batches) == 20 and len(set(groups)) == len(groups) == 40
    assert (groups == sorted(groups)) == (preset in ("sync", "rapid")), "the others let some wait"


def test_the_corrected_loss_drops_the_far_response_and_weighs_the_others() -> None:
    loss_of = names("correction/correct.py")["corrected_loss"]
    now = torch.full((2, 3), -1.0, requires_grad=True)
    then = torch.tensor([[-1.0, -1.1, -0.9], [-5.0, -5.0, -5.0]])
    loss, metrics = loss_of(now, then, torch.ones(2, 1), torch.ones(2, 3))
    loss.backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad[0], -(now[0].detach() - then[0]).exp() / 3)
    assert now.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)


def test_the_heads_gradient_is_that_of_the_clipped_loss_on_logits() -> None:
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

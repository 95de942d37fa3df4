"""Check that the quickstart's policy learns on one device.

It tests trainer, kernels, weight transfer by IPC and batches together. The model, the problems,
fine-tuning and RL follow configs/quickstart.yaml, with one rank. The generator is a separate
process. It samples batch n + 1 while the trainer trains on batch n, so tokens have a lag of 1.

The check does not test SGLang, because its generator (`generator.py`) uses transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_check.check import ROOT, CheckFailed, Figures, Stage
from benchmarks.gpu_check.models import trainer_on
from megatron_async.trajectory import types
from megatron_async.trajectory.packing import pack_groups

if TYPE_CHECKING:
    from megatron_async.config import RunConfig
    from megatron_async.tasks.base import Task
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.trajectory.batch import TokenBatch

# Smallest gain in accuracy that passes. The quickstart gains 0.2.
_MIN_GAIN = 0.1
# As in trainer.py: far above rounding errors, and far below the difference of wrong weights.
_LOGPROB_BOUND = 0.03
_TRIAL_RUN = {
    "steps": 2,
    "sft": {"steps": 3, "examples": 192},
    "sampling": {"max_new_tokens": 12},
    "schedule": {"groups_per_batch": 2, "group_size": 2},
    "eval": {"prompts": 4},
}


def learning(stage: Stage) -> Figures:
    """Fine-tune, then train by RL; return rewards, and held-out accuracy before and after RL."""
    import yaml

    from megatron_async.config import build_config
    from megatron_async.config.load import merge
    from megatron_async.models.save import save_hf
    from megatron_async.models.tiny_model import build_tiny_model
    from megatron_async.tasks import build_task
    from megatron_async.train_loop.sft_rank import batches_of, example_batch

    dtype = "float32" if stage.trial_run else "bfloat16"
    settings = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    one_rank = {"parallel": {"ranks": 1}, "model": {"dtype": dtype}}
    settings = merge(merge(settings, one_rank), _TRIAL_RUN if stage.trial_run else {})
    config = build_config(settings)
    initial, tuned = stage.scratch / "initial", stage.scratch / "tuned"
    build_tiny_model(initial, seed=1)
    task = build_task(config.task, str(initial))
    began = time.monotonic()
    examples = task.worked_examples(config.sft.examples)
    with trainer_on(initial, "sft", **settings) as trainer:
        for step, chosen in enumerate(batches_of(len(examples), config.sft, config.seed)):
            trainer.train_sft(example_batch([examples[i] for i in chosen], step))
        save_hf(trainer.model, tuned, str(initial))
    figures: dict[str, Any] = {"sft_seconds": time.monotonic() - began}
    generator = Generator(tuned, stage.device, dtype)
    try:
        with trainer_on(tuned, **settings) as trainer:
            loop = _Loop(config, task, trainer, generator)
            figures["accuracy_before"] = loop.accuracy()
            began = time.monotonic()
            figures["mean_rewards"] = [round(loop.step(), 3) for _ in range(config.steps)]
            figures["rl_seconds"] = time.monotonic() - began
            figures["accuracy_after"] = loop.accuracy()
            figures["mean_logprob_difference"] = loop.logprob_difference()
    finally:
        generator.close()
    if not figures["mean_logprob_difference"] <= _LOGPROB_BOUND:
        raise CheckFailed(f"the generator's weights differ from the trainer's: {figures}")
    gain = figures["accuracy_after"] - figures["accuracy_before"]
    if not stage.trial_run and not gain >= _MIN_GAIN:
        raise CheckFailed(f"accuracy rose only by {gain:.3f}: {figures}")
    return figures


class Generator:
    """Client of the generator's process.

    Each reply must be read with `read` before the next call of `ask`.
    """

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_check.generator"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            [*command, str(model), device, dtype], cwd=ROOT, text=True, **pipes
        )

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CheckFailed(f"the generator's process ended with code {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class _Loop:
    """RL loop in which the generator samples one batch ahead of the trainer."""

    def __init__(
        self, config: RunConfig, task: Task, trainer: PolicyTrainer, generator: Generator
    ) -> None:
        from megatron_async.tasks.procedural import ProceduralScorer

        self._config, self._task = config, task
        self._trainer, self._generator = trainer, generator
        self._score = ProceduralScorer(config.task).score
        self._loaded, self._asked = trainer.step, 0
        self._next = self._sample()

    def step(self) -> float:
        """Train on the waiting batch while the generator samples the next one; send the weights.

        Returns:
            Mean reward of the trained batch.
        """
        from megatron_async.models.export import stage_tensors
        from megatron_async.weight_sync.transports.tensor import flat_copy, serialize

        batch, prompts = self._next, self._prompts()
        self._ask(prompts, greedy=False)
        report = self._trainer.train_batch(batch)
        if report.skipped:
            raise CheckFailed(f"update {report.step} was skipped: {report.skip_reason}")
        self._next = self._pack(prompts, self._generator.read())
        tensors = stage_tensors(self._trainer.model, self._trainer.model[0].architecture)
        # `flat` must exist until the generator has copied it.
        flat = flat_copy(list(tensors), by_value=False)
        self._generator.ask(load=serialize(flat))
        self._generator.read()
        self._loaded = self._trainer.step
        return float(batch.rewards_S.mean())

    def accuracy(self) -> float:
        """Return the share of held-out prompts with a right greedy response.

        The generator must be idle.
        """
        prompts = self._task.eval_prompts(self._config.eval.prompts)
        self._ask(prompts, greedy=True)
        found = zip(prompts, self._generator.read(), strict=True)
        return float(np.mean([self._reward(prompt, ids) for prompt, (ids, _) in found]))

    def logprob_difference(self) -> float:
        """Sample a batch; return the mean difference of its log-probs from the trainer's.

        The mean is over absolute differences of sampled tokens.
        """
        batch = self._sample()
        ours_T = self._trainer.compute_logprobs(batch)
        return float(np.abs(ours_T - batch.rollout_logprobs_T)[batch.loss_mask_T != 0].mean())

    def _prompts(self) -> list[types.Prompt]:
        schedule = self._config.schedule
        found = self._task.train_prompts(self._asked, schedule.groups_per_batch)
        self._asked += schedule.groups_per_batch
        return [prompt for prompt in found for _ in range(schedule.group_size)]

    def _ask(self, prompts: Sequence[types.Prompt], *, greedy: bool) -> None:
        ids = [prompt.token_ids.tolist() for prompt in prompts]
        longest = self._config.sampling.max_new_tokens
        self._generator.ask(prompts=ids, max_new_tokens=longest, greedy=greedy)

    def _reward(self, prompt: types.Prompt, response_ids: Sequence[int]) -> float:
        return self._score(prompt.payload, self._task.text(response_ids))[0]

    def _sample(self) -> TokenBatch:
        prompts = self._prompts()
        self._ask(prompts, greedy=False)
        return self._pack(prompts, self._generator.read())

    def _pack(self, prompts: Sequence[types.Prompt], responses: Any) -> TokenBatch:
        """Score the responses; return them as a packed batch, as in a run."""
        version, size = types.PolicyVersion(0, self._loaded), self._config.schedule.group_size
        trajectories = []
        for number, (prompt, (ids, logprobs)) in enumerate(zip(prompts, responses, strict=True)):
            stopped = ids[-1] in self._task.stop_token_ids
            trajectories.append(
                types.Trajectory(
                    trajectory_id=number,
                    group_id=number // size,
                    prompt=prompt,
                    state=types.TrajectoryState.SCORED,
                    segments=(
                        types.Segment(
                            np.array(ids, np.int32), np.array(logprobs, np.float32), version
                        ),
                    ),
                    finish_reason=types.FinishReason("stop" if stopped else "length"),
                    reward=self._reward(prompt, ids),
                )
            )
        groups = [
            types.Group(at // size, prompts[at], tuple(trajectories[at : at + size]))
            for at in range(0, len(trajectories), size)
        ]
        return pack_groups(groups, step=self._trainer.step, lineage=0, branch_points={})

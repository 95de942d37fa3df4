"""A small policy that learns on one device: the trainer, kernels and IPC weights together.

The quickstart's model and kind of problem: sums of one-digit numbers, demonstrations of which 60 %
state only the result. RL with CoPRIS's recipe must then make it right more often. The generator is
a process of its own that samples batch n + 1 while the trainer trains on batch n, so tokens have a
lag of 1.

This is no evidence for SGLang: the generator is `generator.py`, built on transformers.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_check.check import ROOT, CheckFailed, Findings, Stage
from benchmarks.gpu_check.models import trainer_on
from megatron_async.tasks.answers import final_answer
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import (
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)

if TYPE_CHECKING:
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.trajectory.batch import TokenBatch

# Shares and numbers of terms of configs/quickstart.yaml.
_TERMS = ((0.55, 4, 6), (0.30, 7, 9), (0.12, 10, 12), (0.03, 15, 18))
_DIRECT_SHARE = 0.6
_LEAST_GAIN = 0.1  # of accuracy; the quickstart gains 0.2
# As in trainer.py: far above rounding, far below what a wrong weight gives.
_LOGPROB_BOUND = 0.03

_Problem = tuple[str, str, str]


@dataclass(frozen=True)
class Sizes:
    """Those of the quickstart by default."""

    sft_steps: int = 470
    rl_steps: int = 18
    evaluated: int = 256
    groups: int = 32
    group_size: int = 8
    max_new_tokens: int = 192

    @classmethod
    def of(cls, stage: Stage) -> Sizes:
        return cls(3, 2, 4, 2, 2, 12) if stage.rehearsal else cls()


def problem(rng: random.Random) -> _Problem:
    """Return a sum such as `4-1+2=`, its result, and all steps written out: `4-1=3;3+2=5#5`."""
    ((_, low, high),) = rng.choices(_TERMS, [share for share, _, _ in _TERMS])
    numbers = [rng.randint(1, 9)]
    numbers += [rng.choice((1, -1)) * rng.randint(1, 9) for _ in range(rng.randint(low, high) - 1)]
    totals = list(itertools.accumulate(numbers))
    steps = [
        f"{before}{number:+d}={after}"
        for before, number, after in zip(totals, numbers[1:], totals[1:], strict=False)
    ]
    expression = str(numbers[0]) + "".join(f"{number:+d}" for number in numbers[1:])
    return f"{expression}=", str(totals[-1]), f"{';'.join(steps)}#{totals[-1]}"


class Generator:
    """The generator's process; `ask` may be called only after the answer before was `read`."""

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_check.generator"]
        self._process = subprocess.Popen(
            [*command, str(model), device, dtype],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CheckFailed(f"the generator ended with code {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def learning(stage: Stage) -> Findings:
    """Fine-tune, then RL; held-out greedy accuracy and mean reward before and after."""
    from megatron_async.models.save import save_hf
    from megatron_async.models.tiny_model import build_tiny_model, character_tokenizer
    from megatron_async.tasks.base import WorkedExample
    from megatron_async.train_loop.sft_rank import example_batch

    sizes = Sizes.of(stage)
    dtype = "float32" if stage.rehearsal else "bfloat16"
    tokenizer = character_tokenizer()
    rng = random.Random(1)
    initial, tuned = stage.scratch / "initial", stage.scratch / "tuned"
    build_tiny_model(initial, seed=1)

    def example() -> WorkedExample:
        question, result, steps = problem(rng)
        text = f"#{result}" if rng.random() < _DIRECT_SHARE else steps
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        return WorkedExample(np.array(tokenizer.encode(question)), np.array(ids))

    muon = {"name": "muon", "schedule": "cosine"}
    sft_optimizer = {**muon, "lr": 5e-3, "min_lr": 1e-4, "warmup_steps": 30}
    began = time.monotonic()
    model = {"dtype": dtype}
    with trainer_on(
        initial, model=model, optimizer=sft_optimizer, steps=sizes.sft_steps
    ) as trainer:
        for step in range(sizes.sft_steps):
            trainer.train_sft(example_batch([example() for _ in range(64)], step))
        save_hf(trainer.model, tuned, str(initial))
    figures: dict[str, Any] = {"sft_seconds": time.monotonic() - began}
    rl = {
        "model": model,
        "optimizer": {**muon, "muon_momentum": 0.8, "lr": 6e-4, "warmup_steps": 2},
        "algorithm": {"recipe": "copris"},
        "schedule": {"groups_per_batch": sizes.groups, "group_size": sizes.group_size},
        "steps": sizes.rl_steps,
    }
    generator = Generator(tuned, stage.device, dtype)
    try:
        with trainer_on(tuned, **rl) as trainer:
            loop = _Loop(trainer, generator, tokenizer, rng, sizes)
            heldout = [problem(random.Random(f"held out {n}")) for n in range(sizes.evaluated)]
            before = loop.accuracy(heldout)
            began = time.monotonic()
            for _ in range(sizes.rl_steps):
                loop.step()
            figures["rl_seconds"] = time.monotonic() - began
            after = loop.accuracy(heldout)
            difference = loop.logprob_difference()
    finally:
        generator.close()
    figures |= {
        "accuracy_before": before,
        "accuracy_after": after,
        "mean_rewards": [round(reward, 3) for reward in loop.rewards],
        "mean_logprob_difference": difference,
    }
    if not difference <= _LOGPROB_BOUND:
        raise CheckFailed(f"the generator does not have the trainer's weights: {figures}")
    if not stage.rehearsal and not after >= before + _LEAST_GAIN:
        raise CheckFailed(f"accuracy went from {before:.3f} to {after:.3f}: {figures}")
    return Findings(figures)


class _Loop:
    """RL in which the generator samples one batch ahead of the trainer."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        generator: Generator,
        tokenizer: Any,
        rng: random.Random,
        sizes: Sizes,
    ) -> None:
        self._trainer, self._generator = trainer, generator
        self._tokenizer, self._rng, self._sizes = tokenizer, rng, sizes
        self._loaded = trainer.step
        self.rewards: list[float] = []
        self._next = self._sample()

    def _ask(self, problems: Sequence[_Problem], *, greedy: bool) -> None:
        prompts = [self._tokenizer.encode(question) for question, _, _ in problems]
        longest = self._sizes.max_new_tokens
        self._generator.ask(prompts=prompts, max_new_tokens=longest, greedy=greedy)

    def _problems(self) -> list[_Problem]:
        groups = [problem(self._rng) for _ in range(self._sizes.groups)]
        return [one for one in groups for _ in range(self._sizes.group_size)]

    def _sample(self) -> TokenBatch:
        problems = self._problems()
        self._ask(problems, greedy=False)
        return self._pack(problems, self._generator.read())

    def step(self) -> None:
        """Train on the waiting batch while the generator samples the next one, then publish."""
        batch, problems = self._next, self._problems()
        self._ask(problems, greedy=False)
        report = self._trainer.train_batch(batch)
        if report.skipped:
            raise CheckFailed(f"update {report.step} was skipped: {report.skip_reason}")
        self._next = self._pack(problems, self._generator.read())
        self.rewards.append(float(batch.rewards_S.mean()))
        self._publish()

    def _publish(self) -> None:
        from megatron_async.models.export import stage_tensors
        from megatron_async.weight_sync.transports.tensor import separate, serialise

        architecture = self._trainer.model[0].architecture
        tensors = list(stage_tensors(self._trainer.model, architecture))
        bucket = separate(tensors, by_value=False)  # alive until the generator has copied it
        self._generator.ask(load=serialise(bucket))
        self._generator.read()
        self._loaded = self._trainer.step

    def _pack(self, problems: Sequence[_Problem], responses: Any) -> TokenBatch:
        """Score the responses and pack them as a run does."""
        version, size = PolicyVersion(0, self._loaded), self._sizes.group_size
        trajectories = []
        for number, ((question, result, _), (ids, logprobs)) in enumerate(
            zip(problems, responses, strict=True)
        ):
            ended = ids[-1] == self._tokenizer.eos_token_id
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            trajectories.append(
                Trajectory(
                    trajectory_id=number,
                    group_id=number // size,
                    prompt=Prompt(np.array(self._tokenizer.encode(question), np.int32), "sums"),
                    state=TrajectoryState.SCORED,
                    segments=(
                        Segment(np.array(ids, np.int32), np.array(logprobs, np.float32), version),
                    ),
                    finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                    reward=float(final_answer(text, "#") == result),
                )
            )
        groups = [
            Group(first.group_id, first.prompt, tuple(trajectories[at : at + size]))
            for at, first in list(enumerate(trajectories))[::size]
        ]
        return pack_groups(groups, step=self._trainer.step, lineage=0, branch_points={})

    def accuracy(self, problems: Sequence[_Problem]) -> float:
        """Share of greedy answers that are right. The generator must be idle."""
        self._ask(problems, greedy=True)
        texts = [
            self._tokenizer.decode(ids, skip_special_tokens=True)
            for ids, _ in self._generator.read()
        ]
        right = [
            final_answer(text, "#") == result
            for text, (_, result, _) in zip(texts, problems, strict=True)
        ]
        return sum(right) / len(right)

    def logprob_difference(self) -> float:
        """Sample with the loaded weights; mean |log-prob - the trainer's|, over sampled tokens."""
        batch = self._sample()
        trained_T = batch.loss_mask_T != 0
        ours_T = self._trainer.compute_logprobs(batch)
        return float(np.abs(ours_T - batch.rollout_logprobs_T)[trained_T].mean())

"""Trains with TRL for `benchmarks.versus_trl`, in TRL's environment: `... versus_trl_worker JOB`.

From megatron_async, it imports only the scorer and the settings of the task. Responses are
generated with `generate` of transformers, which GRPOTrainer uses if vLLM is not installed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_async.config.rollout import TaskConfig
from megatron_async.tasks.procedural import ProceduralScorer

_EVALUATED_AT_ONCE = 128


class Measurement(TrainerCallback):
    """Callback that evaluates, and measures the seconds of steps without evaluations."""

    def __init__(self, job: dict[str, Any], scorer: ProceduralScorer, tokenizer: Any) -> None:
        self.job, self.scorer, self.tokenizer = job, scorer, tokenizer
        self.model: Any = None
        self.startup_seconds: float | None = None
        self.step_seconds: list[float] = []
        self.tokens: list[int] = []
        self.rewards: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self._mark = 0.0

    def score(self, payloads: list[str], texts: list[str]) -> list[float]:
        """Return the rewards of `texts` from megatron_async's scorer."""
        pairs = zip(payloads, texts, strict=True)
        return [self.scorer.score(json.loads(p), t)[0] for p, t in pairs]

    def reward(
        self, completions: list[str], payload: list[str], completion_ids: Any, **_: Any
    ) -> list[float]:
        """Return the rewards of a batch, as TRL's reward function; record mean and tokens."""
        rewards = self.score(payload, completions)
        self.rewards.append(statistics.mean(rewards))
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return rewards

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.startup_seconds is None:
            self.startup_seconds = time.time() - self.job["began"]
            self.evaluate(0)
            self._mark = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_seconds.append(time.time() - self._mark)
        if state.global_step % self.job["config"]["eval"]["every_steps"] == 0:
            self.evaluate(state.global_step)
        self._mark = time.time()

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Record the greedy accuracy on the held-out problems at `step`."""
        self.model.eval()
        rewards: list[float] = []
        rows = self.job["heldout"]
        for start in range(0, len(rows), _EVALUATED_AT_ONCE):
            part = rows[start : start + _EVALUATED_AT_ONCE]
            inputs = self.tokenizer(
                [row["prompt"] for row in part],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            )
            out = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=self.job["config"]["sampling"]["max_new_tokens"],
            )
            texts = self.tokenizer.batch_decode(
                out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            rewards += self.score([json.dumps(row["payload"]) for row in part], texts)
        self.model.train()
        self.accuracies.append((step, statistics.mean(rewards)))


def main(file: Path) -> None:
    job = json.loads(file.read_text())
    config = job["config"]
    schedule, optimizer = config["schedule"], config["optimizer"]
    loss = config["algorithm"]["loss"]
    path = config["model"]["path"]
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    measured = Measurement(job, ProceduralScorer(TaskConfig(**config["task"])), tokenizer)
    rows = [{"prompt": r["prompt"], "payload": json.dumps(r["payload"])} for r in job["train"]]
    responses = schedule["groups_per_batch"] * schedule["group_size"]
    arguments = GRPOConfig(
        output_dir=job["work"],
        use_cpu=True,
        bf16=False,
        seed=config["seed"],
        max_steps=config["steps"],
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=responses // job["microbatch"],
        num_generations=schedule["group_size"],
        max_completion_length=config["sampling"]["max_new_tokens"],
        temperature=config["sampling"]["temperature"],
        beta=0.0,
        epsilon=loss["clip_low"],
        epsilon_high=loss["clip_high"],
        loss_type="dapo",  # mean over all tokens, as `token_mean` of megatron_async
        scale_rewards="group",
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer["warmup_steps"],
        weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        max_grad_norm=optimizer["clip_grad"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=10_000,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=measured.reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[measured],
    )
    measured.model = trainer.model
    trainer.train()
    found = {
        "version": f"trl {trl.__version__}, transformers {transformers.__version__}",
        "startup_seconds": measured.startup_seconds,
        "step_seconds": measured.step_seconds,
        "tokens": measured.tokens,
        "rewards": measured.rewards,
        "accuracies": measured.accuracies,
    }
    Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One system of `benchmarks.trainer_alone`: `... SYSTEM JOB.json`, in that system's environment."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

Found = dict[str, list[float]]
Example = list[list[int]]


def ours(job: dict[str, Any]) -> Found:
    """The trainer of this system, one rank."""
    import numpy as np

    from megatron_async.config import build_config
    from megatron_async.tasks.base import WorkedExample
    from megatron_async.train_loop.sft_rank import example_batch
    from megatron_async.trainer.parallel import parallel_session
    from megatron_async.trainer.step import PolicyTrainer

    config = build_config(job["config"])
    seconds, losses = [], []
    with parallel_session(config.parallel, config.trainer, config.seed):
        trainer = PolicyTrainer(config, purpose="sft")
        for step, batch in enumerate(job["batches"]):
            examples = [
                WorkedExample(np.array(prompt, np.int32), np.array(response, np.int32))
                for prompt, response in batch
            ]
            began = time.perf_counter()
            losses.append(trainer.train_sft(example_batch(examples, step)).loss)
            seconds.append(time.perf_counter() - began)
    return {"step_seconds": seconds, "losses": losses}


def padded(batch: list[Example]) -> dict[str, torch.Tensor]:
    """A batch as transformers takes it; labels of -100 are not learned."""
    rows = [torch.tensor(prompt + response) for prompt, response in batch]
    labels = [torch.tensor([-100] * len(prompt) + response) for prompt, response in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def optimizer_settings(job: dict[str, Any]) -> dict[str, Any]:
    settings = job["config"]["sft"]["optimizer"]
    return {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}


def warm_up(job: dict[str, Any], update: int) -> float:
    """The share of the learning rate: this system's warm-up."""
    steps = job["config"]["sft"]["optimizer"]["warmup_steps"]
    return min(1.0, (update + 1) / (steps + 1))


def plain(job: dict[str, Any]) -> Found:
    """transformers' model, torch's AdamW, and nothing else."""
    from transformers import AutoModelForCausalLM

    path = job["config"]["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), **optimizer_settings(job))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: warm_up(job, update))
    seconds, losses = [], []
    for batch in job["batches"]:
        began = time.perf_counter()
        loss = model(**padded(batch), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return {"step_seconds": seconds, "losses": losses}


def with_trainer(job: dict[str, Any]) -> Found:
    """transformers' Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    seconds: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            seconds.append(now - self.began)
            self.began = now

        def on_log(self, _arguments: Any, _state: Any, _control: Any, **more: Any) -> None:
            if "loss" in more["logs"]:
                losses.append(float(more["logs"]["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    path = job["config"]["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **optimizer_settings(job))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: warm_up(job, update))
    flat = [example for batch in job["batches"] for example in batch]
    InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=job["work"],
            use_cpu=True,
            max_steps=len(job["batches"]),
            per_device_train_batch_size=len(job["batches"][0]),
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=flat,
        data_collator=padded,
        optimizers=(optimizer, schedule),
        callbacks=[Clock()],
    ).train()
    return {"step_seconds": seconds, "losses": losses}


SYSTEMS = {"megatron_async": ours, "transformers Trainer": with_trainer, "plain torch loop": plain}


def main(system: str, file: Path) -> None:
    job = json.loads(file.read_text())
    found = SYSTEMS[system](job)
    found["tokens"] = [sum(len(p) + len(r) for p, r in batch) for batch in job["batches"]]
    Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

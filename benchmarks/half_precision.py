"""Measures ratios of on-policy tokens in half precision, with correct weights and with a defect.

    python -m benchmarks.half_precision --model runs/quickstart/sft --out FILE

The error of a token is the absolute difference between its log-prob on the engine and on the
trainer. The check after each weight update (docs/weights.md, Ratios) learns the usual mean error of
a half-precision run. It stops the run if the mean error exceeds ten times the usual error; this
limit is at least 0.2 and at most 1.0. The engine is in bfloat16, and the trainer in float32 or
bfloat16. In the control, both are in float32. The program prints two tables:

- Usual errors: the mean and the largest error in the checks of a short training.
- Defects: the errors if the engine's weights differ from the trainer's, or if the log-probs are
  computed at another temperature. The table shows whether the check stops the run, before it has
  learned a usual error and after it has learned the usual error of the training.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.papers.training import Training, configure, engine, train, training_parser
from benchmarks.reporting import publish, table
from megatron_async.config import RunConfig
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.models.save import COPIED_SUFFIXES
from megatron_async.rollout import probe
from megatron_async.tasks import build_task
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.verify import BASELINE_UPDATES, RatioCheck, RatioError

PRECISIONS = ("float32-float32", "bfloat16-float32", "bfloat16-bfloat16")
"""Pairs of the engine's dtype and the trainer's dtype."""
ON_POLICY, OTHER_TEMPERATURE = "none", "log-probs at temperature 0.7 for 1"
SAMPLING_SECONDS = 300.0


def precision(engine: str, trainer: str) -> dict[str, Any]:
    """Return the settings of a pair of dtypes."""
    return {"engines": {"dtype": engine}, "model": {"dtype": trainer}}


def rule_of(run: Training) -> RatioCheck:
    """Return a rule that has learned the usual error from the run's checks."""
    rule = RatioCheck(tolerance=None, temperature=1.0)
    for mean in run.series("weights/probe_mean_error")[:BASELINE_UPDATES]:
        rule.learn([RatioError(mean, mean)])
    return rule


def changed(model: Path, folder: Path, change: Mapping[str, torch.Tensor]) -> Path:
    """Copy a model directory to `folder` and replace the tensors in `change`; return `folder`."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix in COPIED_SUFFIXES:
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(
        {**load_file(model / "model.safetensors"), **change},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def defects(model: Path, root: Path) -> dict[str, Path]:
    """Create a model directory for each defect of the engine's weights; return them by defect.

    The trainer always has the weights of `model`.
    """
    tensors = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    layer = next(n for n in tensors if n.endswith("layers.1.self_attn.q_proj.weight"))
    norm = next(n for n in tensors if n.endswith("model.norm.weight"))

    def noise(share: float) -> dict[str, torch.Tensor]:
        return {
            name: tensor + share * tensor.float().std().nan_to_num(0.0) * torch.randn_like(tensor)
            for name, tensor in tensors.items()
            if tensor.dim() == 2
        }

    def shuffled(name: str) -> dict[str, torch.Tensor]:
        return {name: tensors[name][torch.randperm(len(tensors[name]))]}

    return {
        ON_POLICY: model,
        **{
            f"noise of {share:g} of each matrix's deviation": changed(
                model, root / f"noise-{share}", noise(share)
            )
            for share in (0.01, 0.1, 0.3)
        },
        "one query matrix with its rows in another order": changed(
            model, root / "shuffled", shuffled(layer)
        ),
        "final norm's weights 1": changed(
            model, root / "norm", {norm: torch.ones_like(tensors[norm])}
        ),
        "all weights of another, random model": changed(
            model, root / "random", {n: torch.randn_like(t) * 0.05 for n, t in tensors.items()}
        ),
    }


async def sampled(
    config: RunConfig, url: str, models: Mapping[str, Path], prompts: int
) -> dict[str, list[probe.ProbeSample]]:
    """Sample tokens from the engine with the weights of each model, as a check does."""
    task = build_task(config.task, config.model.path)
    ids = probe.probe_prompts([p.token_ids for p in task.train_prompts(0, prompts)])
    client = await SGLangClient.connect("engine", url, config.engines)
    found = {}
    try:
        for number, (defect, path) in enumerate(models.items()):
            version = PolicyVersion(900, number)
            await client.load_from_disk(path, version)
            found[defect] = await probe.sample(
                client, ids, config.sampling, version, 16 * prompts, SAMPLING_SECONDS
            )
    finally:
        await client.close()
    return found


def errors(
    config: RunConfig, samples: Mapping[str, list[probe.ProbeSample]]
) -> dict[str, RatioError]:
    """Return the error of the samples of each defect, relative to the trainer's log-probs."""
    found = {}
    with parallel_session(config.parallel, config.trainer, config.seed):
        trainer = PolicyTrainer(config)
        for defect, of in samples.items():
            batch = probe.packed(of, config.sampling.temperature)
            found[defect] = probe.errors(of, trainer.compute_logprobs(batch))["engine"]
            if defect == ON_POLICY:
                cooler = replace(batch, temperature=0.7)
                logprobs_T = trainer.compute_logprobs(cooler)
                found[OTHER_TEMPERATURE] = probe.errors(of, logprobs_T)["engine"]
    return found


def usual_row(pair: Sequence[str], run: Training) -> list[object]:
    """Return the row of one training in the table of usual errors."""
    means, rule = run.series("weights/probe_mean_error"), rule_of(run)
    exact = set(pair) == {"float32"}
    errors = (
        min(means),
        statistics.median(means),
        max(means),
        run.largest("weights/probe_max_error"),
    )
    baseline = "" if exact or rule.baseline is None else f"{rule.baseline:.1e}"
    drifts = run.series("weights/probe_drift")
    return [
        *pair,
        len(means),
        *(f"{error:.1e}" for error in errors),
        baseline,
        f"{rule.limit(exact=exact):.1e}",
        f"{max(drifts):.2f}" if drifts else "",
    ]


def defect_rows(
    pair: Sequence[str], run: Training, found: Mapping[str, RatioError]
) -> list[list[object]]:
    """Return a row for each defect: its errors, and whether a check stops the run."""
    exact = set(pair) == {"float32"}
    rows: list[list[object]] = []
    for defect, error in found.items():
        rules = (RatioCheck(tolerance=None, temperature=1.0), rule_of(run))
        words = ["passes" if rule.passes(error, exact=exact) else "stops" for rule in rules]
        rows.append([*pair, defect, f"{error.mean:.1e}", f"{error.largest:.1e}", *words])
    return rows


USUAL_HEADER = (
    "engine | trainer | checks | mean error: least | median | most | largest of a token | baseline "
    "| limit then | largest drift"
)
DEFECT_HEADER = (
    "engine | trainer | defect | mean error | largest of a token | before a baseline | with it"
)


def main() -> None:
    parser = training_parser(__doc__, "../half_precision", steps=12)
    parser.add_argument(
        "--prompts", type=int, default=16, help="prompts for each defect, 16 tokens each"
    )
    parser.add_argument(
        "--precisions", nargs="+", default=PRECISIONS, help="pairs of dtypes, as ENGINE-TRAINER"
    )
    options = parser.parse_args()
    usual_rows, rows = [], []
    with tempfile.TemporaryDirectory(prefix="half-precision-") as scratch:
        root = Path(scratch)
        models = defects(options.model, root)
        chosen = [pair.split("-") for pair in options.precisions]
        for dtype in sorted({of_engine for of_engine, _ in chosen}):
            trainers = [trainer for of_engine, trainer in chosen if of_engine == dtype]
            settings = configure("e", precision(dtype, "float32"), options.model, root, options)
            with engine(settings, root / f"{dtype}.log") as url:
                samples = asyncio.run(sampled(settings, url, models, options.prompts))
                for trainer in trainers:
                    pair = (dtype, trainer)
                    config = configure(
                        "-".join(pair), precision(*pair), options.model, root, options
                    )
                    run = train(config, url)
                    usual_rows.append(usual_row(pair, run))
                    rows += defect_rows(pair, run, errors(config, samples))
                    print(usual_rows[-1], *rows, sep="\n", file=sys.stderr, flush=True)
    text = "\n\n".join([table(USUAL_HEADER, usual_rows), table(DEFECT_HEADER, rows)])
    publish("benchmarks.half_precision", "Ratios in half precision", text, options.out)


if __name__ == "__main__":
    main()

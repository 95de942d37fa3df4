"""Prints how many graphs `torch.compile` makes of Megatron's helpers during steps with many
lengths.

    python -m tests.trainer.recompiles CASE LENGTHS

The helpers are fused as on a GPU, but not compiled: each graph is counted and runs uncompiled. The
output is a JSON list that contains, for each step, the number of graphs of each function so far.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

graphs: Counter[str] = Counter()
compile_function = torch.compile


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch.compile(function)` by a version that counts the graphs of `function`."""

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs[function.__qualname__] += 1
        return graph.forward

    compiled: Callable[..., Any] = compile_function(function, backend=backend)
    return compiled


def main(case: str, lengths: int) -> None:
    with mock.patch.object(torch, "compile", counted):
        import megatron.core.transformer.transformer_layer  # noqa: F401

        from megatron_async.engines.nodes import free_port
        from megatron_async.trainer import hf_config
        from tests.hf_models import save_hf_model
        from tests.trainer.cases import ragged_batch, settings, trainer_session
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_RANK="0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        save_hf_model(case, Path(folder), seed=0)
        trainer_settings = {"recompute": "all", "microbatch_tokens": 10_000}
        config = settings(
            Path(folder), {"model": {"dtype": "float32"}, "trainer": trainer_settings}
        )
        found = []
        with (
            mock.patch.object(hf_config, "has_cuda", lambda: True),
            trainer_session(config) as trainer,
        ):
            torch.compiler.set_stance("default")  # The trainer disables compilation on a CPU.
            for number in range(lengths):
                batch = ragged_batch(number, groups=1 + number, group_size=2)
                trainer.train_batch(batch)
                trainer.compute_logprobs(batch)
                found.append(dict(graphs))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

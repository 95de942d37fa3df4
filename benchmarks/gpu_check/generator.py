"""Process that generates responses with transformers; it is the engine of the check `learning`.

It reads one JSON object per line from stdin and replies to each with one line on stdout:

    {"load": PAYLOAD}                    load weights from CUDA IPC handles (`ipc_child.unpickle`)
    {"prompts": [[id, ...], ...], "max_new_tokens": n, "greedy": bool}
                                         sample a response to each prompt, at temperature 1

Invariants
- Log-probs are computed from the sampling distribution, in float32.
- The reply to `load` is written after the weights are copied, so the sender may then free its
  tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.ipc_child import unpickle


@torch.no_grad()
def generate(
    model: Any, prompts: list[list[int]], *, max_new_tokens: int, greedy: bool, eos: int
) -> list[tuple[list[int], list[float]]]:
    """Return the response token IDs and their log-probs for each prompt; `eos` ends a response."""
    longest = max(map(len, prompts))
    padded_BL = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask_BL = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    found = model.generate(
        input_ids=padded_BL,
        attention_mask=mask_BL.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=eos,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids_BT = found.sequences[:, longest:]
    logprobs_BTV = torch.stack(found.logits, 1).float().log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(2, ids_BT[:, :, None])[:, :, 0]
    # All tokens after the first `eos` are padding.
    ended_BT = (ids_BT == eos).int().cumsum(1) - (ids_BT == eos).int()
    lengths_B = (ended_BT == 0).sum(1).tolist()
    return [
        (row[:length], values[:length])
        for row, values, length in zip(
            ids_BT.tolist(), logprobs_BT.tolist(), lengths_B, strict=True
        )
    ]


def load(model: Any, payload: str) -> None:
    """Copy the tensors of `payload` into the model."""
    named, _ = unpickle(payload)
    # A tied head is not sent, so missing names are allowed.
    _, unknown = model.load_state_dict(dict(named), strict=False)
    assert not unknown, unknown
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main(directory: str, device: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        Path(directory), dtype=getattr(torch, dtype), local_files_only=True
    ).to(device)
    for line in sys.stdin:
        request = json.loads(line)
        answer = None
        if "load" in request:
            load(model, request["load"])
        else:
            answer = generate(
                model,
                request["prompts"],
                max_new_tokens=request["max_new_tokens"],
                greedy=request["greedy"],
                eos=model.config.eos_token_id,
            )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

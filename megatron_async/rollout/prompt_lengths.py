"""Provides the limit on the tokens of a prompt and its response on the engines of a run."""

from megatron_async.config import RunConfig
from megatron_async.models.architecture import read_config_json, served_context


def max_sequence_tokens(config: RunConfig) -> int | None:
    """Return the maximum number of tokens of a prompt and its response together that the run's
    engines accept.

    None means that nothing limits them.
    """
    context = None
    if config.engines.kind != "simulated":
        context = served_context(read_config_json(config.model.path))
    return config.engines.max_sequence_tokens(context)

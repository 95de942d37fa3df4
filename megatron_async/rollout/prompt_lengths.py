"""The room for a prompt and its response on the engines of a run."""

from megatron_async.config import RunConfig
from megatron_async.models.architecture import read_config_json, served_context


def max_sequence_tokens(config: RunConfig) -> int | None:
    """Tokens of both together; None where nothing limits them."""
    context = None
    if config.engines.kind != "simulated":
        context = served_context(read_config_json(config.model.path))
    return config.engines.max_sequence_tokens(context)

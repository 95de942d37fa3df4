"""Typed settings of a run, their defaults by recipe and preset, and how they are loaded."""

from megatron_async.config.load import build_config, dump, load_config
from megatron_async.config.run import RunConfig

__all__ = ["RunConfig", "build_config", "dump", "load_config"]

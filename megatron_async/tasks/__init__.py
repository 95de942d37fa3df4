"""Prompt sources, worked answers and verifiers."""

from megatron_async.tasks.build import build_scorer, build_source, build_task

__all__ = ["build_scorer", "build_source", "build_task"]

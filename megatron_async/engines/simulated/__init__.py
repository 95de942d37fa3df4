"""Provides an engine without a model (`engines.kind: simulated`), for tests and fault programs.

- engine: deterministic tokens at a modeled speed. A token depends on weights, prompt and position.
- server: the same engine behind SGLang's HTTP endpoints, as a process that can be killed.
"""

"""Provides an engine without a model (`engines.kind: simulated`), for tests, and for programs that
kill processes of a run to test its recovery.

- engine: generates deterministic tokens at a speed that settings describe. A token depends on the
  seed, the token before it and its position, not on the weights.
- server: the same engine behind SGLang's HTTP endpoints, as a process that can be killed.
"""

"""An engine without a model (`engines.kind: simulated`), for tests and fault programmes.

- engine: deterministic tokens at a modelled speed. A token depends on weights, prompt and position.
- server: the same behind SGLang's endpoints, as a process that can be killed.
"""

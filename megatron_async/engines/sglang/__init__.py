"""Runs SGLang servers on GPU and CPU, and calls them over SGLang's own HTTP API.

- client: a server as an `EngineClient`.
- stream: converts SGLang's reports to token chunks, without I/O.
- process: starts, watches and ends one server process; builds its command line.
- server: SGLang's server with the additions of the modules below. Most are hooks: functions that
  run before, after or instead of a function of SGLang, through SGLang's own hook registry.
- hooks: registers hooks, and has the hooks that make the start faster and aborts repeatable.
- queue: lets urgent requests run first.
- burst: passes requests that were sent together to the scheduler in few messages.
- in_flight: hooks for weights that change while requests run and keep their KV cache.
- prefix: separates cached prompt prefixes of different policy versions.
- weight_updater: receives the next bucket of weights (tensors that are sent together) while one is
  loaded.
- receiver: an HTTP endpoint that builds the complete weights of a published version on the
  engine's machine, from its differences to the previous version or from a whole copy.
- models: SGLang's classes for the supported model families, found without importing all others.
- cpu, attention, sampling: replacements that SGLang needs to run on a CPU without `sgl-kernel`.
"""

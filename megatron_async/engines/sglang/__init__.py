"""Runs SGLang servers on GPU and CPU, and calls them over SGLang's own HTTP API.

- client: a server as an `EngineClient`.
- stream: converts SGLang's reports to token chunks; pure.
- process: starts, watches and ends one server process; builds its command line.
- server: SGLang's server with the hooks below, which are registered in SGLang's own registry.
- hooks: registers hooks; makes starts faster and aborts repeatable.
- queue: lets urgent requests run first.
- in_flight: handles weights that change under requests that keep their KV cache.
- prefix: separates cached prompt prefixes of different policy versions.
- weight_updater: receives one bucket ahead.
- receiver: an endpoint that makes published weights complete on the engine's machine.
- models: SGLang's classes for the supported model families, found without importing all others.
- cpu, attention, sampling: what SGLang needs to run on a CPU without `sgl-kernel`.
"""

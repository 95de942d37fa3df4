"""SGLang servers, on GPU and CPU, over SGLang's own HTTP API.

- client: a server as an `EngineClient`. stream: its reports as token chunks; pure.
- process: starts, watches and ends one server process; the server's command line.
- server: SGLang's server with the hooks below, each through SGLang's registry.
- hooks: how they are put in; a sooner start, aborts that can be repeated. queue: urgent first.
- in_flight: weights that change under requests that keep their KV cache.
- prefix: keeps prompt prefixes of one policy version from requests of another.
- weight_updater: receives one bucket ahead. receiver: makes published weights whole here.
- models: SGLang's models of our families, found without importing all others.
- cpu, attention, sampling: what SGLang needs on a CPU without `sgl-kernel`.
"""

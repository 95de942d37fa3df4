"""Inference engines: the client protocol, and the host that owns a server process.

- interface: the protocol `EngineClient` and its messages; errors name the engine; a client that
  hands every call on, the base of those that add something.
- stream_validation: what an engine may send, checked where its answers are read.
- host: one for each engine, and the launcher through which the fleet uses them.
- relay, token_report: streams read where the server is, handed on in few messages.
- nodes: addresses of nodes; what trainer ranks, engines and managers must have alike, NCCL's
  settings first.
- sglang, simulated: the two kinds of engine.
"""

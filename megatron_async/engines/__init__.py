"""Provides inference engines: the client interface, and the hosts that own their server processes.

- interface: the protocol `EngineClient`, its messages and errors, and a base class for clients that
  forward calls to another client.
- stream_validation: checks every chunk and load report that an engine sends.
- host: one process for each engine that starts and stops its server, and the launcher that the
  fleet uses.
- relay, token_report: streams are read next to the server, and forwarded in few messages.
- nodes: addresses of nodes, and the communication settings (NCCL's first of all) that trainer
  ranks, engines and managers must share.
- sglang, simulated: the two kinds of engine.
"""

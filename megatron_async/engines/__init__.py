"""Provides inference engines: the client interface, and the hosts that own their server processes.

- interface: the protocol `EngineClient`, its messages and errors, and a base class for clients that
  forward calls to another client.
- stream_validation: checks every chunk and load report that an engine sends.
- host: a host process for each engine, which starts and stops the engine's server, and the launcher
  that starts host processes.
- relay, token_report: the host process reads the token streams of its server and forwards the
  tokens of all streams to the rollout manager together, in few messages.
- nodes: addresses of nodes, and the communication settings (above all of NCCL) that trainer ranks,
  engines and managers must have in common.
- sglang, simulated: the two kinds of engine: SGLang servers, and engines without a model for tests.
"""

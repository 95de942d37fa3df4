"""Describes model architectures: names, shards, shapes and layouts. Builds no Megatron modules.

- architecture: the only reader of `config.json`; every number is checked. Also computes the context
  with which an engine serves a model.
- families: one file for each model family, discovered in the folder or named in `model.family`.
- decoder: the shard rules that families share.
- shards: split and merge of parameters; each undoes the other.
- parameters: each parameter of a model with its rule, global layer and expert.
- model_files: the safetensors of a Hugging Face directory, and whether they fit `config.json`.
- load, save, export: Hugging Face weights in and out, slice by slice; a saved directory appears
  completely or not at all.
- layout: whether a model can be laid out over the ranks as configured.
- shape: sizes that the cost models need.
- tiny_model: the quickstart's tokenizer and model.
"""

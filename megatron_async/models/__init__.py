"""Pure knowledge of architectures: names, shards, shapes, layouts. No Megatron modules.

- architecture: the one reader of `config.json`; every number is checked. Also the context
  of a model where it is served.
- families: one file for each model family, found by being there, or named in `model.family`.
- decoder: the shard rules that families share. shards: split and merge; one undoes the other.
- parameters: each parameter of a model, with its rule, global layer and expert.
- model_files: the safetensors of a Hugging Face directory, and whether `config.json` fits them.
- load, save, export: Hugging Face weights in and out, slice by slice; a save is whole or not there.
- layout: whether a model can be laid out over the ranks as set.
- shape: sizes that the cost models need.
- tiny_model: the quickstart's tokenizer and model.
"""

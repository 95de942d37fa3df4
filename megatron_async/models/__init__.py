"""Describes model architectures: names and shapes of parameters, and how they are divided over
ranks. No Megatron modules are built here.

- architecture: the only reader of `config.json`; every number is checked. It also computes the
  context length with which an engine serves a model.
- families: one file for each model family that the trainer supports. `model.family` can name a
  family of the user's own.
- decoder: the shard rules that families share.
- shards: rules by which a Megatron parameter is split into shards, and made from Hugging Face
  tensors and converted back.
- parameters: finds, for each parameter on a rank, its rule and the numbers of its layer and expert
  in the whole model.
- model_files: reads the safetensors files of a Hugging Face directory, and checks that they fit
  `config.json`.
- load, export, save: load Hugging Face weights into the model slice by slice; convert the model
  back to Hugging Face tensors; write them as a directory that appears completely or not at all.
- layout: checks that a model can be divided over the ranks as configured.
- shape: parameter counts, bytes and FLOPs, from which costs are estimated.
- tiny_model: builds the model and tokenizer of the quickstart.
"""

"""Pure knowledge of model architectures: names, shards, shapes, layouts; no Megatron modules."""

"""Parameter names and shards, Megatron to Hugging Face and back, and weight exchange."""

"""GGUF files: parsed once per load, for the config, the tokenizer and the weights."""

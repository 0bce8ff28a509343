"""Where weights come from: the hub, safetensors and GGUF files."""

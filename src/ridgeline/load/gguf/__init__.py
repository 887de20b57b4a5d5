"""Read and write GGUF files, the format of llama.cpp: metadata, tensors, configuration and tokenizer."""

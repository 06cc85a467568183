"""Export of trained models: files, the Hugging Face hub, NNX."""

"""Trained models for other programs: files, the Hugging Face hub, NNX."""

"""Weights in the layout of Hugging Face's transformers, where it has the same architecture."""

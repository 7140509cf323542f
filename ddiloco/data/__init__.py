"""Text and images for training: sources, tokenizers, packing, and batches whose state resumes exactly."""

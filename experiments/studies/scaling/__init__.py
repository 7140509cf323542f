"""Scaling laws of training with M learners: loss and good hyperparameters by size, tokens and M."""

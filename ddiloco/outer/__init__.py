"""The mathematics between learners and the global model: fragments, weights, merging, outer optimizer."""

"""The workers that every driver shares, learner, syncer and evaluator, and the parts they work with."""

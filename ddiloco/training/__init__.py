"""One learner's training: mesh, parameters, inner optimizer, step, evaluation and sampling."""

"""Studies, a file each: what `--config` of `experiments.sweep`, `tune` and `compare` takes."""

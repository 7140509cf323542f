"""Tokenizes a run's text in advance: `python -m experiments.tokenize --config=FILE --output=DIR`.

`--config.data.tokenized=DIR` then trains on it, with the same batches.
"""

from __future__ import annotations

import os

from absl import flags

from experiments.cli import program

_CONFIG = program.define_config("configs/dense.py")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to make; it must not be there yet.")
_THREADS = flags.DEFINE_integer("threads", os.cpu_count() or 1, "Threads, and files.", lower_bound=1)


def main(_) -> None:
    from ddiloco.data.settings import DataConfig
    from ddiloco.data.tokenized import write
    from ddiloco.data.tokenizers import make_tokenizer, without_end

    folder = program.writable_folder("output", program.required(_OUTPUT))
    data = _CONFIG.experiment().data
    if not isinstance(data, DataConfig):
        raise program.UsageError("config: trains on no text")
    with program.os_errors_as_usage("output", folder):
        tokenizer = make_tokenizer(data)
        for sentence in without_end(data, tokenizer):
            program.print_err(f"warning: {sentence}")
        write(data, tokenizer, folder, _THREADS.value, program.print_err)
    print(f"{folder}: to train on it, --config.data.tokenized={folder}")


if __name__ == "__main__":
    program.run(main)

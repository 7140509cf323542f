"""Fuzzes what reads bytes that another wrote: `python -m tests.fuzz [TARGET] [-max_total_time=SECONDS]`.

Without a target: all of tests/fuzz/targets.py in turn, which the first byte chooses. Other arguments are
libFuzzer's. Ends with 0 if nothing was found, and else names a file with the bytes. Without atheris the
bytes are mutated blindly (tests/fuzz/blind.py), and only -max_total_time means anything.
"""

import os
import pathlib
import sys
import tempfile

try:
    import atheris
except ImportError:
    from tests.fuzz import blind, seeds, targets

    atheris = None
else:
    with atheris.instrument_imports(include=["ddiloco"]):
        from tests.fuzz import targets


def main():
    names = [name for name in sys.argv[1:] if name in targets.TARGETS]
    chosen = names or list(targets.TARGETS)
    options = [argument for argument in sys.argv[1:] if argument not in names]
    if atheris is None:
        given = [option.partition("=")[2] for option in options if option.startswith("-max_total_time=")]
        code = blind.main(chosen, float(given[-1]) if given else 60.0)
        sys.stdout.flush()
        os._exit(code)  # as libFuzzer does: nobody waits for the threads of the servers

    def read(data):
        if data:
            targets.feed(chosen[data[0] % len(chosen)], data[1:])

    with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
        for n, name in enumerate(chosen):
            for m, seed in enumerate(seeds.of(name)):
                (pathlib.Path(corpus) / f"{name}-{m}").write_bytes(bytes([n]) + seed)
        # libFuzzer leaves by os._exit, so what is in the folder is for the system to clean up.
        atheris.Setup([sys.argv[0], "-rss_limit_mb=2048", "-malloc_limit_mb=256", *options, corpus], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

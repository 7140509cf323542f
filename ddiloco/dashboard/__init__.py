"""One view of a run's files, as a live page, a report, metrics and advice.

    files of the workdir -> RunFiles, RunState -> view -> advice
                                                   |--> sheet, *.html -> server (live), report
                                                   |--> exposition (Prometheus)

The run's files are the only source, so that the page of a run that is over is the same as while it went on.
"""

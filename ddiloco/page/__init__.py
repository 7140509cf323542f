"""A run as people look at it: its files in one view, and that as a live page, a report, metrics and advice.

    files of the workdir -> tail -> history -> view -> advice
                                                 |--> sheet, drawings, *.html -> server (live), report
                                                 |--> exposition (Prometheus)

Nothing here is told anything by the run but through its files, so that a page of a run that is over is the
same as that of one that goes on.
"""

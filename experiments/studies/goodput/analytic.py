"""Closed forms of goodput, for interruptions without memory (exponential times): the analytic simulator.

Symbols: lambda, a job's interruptions a second; d, the pause that one costs (detection, downscale, half a
step to do again); u, an upscale; W, the wait for one. While a job steps, slices return about as often as
they fail. An upscale comes only if no interruption comes within W of the first return, with q = exp(-lambda
W), for those are taken in by the pause of the interruption: q / (2 - q) upscales an interruption. So for an
elastic job

    1 / g - 1 = lambda (d + u q / (2 - q)),

and of its chips a share is away. A job without elasticity is a renewal process: with its whole pause R
(detection, restart, half a step) and the share s of spares, g = (1 - s) / (1 + lambda R).
"""

from __future__ import annotations

import math

from ddiloco.goodput.failures import FailureModel


def elastic_goodput(model: FailureModel, chips: float) -> float:
    """Goodput of an elastic job, as a share; of a system of M learners each alike: pass a learner's chips.

    Meant for jobs of many slices: that the last slice may be lost is not in it. Nor are chips' speeds.
    """
    rate, present = chips / model.mtbi_seconds, 1.0
    for _ in range(50):  # what is away fails no more, and how long it is away depends on the rate
        struck = rate * present
        none_comes = math.exp(-struck * model.upscale_wait_seconds)
        wait = (1.0 - none_comes) / struck  # for an upscale or an interruption, whichever is first
        away = model.return_seconds + wait
        present = 1.0 / (1.0 + model.chips_per_slice / model.mtbi_seconds * away)
    pause = model.detection_seconds + model.downscale_seconds + model.step_seconds / 2.0
    lost = struck * (pause + model.upscale_seconds * none_comes / (2.0 - none_comes))
    return present / (1.0 + lost)


def inelastic_goodput(model: FailureModel, chips: float) -> float:
    """Goodput of a job without elasticity, as a share, on this number of chips, spares included."""
    rate = (1.0 - model.spare_share) * chips / model.mtbi_seconds
    pause = model.detection_seconds + model.restart_seconds + model.step_seconds / 2.0
    return (1.0 - model.spare_share) / (1.0 + rate * pause)

"""--profile N: a trace of N steps, after the first two, which are slow."""

from typing import Any, Callable

import jax

from zigzag.core.parts import place
from zigzag.run.loop import Loop


def check(program: Any) -> None:
    """Accept any run."""


def watched(loop: Loop) -> Callable:
    """Return the step, which starts and stops the trace."""
    config, step = loop.program.config, loop.step
    folder = str(place(config.out or ".") / "profile")
    first, last = loop.began + 2, min(loop.began + 2 + config.profile, config.steps)

    def traced(state, batch):
        if loop.at == first < last:
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
        found = step(state, batch)
        if loop.at + 1 == last > first:
            jax.block_until_ready(found)
            jax.profiler.stop_trace()
            loop.reporter.line(f"a trace of {last - first} steps is in {folder}: open its "
                               f"perfetto_trace.json.gz in ui.perfetto.dev")
        return found

    return traced

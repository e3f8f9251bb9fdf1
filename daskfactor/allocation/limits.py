"""What particles cost, and when their estimates are to be believed."""

import warnings
from typing import TYPE_CHECKING

from daskfactor.allocation.batches import Journey
from daskfactor.allocation.moving import mover_bytes
from daskfactor.errors import OptionError, SamplingWarning

if TYPE_CHECKING:
    from daskfactor.allocation.smc import SMCResult

TRUSTED = 1.0
"""Standard deviation of the islands' log estimates up to which their mean is believed."""
LONG = 3600.0
"""Seconds beyond which a warning comes first."""
KEPT_BYTES = 2**32
"""Most that ``keep="particles"`` may take."""
ISLAND_BYTES = 2**30
"""Most that an island of particles that move may take."""


def needed_particles(spread: float, particles: int) -> float:
    """Particles on all islands for a spread of one nat, if the variance falls as 1 / P."""
    return particles * spread**2


def island_bytes(journey: Journey) -> int:
    """Memory of an island of particles that move."""
    each = mover_bytes(journey.placement) + 4 * journey.placement.tokens * journey.own
    return each * journey.particles


def estimated_seconds(journey: Journey, particles: int) -> float:
    """Rough time on one core: what a token costs a particle, in nanoseconds (measured)."""
    placement = journey.placement
    network = placement.network
    registers = len(network.alpha)
    each = 10 + 0.6 * network.states + 3 * registers
    if not network.simple:
        each = 20 + 1.5 * network.states * registers
    again = journey.moves * float(journey.edges[1:] @ journey.moved) / placement.tokens
    visits = 1.0 + 1.4 * again
    return 1e-9 * each * placement.tokens * particles * visits


def foretell(journey: Journey, islands: int) -> None:
    """Warn of islands that will take long."""
    particles = journey.particles * islands
    seconds = estimated_seconds(journey, particles)
    if seconds > LONG:
        share, more = LONG / seconds, ""
        if journey.moves:
            more = "moves=0 takes less and is less exact; "
        warnings.warn(
            f"{journey.placement.tokens} tokens times {particles} particles "
            f"take about {seconds / 3600:.1f} hours on one core, and more if particles have to be "
            f"added; {more}thin={share:.2g} would keep that share of the tokens and take an hour "
            "at most, but its evidence is that of the kept tokens alone",
            SamplingWarning,
            stacklevel=3,
        )


def check_memory(journey: Journey, count: int) -> None:
    """Refuse islands that take too much memory."""
    size = 4 * journey.cells * journey.particles * count
    if journey.keep and size > KEPT_BYTES:
        raise OptionError(
            f'keep="particles" would hold {size / 2**30:.1f} GiB of counts for {count} islands of '
            f"{journey.particles} particles, and {KEPT_BYTES / 2**30:.0f} GiB are allowed: "
            'use keep="means", or fewer particles'
        )
    size = island_bytes(journey)
    if journey.moves and size > ISLAND_BYTES:
        raise OptionError(
            f"{journey.particles} particles that move would hold {size / 2**30:.1f} GiB of counts, "
            f"and {ISLAND_BYTES / 2**30:.0f} GiB are allowed an island: use moves=0, which needs "
            "less, or fewer particles, or thin the counts"
        )


def warn_of_error(result: "SMCResult", journey: Journey, target: float, max_particles: int) -> None:
    """Warn if an estimate cannot be trusted, or is not as exact as it should be."""
    if result.spread > TRUSTED:
        text = (
            f"islands of {result.particles} particles give estimates of log p(X) that differ by "
            f"{result.spread:.1f} nats (standard deviation): the value is likely too low and its "
            "standard error too small"
        )
        if journey.moves:
            needed = needed_particles(result.spread, result.particles * len(result.island_log_z))
            text += f"; it may take {float(f'{needed:.1g}'):.0f} particles to change that"
    elif not result.reached:
        text = f"the standard error is {result.standard_error:.2g} nats, not {target:.2g}"
    else:
        return
    text += f"; raise max_particles beyond {max_particles}, or thin the counts"
    warnings.warn(text, SamplingWarning, stacklevel=3)

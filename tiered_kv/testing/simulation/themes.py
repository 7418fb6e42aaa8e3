"""What a seed is about: a scene, or none, and tiers that it means something to."""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from tiered_kv.testing.simulation.acting import SCENES, Scene, nothing
from tiered_kv.testing.simulation.directories import NUM_DISKS, live_on_directories
from tiered_kv.testing.simulation.scrubbing import SCRUBS
from tiered_kv.testing.simulation.shapes import Shape, drawn_shape, scrubbed
from tiered_kv.testing.simulation.tape import Tape

_WITH_SCENES: Final = ("hand_plans", "meetings", "neighbours", "overwriting", "ranks", "scenes")
_OF_A_SERVER: Final = ("client_planners", "clients") if find_spec("msgspec") is not None else ()
"""Modules that need the extra ``host``: without it no seed is about clients."""
for _each in (*_WITH_SCENES, *_OF_A_SERVER):
    import_module(f"tiered_kv.testing.simulation.{_each}")
_ALL: Final = sorted(SCENES, key=lambda scene: scene.__name__)  # whichever was imported first
THEMES: Final = [scene for scene in _ALL for _ in range(max(1, SCENES[scene][1]))]
"""What seeds are about; what more of them are about is here more often."""
_ANYWHERE: Final = [scene for scene in _ALL if not SCENES[scene][1]]
_ABOUT_ONE: Final = 0.9
"""How many seeds are about one scene, and on tiers for it."""
_SCRUBBED: Final = 0.02
"""How many others have tiers that are scrubbed."""
_MOST_DRAWN: Final = 100


def scene_for(shape: Shape, number: int) -> Scene:
    """Choose one that means something to such tiers."""
    suited = [each for each in _ANYWHERE if suits(each, shape)]
    return suited[number % len(suited)] if suited else nothing


def suits(scene: Scene, shape: Shape) -> bool:
    """Say whether a scene means something to such tiers."""
    return scene is nothing or SCENES[scene][0](shape)


def drawn_theme(tape: Tape) -> tuple[Scene, Shape]:
    """Draw the scene that a seed is about, or none, and tiers that it means something to."""
    theme = tape.pick("plan", THEMES) if tape.chance("plan", _ABOUT_ONE) else nothing
    for _ in range(_MOST_DRAWN):
        shape = drawn_shape(tape)
        if suits(theme, shape):
            break
    else:
        theme = nothing
    if theme is live_on_directories:
        shape = replace(shape, num_disks=2 + tape.draw("plan", NUM_DISKS - 1), changes_disks=True)
    is_scrubbed = theme in SCRUBS or tape.chance("plan", _SCRUBBED)
    return theme, scrubbed(shape, tape) if is_scrubbed else shape

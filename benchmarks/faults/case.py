"""One step of a class of faults on one tier: ``case.py TIER CLASS STEP FOLDER``, in the tier's environment.

Says what came of what as it comes, a line of JSON each after `MARK`; `run.py` puts it together.
"""

import importlib
import json
import os
import pathlib
import sys

from classes import CLASSES, Bench
from driver import NotApplicableError, Setting
from medium import Medium

MARK = "said: "


def say(*said: str) -> None:
    """Tell `run.py`, past what engines print."""
    os.write(1, f"\n{MARK}{json.dumps(said)}\n".encode())


def main(tier: str, name: str, step: int, folder: pathlib.Path) -> None:
    """Run the step; an error that it does not expect ends the process with its traceback."""
    module = importlib.import_module(f"drive_{tier}")
    say("versions", "", module.VERSIONS)
    try:
        CLASSES[name][step](Bench(module.TIER, Setting(folder / "data"), Medium(folder / "order"), say))
    except NotApplicableError as error:
        say("note", "not applicable", str(error))
    os._exit(0)  # what is to be closed is closed; threads of what hung would be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4]))

"""Steps of classes of faults on one tier: ``case.py TIER FOLDER``, in the tier's environment.

The tier is imported once. For each line of stdin, the name of a class and the number of a step, a fork runs that step
and says what came of what as it comes, a line of JSON each after `MARK`; `outcome.py` puts it together.
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
BEGUN, ENDED = "begun", "ended"


def say(*said: str) -> None:
    """Tell `outcome.py`, past what engines print."""
    os.write(1, f"\n{MARK}{json.dumps(said)}\n".encode())


def main(tier: str, folder: pathlib.Path) -> None:
    """Run steps until there are no more; an error that one does not expect ends its process with its traceback."""
    module = importlib.import_module(f"drive_{tier}")
    for line in sys.stdin:
        name, step = json.loads(line)
        process = os.fork()
        if not process:
            os.setsid()  # else what it started would outlive it, if it hangs
            say("versions", "", module.VERSIONS)
            try:
                CLASSES[name][step](Bench(module.TIER, Setting(folder / "data"), Medium(folder / "order"), say))
            except NotApplicableError as error:
                say("note", "not applicable", str(error))
            os._exit(0)  # what is to be closed is closed; threads of what hung would be waited for
        say(BEGUN, "", str(process))
        say(ENDED, "", str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
